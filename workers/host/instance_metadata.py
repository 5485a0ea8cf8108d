"""Reads the notices of EC2's instance metadata: interruption of a spot instance, and recommendation to rebalance."""

from __future__ import annotations

import http.client
import json
import logging
import os
import threading
import urllib.parse
from datetime import datetime

from workers.host import host_facts
from workers.messages.status import Notice

log = logging.getLogger(__name__)

ADDRESS = "http://169.254.169.254"
VARIABLE = "COREWRIGHT_METADATA_URL"  # for tests, which have a service of their own
PERIOD_S = 5.0  # AWS recommends to look every 5 s: the notice comes two minutes before the end
REPLY_S = 1.0
TOKEN_S = 21_600  # the longest that a token may live
INTERRUPTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
UNAUTHORIZED, NOT_FOUND = 401, 404


class MetadataService:
    """A client of the instance metadata service, version 2: each request carries a token of the session."""

    def __init__(self, address: str) -> None:
        self._host = urllib.parse.urlsplit(address).netloc
        self._token = ""

    def notice(self) -> Notice | None:
        """Returns the notice of this instance, if it has one. Raises OSError if the service replies otherwise.

        A recommendation to rebalance has no deadline; an interruption that follows it has.
        """
        action = self._read(INTERRUPTION)
        if action is not None:
            return Notice(cause="spot interruption", until=_unix_time(action, "time"))
        if self._read(REBALANCE) is not None:
            return Notice(cause="rebalance recommendation")
        return None

    def _read(self, path: str) -> bytes | None:
        """Returns a value of the instance; None: it has none. Renews a token that the service rejects."""
        for renewed in (False, True):
            if renewed or not self._token:
                status, body = self._request(
                    "PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
                )
                if status != http.client.OK:
                    raise OSError(f"the instance metadata service gives no token: status {status}")
                self._token = body.decode("ascii", "replace")
            status, body = self._request("GET", path, {"X-aws-ec2-metadata-token": self._token})
            if status != UNAUTHORIZED:
                break
        if status == NOT_FOUND:
            return None
        if status != http.client.OK:
            raise OSError(f"the instance metadata service answers {path} with status {status}")
        return body

    def _request(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._host, timeout=REPLY_S)  # never through a proxy
        try:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read(10_000)
        except http.client.HTTPException as error:
            raise OSError(f"the instance metadata service does not speak HTTP: {error!r}") from None
        finally:
            connection.close()


def _unix_time(body: bytes, key: str) -> float:
    """Returns the time in a JSON object. Raises OSError."""
    try:
        return datetime.fromisoformat(str(json.loads(body)[key]).replace("Z", "+00:00")).timestamp()
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(f"the instance metadata service has no {key}: {error!r}") from None


class NoticeWatch:
    """Looks for a notice in a thread, on machines that have the service."""

    def __init__(self) -> None:
        self.notice: Notice | None = None
        self._closed = threading.Event()
        address = os.environ.get(VARIABLE)
        if address is None and host_facts.instance_type() is not None:
            address = ADDRESS
        if address is not None:
            threading.Thread(target=self._watch, args=(address,), name="instance metadata", daemon=True).start()

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()

    def _watch(self, address: str) -> None:
        """Without a reply the last notice stays: an instance that ends may lose its network first."""
        service, silent = MetadataService(address), False
        while not self._closed.is_set():
            try:
                self.notice, silent = service.notice(), False
            except OSError as error:
                if not silent:
                    log.warning("notices of the instance are not known: %s", error)
                silent = True
            self._closed.wait(PERIOD_S)
