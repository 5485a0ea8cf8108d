"""The admin API from the command line's side, with the standard library only: the CLI must start at once."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

from orchestrator.access.audit_log import caller
from orchestrator.cli.output import say
from orchestrator.fleet.controller_settings import ADMIN_PATH, BY_HEADER
from orchestrator.process.failure import Failed
from orchestrator.process.home import FleetRecord, Home, daemon_alive
from placements.spec.problems import Problem

T = TypeVar("T")
DEADLINE_S = 10.0
PLAN_DEADLINE_S = 60.0  # it reads each model's config.json
CONTROLLER_AWAY_S = 30.0  # a restart takes 2 s
RETRY_S = 0.2


class FleetRefused(Failed):
    """The controller's own word: its id, its hint, and the problems of the spec that it was given."""

    def __init__(self, id: str, what: str, hint: str, problems: Sequence[Problem]) -> None:
        super().__init__(id, what, hint)
        self.problems = tuple(problems)


@dataclass(frozen=True)
class AdminClient:
    """Speaks to one fleet. ``record`` is None when the address came from the environment."""

    url: str
    token: str
    record: FleetRecord | None

    def get(self, path: str, query: Mapping[str, Any] | None = None) -> Any:
        """The JSON below /admin/v1; what is None in the query is left out. Raises Failed."""
        given = {key: value for key, value in (query or {}).items() if value is not None}
        deadline_s = DEADLINE_S + float(given.get("wait_s", 0.0))
        return self._ask("GET", f"{path}?{urlencode(given)}" if given else path, None, deadline_s)

    def post(self, path: str, body: Mapping[str, Any] | None = None, deadline_s: float = DEADLINE_S) -> Any:
        """As ``get``."""
        return self._ask("POST", path, json.dumps(body or {}).encode(), deadline_s)

    def post_spec(self, path: str, spec: tuple[str, str, str], **more: Any) -> Any:
        """Ask about a spec: its text, its file's name and its folder."""
        text, file, base_dir = spec
        return self.post(path, {"text": text, "file": file, "base_dir": base_dir, **more}, PLAN_DEADLINE_S)

    def patiently(self, path: str, query: Mapping[str, Any] | None = None) -> Any:
        """As ``get``, through a restart of the controller."""
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

    def _ask(self, method: str, path: str, body: bytes | None, deadline_s: float) -> Any:
        import http.client  # 50 ms, which a command without a fleet need not wait for

        parts = urlsplit(self.url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.hostname is None or parts.scheme not in ("http", "https") or port == -1:
            raise Failed("fleet-url-wrong", f"{self.url!r} is no address", "COREWRIGHT_URL=http://127.0.0.1:PORT")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname, port, timeout=deadline_s)
        headers = {"Authorization": f"Bearer {self.token}", BY_HEADER: caller()}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.request(method, f"{ADMIN_PATH}/{path}", body, headers)
            response = connection.getresponse()
            told = response.read()
        except (OSError, http.client.HTTPException) as error:
            what = f"the controller at {self.url} does not answer: {error or type(error).__name__}"
            raise Failed("fleet-unreachable", what, "is it still starting? `corewright status` again") from None
        finally:
            connection.close()
        try:
            answer = json.loads(told)
        except ValueError:
            raise Failed("fleet-unreachable", f"{self.url} is no admin API", "see COREWRIGHT_URL") from None
        if response.status >= 400:
            raise _refusal(f"{method} {path}: {response.status}", answer, response.reason)
        return answer


def _refusal(asked: str, answer: Any, reason: str) -> Failed:
    error = answer.get("error") if isinstance(answer, dict) else None
    error = error if isinstance(error, dict) else {}
    code, message = str(error.get("code", "")), str(error.get("message", reason))
    if "-" in code:  # a problem's id; codes of HTTP have underscores
        problems = [Problem(**problem) for problem in answer.get("problems", ())]
        return FleetRefused(code, message, str(error.get("hint", "")), problems)
    hint = "is it the admin API's address and token? see COREWRIGHT_URL, COREWRIGHT_TOKEN"
    return Failed("fleet-refused", f"{asked} {message}", hint)


def find_fleet() -> AdminClient | None:
    """The fleet named by COREWRIGHT_URL and COREWRIGHT_TOKEN, else the one of `$COREWRIGHT_HOME`, if it lives."""
    home = Home.from_environment()
    record = home.read_record()
    url = os.environ.get("COREWRIGHT_URL")
    if url:
        ours = record.token if record is not None and record.admin_url == url.rstrip("/") else ""  # for no one else
        return AdminClient(url.rstrip("/"), os.environ.get("COREWRIGHT_TOKEN") or ours, None)
    if record is None or not daemon_alive(record):
        return None
    return AdminClient(record.admin_url, record.token, record)


def unless_for_other_hosts(name: str, offline: bool, answer: Callable[[AdminClient | None], T]) -> T:
    """Returns the answer of the running fleet about the spec ``name``; with ``offline``, or where none runs, the one
    without a fleet. So it does for a spec of other hosts, which a line on stderr reports."""
    fleet = None if offline else find_fleet()
    try:
        return answer(fleet)
    except FleetRefused as refused:
        if refused.problem.id != "hosts-changed":
            raise
    say(f"{name} is for other hosts than the running fleet: planned without it, as with --offline")
    return answer(None)


def the_fleet() -> AdminClient:
    """As ``find_fleet``; raises Failed `no-fleet` when there is none."""
    client = find_fleet()
    if client is None:
        what = f"no fleet runs ({Home.from_environment().record_file} names none that lives)"
        raise Failed("no-fleet", what, "corewright up SPEC; or set COREWRIGHT_URL and COREWRIGHT_TOKEN")
    return client
