"""A client of the admin API for the command line, on the standard library only, so that commands start fast."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

import msgspec

from orchestrator.access.audit_log import caller
from orchestrator.cli.output import say
from orchestrator.messages.controller_settings import ADMIN_PATH, BY_HEADER
from orchestrator.messages.fleet_status import FleetStatus
from orchestrator.process.failure import Failed
from orchestrator.process.home import FleetRecord, Home, daemon_alive
from orchestrator.process.version import corewright_version
from placements.spec.problems import Problem

T = TypeVar("T")
DEADLINE_S = 10.0
PLAN_DEADLINE_S = 60.0  # the controller reads each model's config.json
CONTROLLER_AWAY_S = 30.0  # a restart takes 2 s
RETRY_S = 0.2


class FleetRefused(Failed):
    """The controller has rejected a request; ``problems`` are those of the spec in it."""

    def __init__(self, id: str, what: str, hint: str, problems: Sequence[Problem]) -> None:
        super().__init__(id, what, hint)
        self.problems = tuple(problems)


class NoListener(Failed):
    """Nobody listens at the address of the admin API: its controller starts or restarts, or the fleet ends."""


@dataclass(frozen=True)
class AdminClient:
    """A client of one fleet. ``record`` is None if the address came from the environment."""

    url: str
    token: str
    record: FleetRecord | None

    def get(self, path: str, query: Mapping[str, Any] | None = None, deadline_s: float = DEADLINE_S) -> Any:
        """Returns the JSON at ``path`` below /admin/v1. None values are left out of the query. Raises Failed."""
        parameters = {key: value for key, value in (query or {}).items() if value is not None}
        deadline_s += float(parameters.get("wait_s", 0.0))
        return self._request("GET", f"{path}?{urlencode(parameters)}" if parameters else path, None, deadline_s)

    def read(self, kind: type[T], path: str, query: Mapping[str, Any] | None = None, *, retry: bool = False) -> T:
        """Returns the JSON at ``path`` as a value. ``retry``: also while the controller restarts. Raises Failed."""
        return typed((self.get_with_retries if retry else self.get)(path, query), kind)

    def status(self, deadline_s: float = DEADLINE_S) -> FleetStatus:
        """Returns the status of the fleet. Raises Failed."""
        return typed(self.get("status", deadline_s=deadline_s), FleetStatus)

    def post(self, path: str, body: Mapping[str, Any] | None = None, deadline_s: float = DEADLINE_S) -> Any:
        """Returns the JSON reply to a POST. Raises Failed."""
        return self._request("POST", path, json.dumps(body or {}).encode(), deadline_s)

    def post_spec(self, path: str, spec: tuple[str, str, str], **fields: Any) -> Any:
        """Posts a spec: its text, its file name and its folder. Raises Failed."""
        text, file, base_dir = spec
        return self.post(path, {"text": text, "file": file, "base_dir": base_dir, **fields}, PLAN_DEADLINE_S)

    def get_with_retries(self, path: str, query: Mapping[str, Any] | None = None) -> Any:
        """As ``get``, but retries while the controller restarts."""
        began = time.monotonic()
        while True:
            try:
                return self.get(path, query)
            except Failed as failed:
                if failed.problem.id != "fleet-unreachable" or time.monotonic() - began > CONTROLLER_AWAY_S:
                    raise
                if self.record is not None and not daemon_alive(self.record):
                    raise Failed("no-fleet", "the fleet has ended", "corewright up SPEC") from None
                time.sleep(RETRY_S)

    def _request(self, method: str, path: str, body: bytes | None, deadline_s: float) -> Any:
        try:
            parts = urlsplit(self.url)
            port = parts.port
            if parts.hostname is None or parts.scheme not in ("http", "https"):
                raise ValueError
        except ValueError:
            hint = "set COREWRIGHT_URL to an address such as http://127.0.0.1:PORT"
            raise Failed("fleet-url-wrong", f"{self.url!r} is not a valid URL", hint) from None
        if not (self.token.isascii() and self.token.isprintable()):
            raise Failed("fleet-url-wrong", "COREWRIGHT_TOKEN has characters that no token has", "set it again")
        protocol = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = protocol(parts.hostname, port, timeout=deadline_s)
        headers = {"Authorization": f"Bearer {self.token}", BY_HEADER: caller()}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.request(method, f"{parts.path}{ADMIN_PATH}/{path}", body, headers)
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            message = f"the controller at {self.url} does not answer: {error or type(error).__name__}"
            hint = "if the fleet is still starting, retry `corewright status` later"
            kind = NoListener if isinstance(error, ConnectionRefusedError) else Failed
            raise kind("fleet-unreachable", message, hint) from None
        finally:
            connection.close()
        try:
            answer = json.loads(content)
        except ValueError:
            message = f"{self.url} is not an admin API"
            raise Failed("fleet-unreachable", message, "check COREWRIGHT_URL") from None
        if response.status >= 400:
            raise _refusal(f"{method} {path}: {response.status}", answer, response.reason)
        return answer


def typed(answer: Any, kind: type[T]) -> T:
    """Returns an answer of the admin API as a value. Raises Failed if the fleet's version has another form of it."""
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        message = f"the fleet does not answer as corewright {corewright_version()} does: {error}"
        raise Failed("fleet-refused", message, "use the version of corewright that the fleet runs") from None


