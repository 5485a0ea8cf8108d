"""The files of the console's page, and the checks that keep pages of other origins away from the controller.

The files have no secrets, so they need no key. What they show comes from the admin API and from `/console/stream`,
which do: a page sends the key that its user has entered as a bearer token, never as a cookie.
"""

from __future__ import annotations

import mimetypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from orchestrator.gateway.http.exchange import Exchange, Request
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.process.addresses import is_loopback
from orchestrator.process.version import corewright_version
from placements.facts.topology import TOPOLOGIES
from placements.spec.json_schema import json_schema

CONSOLE_PATH = "/console"
FACTS = "facts.json"  # what the page knows of hardware and specs

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


def refuse_foreign(headers: Mapping[bytes, bytes]) -> None:
    """Raises ApiError for a request that a page of another origin, or of a name that was rebound to loopback, sent.

    1. its Host is not a name of loopback -> 421
    2. it has an Origin, and that is not the page that the Host serves -> 403
    """
    host = headers.get(b"host", b"").decode("latin-1").lower()
    if host and not _is_loopback(host):  # 1
        message = f"The controller is not {host[:200]!r}: use 127.0.0.1 or localhost, also through a tunnel."
        raise ApiError(421, message, code="wrong_host")
    origin = headers.get(b"origin")
    if origin is not None and origin.decode("latin-1").lower() != f"http://{host}":  # 2
        raise ApiError(403, "Pages of other origins are refused.", code="foreign_origin")


def _is_loopback(host: str) -> bool:
    """Returns whether a Host header, with or without a port, names loopback."""
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


def is_file(path: str) -> bool:
    """Returns whether a path is the page or one of its files."""
    return path in (CONSOLE_PATH, f"{CONSOLE_PATH}/") or path.removeprefix(f"{CONSOLE_PATH}/") in _files()


def answer_file(exchange: Exchange) -> None:
    """Answers a request for a path that `is_file`. Raises ApiError for any method but GET."""
    request: Request = exchange.request
    if request.method not in ("GET", "HEAD"):
        message = f"{request.path} does not support {request.method}."
        raise ApiError(405, message, code="method_not_allowed", allow="GET")
    if request.path == CONSOLE_PATH:  # its files have relative addresses
        exchange.respond(308, b"", headers=(*HEADERS, (b"location", f"{CONSOLE_PATH}/".encode())))
        return
    content, kind = _files()[request.path.removeprefix(f"{CONSOLE_PATH}/") or "index.html"]
    exchange.respond(200, [content], headers=HEADERS, content_type=kind)


@cache
def _files() -> Mapping[str, tuple[bytes, bytes]]:
    """Returns content and type of each file by its path below /console/: a few hundred kilobytes in memory."""
    files = {
        path.relative_to(_STATIC).as_posix(): (path.read_bytes(), _type(path))
        for path in sorted(_STATIC.rglob("*"))
        if path.is_file()
    }
    return {**files, FACTS: (msgspec.json.encode(_facts()), b"application/json")}


def _type(path: Path) -> bytes:
    kind = {".js": "text/javascript"}.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "text/plain"
    return f"{kind}; charset=utf-8".encode() if kind.startswith("text/") else kind.encode()


def _facts() -> dict[str, object]:
    topologies = {name: {"devices": facts.devices, "link": facts.link} for name, facts in TOPOLOGIES.items()}
    return {"version": corewright_version(), "topologies": topologies, "schema": json_schema()}
