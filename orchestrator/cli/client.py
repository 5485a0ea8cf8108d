"""The admin API from the command line's side, with the standard library only: the CLI must start at once."""

from __future__ import annotations

import http.client
import json
import os
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from orchestrator.failure import Failed
from orchestrator.fleet import ADMIN_PATH
from orchestrator.home import FleetRecord, Home, daemon_alive

DEADLINE_S = 10.0


@dataclass(frozen=True)
class AdminClient:
    """Speaks to one fleet. ``record`` is None when the address came from the environment."""

    url: str
    token: str
    record: FleetRecord | None

    def get(self, path: str) -> Any:
        """The JSON below /admin/v1. Raises Failed."""
        return self._ask("GET", path)

    def post(self, path: str) -> Any:
        """As ``get``."""
        return self._ask("POST", path)

    def _ask(self, method: str, path: str) -> Any:
        parts = urlsplit(self.url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.hostname is None or parts.scheme not in ("http", "https") or port == -1:
            raise Failed("fleet-url-wrong", f"{self.url!r} is no address", "COREWRIGHT_URL=http://127.0.0.1:PORT")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname, port, timeout=DEADLINE_S)
        try:
            connection.request(method, f"{ADMIN_PATH}/{path}", headers={"Authorization": f"Bearer {self.token}"})
            response = connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            what = f"the controller at {self.url} does not answer: {error}"
            raise Failed("fleet-unreachable", what, "is it still starting? `corewright status` again") from None
        finally:
            connection.close()
        try:
            answer = json.loads(body)
        except ValueError:
            raise Failed("fleet-unreachable", f"{self.url} is no admin API", "see COREWRIGHT_URL") from None
        if response.status >= 400:
            message = answer.get("error", {}).get("message", response.reason)
            raise Failed(
                "fleet-refused",
                f"{method} {path}: {response.status} {message}",
                "is it the admin API's address and token? see COREWRIGHT_URL, COREWRIGHT_TOKEN",
            )
        return answer


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


def the_fleet() -> AdminClient:
    """As ``find_fleet``; raises Failed `no-fleet` when there is none."""
    client = find_fleet()
    if client is None:
        what = f"no fleet runs ({Home.from_environment().record_file} names none that lives)"
        raise Failed("no-fleet", what, "corewright up SPEC; or set COREWRIGHT_URL and COREWRIGHT_TOKEN")
    return client
