"""The addresses of the console, and the check that keeps pages of all others away from the controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from orchestrator.gateway.openai.errors import ApiError
from orchestrator.process.addresses import is_loopback


@dataclass(frozen=True)
class OwnPages:
    """The pages that may send requests: the console at any name and port of loopback, and at its public address."""

    name: str = ""  # of the public address; empty: it has none
    origin: str = ""

    @classmethod
    def at(cls, url: str | None) -> OwnPages:
        """Returns those with a public address as `console_url` has it."""
        parts = urlsplit(url or "")
        return cls(parts.hostname or "", f"{parts.scheme}://{parts.netloc}") if url else cls()

    def refuse_others(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises ApiError for a request that a page of another origin, or of a name that was rebound to loopback, sent.

        1. its Host is neither a name of loopback nor the public name, or it has none -> 421
        2. it has an Origin, and that is neither the page that a Host of loopback serves nor the public address, whose
           proxy may send a Host of loopback -> 403
        """
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = _name(host)
        if not (is_loopback(name) or (self.name and name == self.name)):  # 1
            message = f"The controller is not {host[:200]!r}: use 127.0.0.1 or localhost, or set `console_url` of `up`."
            raise ApiError(421, message, code="wrong_host")
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        own = (self.origin, f"http://{host}" if is_loopback(name) else "")
        if b"origin" in headers and (not origin or origin not in own):  # 2
            raise ApiError(403, "Pages of other origins are refused.", code="foreign_origin")


def _name(host: str) -> str:
    """Returns the name in a Host header, which may have a port; empty if it is malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
