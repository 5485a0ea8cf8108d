"""The files of the console's page.

The files have no secrets, so they need no key. What they show comes from the admin API and from `/console/stream`,
which do: a page sends the key that its user has entered as a bearer token, never as a cookie.
"""

from __future__ import annotations

import mimetypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

from orchestrator.gateway.http.exchange import Exchange, Request
from orchestrator.gateway.openai.errors import ApiError
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
STREAMED = (*HEADERS, (b"x-accel-buffering", b"no"))  # a proxy is to pass each piece on at once


def is_file(path: str) -> bool:
    """Returns whether a path is the page or one of its files."""
    return path in (CONSOLE_PATH, f"{CONSOLE_PATH}/") or path.removeprefix(f"{CONSOLE_PATH}/") in _files()


def answer_file(exchange: Exchange) -> None:
    """Answers a request for a path that `is_file`. Raises ApiError for any method but GET."""
    request: Request = exchange.request
    if request.method not in ("GET", "HEAD"):
        message = f"{request.path} does not support {request.method}."
        raise ApiError(405, message, code="method_not_allowed", allow="GET")
    if request.path == CONSOLE_PATH:  # its files have relative addresses, also below a path of a proxy
        exchange.respond(308, b"", headers=(*HEADERS, (b"location", f"{CONSOLE_PATH.removeprefix('/')}/".encode())))
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