def _refusal(request: str, answer: Any, reason: str) -> Failed:
    error = answer.get("error") if isinstance(answer, dict) else None
    error = error if isinstance(error, dict) else {}
    code, message = str(error.get("code", "")), str(error.get("message", reason))
    if "-" in code:  # a problem id; HTTP error codes have underscores
        problems = [Problem(**problem) for problem in answer.get("problems", ())]
        return FleetRefused(code, message, str(error.get("hint", "")), problems)
    hint = "check the admin API's address and token: COREWRIGHT_URL, COREWRIGHT_TOKEN"
    return Failed("fleet-refused", f"{request} {message}", hint)


def running_fleet() -> FleetRecord | None:
    """Returns the record of the fleet that runs from `$COREWRIGHT_HOME`."""
    record = Home.from_environment().read_record()
    return record if record is not None and daemon_alive(record) else None


def no_fleet(hint: str) -> Failed:
    record_file = Home.from_environment().record_file
    return Failed("no-fleet", f"no fleet is running ({record_file} is missing or stale)", hint)


def find_fleet() -> AdminClient | None:
    """Returns the fleet of COREWRIGHT_URL and COREWRIGHT_TOKEN, else of `$COREWRIGHT_HOME`; None if it has none."""
    url = os.environ.get("COREWRIGHT_URL")
    if url:
        record = Home.from_environment().read_record()
        is_ours = record is not None and record.admin_url == url.rstrip("/")  # never send the token elsewhere
        token = record.token if record is not None and is_ours else ""
        return AdminClient(url.rstrip("/"), os.environ.get("COREWRIGHT_TOKEN") or token, None)
    record = running_fleet()
    return None if record is None else AdminClient(record.admin_url, record.token, record)


def with_fleet(name: str, offline: bool, answer: Callable[[AdminClient | None], T]) -> T:
    """Returns ``answer`` for the running fleet, or for None with ``offline`` and if no fleet is running.

    For a spec of other hosts than the fleet's it also passes None, and reports this on stderr."""
    fleet = None if offline else find_fleet()
    try:
        return answer(fleet)
    except FleetRefused as refused:
        if refused.problem.id != "hosts-changed":
            raise
    say(f"{name} is for other hosts than the running fleet: planned without it, as with --offline")
    return answer(None)


def the_fleet() -> AdminClient:
    """As ``find_fleet``. Raises Failed `no-fleet` if no fleet is running."""
    client = find_fleet()
    if client is None:
        raise no_fleet("start one with `corewright up SPEC`, or set COREWRIGHT_URL and COREWRIGHT_TOKEN")
    return client
