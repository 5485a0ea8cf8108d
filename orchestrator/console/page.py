"""What the console's page gets beside the admin API: its files, and chats with a gateway; pages of other origins get
nothing.

The files have no secrets, so they need no key. What they show comes from the admin API and from `/console/stream`,
which do: a page sends the key that its user has entered as a bearer token, never as a cookie.
"""

from __future__ import annotations

import logging
import mimetypes
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from orchestrator.console.columns import PAGE_TABLES
from orchestrator.gateway.http.exchange import Exchange
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.process.addresses import is_loopback
from orchestrator.process.version import corewright_version
from placements.facts.topology import TOPOLOGIES
from placements.spec.json_schema import json_schema

log = logging.getLogger(__name__)

CONSOLE_PATH = "/console"
FACTS = "facts.json"  # what the page knows of hardware, specs, tables and the admin API
CHAT = "/v1/chat/completions"
PLAYGROUND_PATH = f"{CONSOLE_PATH}/gateway{CHAT}"
KEY = b"x-corewright-inference-key"  # the request's own key has opened the console
PASSED = ("content-type", "x-corewright-replica", "x-corewright-decision", "x-corewright-overhead-ms", "retry-after")

_STATIC = Path(__file__).parent / "static"
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # nothing foreign can become HTML: the page makes only text nodes
        "trusted-types 'none'",
    )
)
HEADERS = tuple(
    (name.encode(), value.encode())
    for name, value in {
        "content-security-policy": _POLICY,
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
    }.items()
)
STREAMED = (*HEADERS, (b"x-accel-buffering", b"no"))  # a proxy is to pass each piece on at once


class ConsolePage:
    """The files of the page, in memory: a few hundred kilobytes."""

    def __init__(self, url: str | None, calls: Mapping[str, Mapping[str, str]]) -> None:
        """``url`` is the public address of the page, as `console_url`; ``calls`` are the admin API's methods and paths
        by the names of the operations."""
        parts = urlsplit(url or "")
        self._name, self._origin = parts.hostname or "", f"{parts.scheme}://{parts.netloc}" if url else ""
        self._calls = calls

    @cached_property
    def _facts(self) -> bytes:
        """The JSON of `FACTS`, made once: the schema of specs takes milliseconds."""
        topologies = {name: {"devices": facts.devices, "link": facts.link} for name, facts in TOPOLOGIES.items()}
        return msgspec.json.encode(
            {
                "version": corewright_version(),
                "topologies": topologies,
                "schema": json_schema(),
                "tables": dict(PAGE_TABLES),
                "calls": self._calls,
            }
        )

    def has(self, path: str) -> bool:
        """Returns whether a path is the page or one of its files."""
        return path in (CONSOLE_PATH, f"{CONSOLE_PATH}/") or path.removeprefix(f"{CONSOLE_PATH}/") in _files()

    def answer(self, exchange: Exchange) -> None:
        """Answers a request for a path that it ``has``. Raises ApiError for any method but GET."""
        request = exchange.request
        if request.method not in ("GET", "HEAD"):
            message = f"{request.path} does not support {request.method}."
            raise ApiError(405, message, code="method_not_allowed", allow="GET")
        if request.path == CONSOLE_PATH:  # its files have relative addresses, also below a path of a proxy
            location = (b"location", f"{CONSOLE_PATH.removeprefix('/')}/".encode())
            exchange.respond(308, b"", headers=(*HEADERS, location))
            return
        name = request.path.removeprefix(f"{CONSOLE_PATH}/") or "index.html"
        content, kind = _files()[name]
        exchange.respond(200, [self._facts if name == FACTS else content], headers=HEADERS, content_type=kind)

    def refuse_others(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises ApiError for a request that a page of another origin, or of a name that was rebound to loopback, sent.

        1. its Host is neither a name of loopback nor the public name, or it has none -> 421
        2. it has an Origin, and that is neither the page that a Host of loopback serves nor the public address, whose
           proxy may send a Host of loopback -> 403
        """
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = _name(host)
        if not (is_loopback(name) or (self._name and name == self._name)):  # 1
            message = f"The controller is not {host[:200]!r}: use 127.0.0.1 or localhost, or set `console_url` of `up`."
            raise ApiError(421, message, code="wrong_host")
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        own = (self._origin, f"http://{host}" if is_loopback(name) else "")
        if b"origin" in headers and (not origin or origin not in own):  # 2
            raise ApiError(403, "Pages of other origins are refused.", code="foreign_origin")


def _name(host: str) -> str:
    """Returns the name in a Host header, which may have a port; empty if it is malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


@cache
def _files() -> Mapping[str, tuple[bytes, bytes]]:
    """Returns content and type of each file by its path below /console/; that of the facts is empty."""
    files = {
        path.relative_to(_STATIC).as_posix(): (path.read_bytes(), _type(path))
        for path in sorted(_STATIC.rglob("*"))
        if path.is_file()
    }
    return {**files, FACTS: (b"", b"application/json")}


def _type(path: Path) -> bytes:
    kind = {".js": "text/javascript"}.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "text/plain"
    return f"{kind}; charset=utf-8".encode() if kind.startswith("text/") else kind.encode()


class Entrance(NamedTuple):
    """A gateway that serves clients."""

    url: str
    nearby: bool  # on the controller's machine: its certificate need not be for that address


class Playground:
    """Forwards one chat after another, streamed. A page that leaves ends its request."""

    def __init__(self, entrance: Callable[[], Entrance | None]) -> None:
        self._entrance = entrance

    async def chat(self, exchange: Exchange) -> None:
        """Answers with what the gateway answers. Raises ApiError 502 if none can be reached."""
        import aiohttp  # not with the first status of a controller

        entrance = self._entrance()
        if entrance is None:
            raise ApiError(502, "No gateway of the fleet serves.", code="gateway_unreachable")
        request = exchange.request
        headers = {"content-type": "application/json", "x-corewright-explain": "true", "x-request-id": exchange.id}
        if key := request.headers.get(KEY):
            headers["authorization"] = f"Bearer {key.decode('latin-1')}"
        connector = aiohttp.TCPConnector(ssl=False) if entrance.nearby else aiohttp.TCPConnector()
        timeout = aiohttp.ClientTimeout(total=None, connect=10.0)
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.post(entrance.url + CHAT, data=request.body, headers=headers, allow_redirects=False) as answer,
            ):
                passed = [(name.encode(), answer.headers[name].encode()) for name in PASSED if name in answer.headers]
                exchange.begin(answer.status, (*STREAMED, *passed))
                async for piece in answer.content.iter_any():
                    exchange.write(piece)
                exchange.end()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.warning("the playground's request to %s failed: %s", entrance.url, error)
            if exchange.began:
                exchange.connection.abort()  # an incomplete answer must not look like a complete one
                return
            raise ApiError(502, f"The gateway at {entrance.url}: {error}", code="gateway_unreachable") from None
