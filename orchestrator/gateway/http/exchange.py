"""A client's request and the answer to it."""

from __future__ import annotations

import http
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from orchestrator.gateway.openai.errors import ApiError, invalid

if TYPE_CHECKING:
    from orchestrator.access.keys import ApiKey
    from orchestrator.gateway.http.connection import HttpConnection
    from orchestrator.gateway.key_limits import Grant
    from orchestrator.gateway.telemetry.request_spans import TraceHandle


Headers = Sequence[tuple[bytes, bytes]]
T = TypeVar("T")
JSON = b"application/json"
_STATUS = {status.value: b"HTTP/1.1 %d %s\r\n" % (status.value, status.phrase.encode()) for status in http.HTTPStatus}
_encode = msgspec.json.encode
MAX_JSON_DEPTH = 100  # lists and objects inside each other; a JSON schema may have 32 levels of schemas
MAX_JSON_CONTAINERS = 2**17  # lists and objects together: counting their nesting takes 5 ms
MAX_LIST_BYTES = 1024  # of a header that lists names
_PRINTABLE = range(0x20, 0x7F)
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # as signed bytes: 1 and -1
_OTHERS = bytes(set(range(256)) - set(b'[{]}"'))


class Request(msgspec.Struct, eq=False):
    """A complete request."""

    method: str
    path: str  # as sent, percent-encoded, without the query
    query: str
    headers: dict[bytes, bytes]  # names in lower case; repeated ones are joined with ", "
    body: bytes
    version: str  # "1.1" or "1.0"
    keep_alive: bool
    received_at: float  # monotonic, of its last byte


class Exchange(msgspec.Struct, eq=False):
    """One request and its answer: ``respond`` once, or ``begin``, ``write`` and ``end``."""

    request: Request
    connection: HttpConnection
    id: str  # the client's x-request-id, or a new one
    key: ApiKey | None = None
    route: Any = None  # the handler's record of a route of this path
    parameters: Mapping[str, str] = MappingProxyType({})  # of the path
    status: int = 0
    began: bool = False  # the head is written
    ended: bool = False
    on_gone: Callable[[], None] | None = None  # called when the client disconnects before the end
    trace: TraceHandle | None = None
    note: Any = None  # the handler's data for log and metrics
    code: str | None = None  # of the error that it ended with
    grant: Grant | None = None  # the key's reservation, to be settled at the end
    names: Mapping[str, str] = MappingProxyType({})  # the client's names of OpenAI's fields, for errors
    _extra: Headers = ()
    _chunked: bool = False

    def respond(
        self, status: int, body: bytes | list[bytes], *, headers: Headers = (), content_type: bytes = JSON
    ) -> None:
        """Writes the whole answer; a large body in parts. Does nothing when the client is gone."""
        if self.ended:
            return
        self.status = status
        request = self.request
        parts = [_STATUS[status], self.connection.server.date]
        if body or status not in (204, 304):
            size = len(body) if isinstance(body, bytes) else sum(map(len, body))
            parts.append(b"content-type: %b\r\ncontent-length: %d\r\n" % (content_type, size))
        self._head(parts, headers)
        if isinstance(body, list):
            self.connection.write(b"".join(parts))
            if request.method != "HEAD":
                self.connection.write_large(body)
        else:
            if request.method != "HEAD":
                parts.append(body)
            self.connection.write(b"".join(parts))
        self._finish()

    def fail(self, error: ApiError) -> None:
        """Answers with an error."""
        error.rename(self.names)
        headers = [(name.lower().encode(), value.encode()) for name, value in error.headers().items()]
        self.code = error.code or str(error.status)
        self.respond(error.status, _encode(self.connection.server.body_of(error, self)), headers=headers)

    def begin(self, status: int, headers: Headers, first: bytes = b"") -> None:
        """Writes the head of a streamed answer and its first piece."""
        if self.ended:
            return
        self.began = True
        self.status = status
        self._chunked = self.request.version == "1.1"
        parts = [_STATUS[status], self.connection.server.date]
        if self._chunked:
            parts.append(b"transfer-encoding: chunked\r\n")
        else:
            self.request.keep_alive = False  # in HTTP/1.0 the end of the connection ends the answer
        self._head(parts, headers)
        if first:
            parts.append(b"%x\r\n%b\r\n" % (len(first), first) if self._chunked else first)
        self.connection.write(b"".join(parts))

    def write(self, piece: bytes) -> None:
        """Writes another piece of a streamed answer, not empty."""
        if not self.ended:
            self.connection.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self._chunked else piece)

    def end(self, last: bytes = b"") -> None:
        """Ends a streamed answer, with a last piece."""
        if self.ended:
            return
        if self._chunked:
            last = b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last) if last else b"0\r\n\r\n"
        if last:
            self.connection.write(last)
        self._finish()

    def add_headers(self, headers: Headers) -> None:
        """Adds headers to the answer, also to an error."""
        self._extra = (*self._extra, *headers)

    def gone(self) -> None:
        """Notifies the handler that the connection is lost."""
        if not self.ended:
            self.ended = True
            if self.on_gone is not None:
                self.on_gone()

    def _head(self, parts: list[bytes], headers: Headers) -> None:
        parts.append(b"x-request-id: %b\r\n" % self.id.encode())
        for name, value in (*headers, *self._extra) if self._extra else headers:
            parts.append(b"%b: %b\r\n" % (name, value))
        if not self.request.keep_alive:
            parts.append(b"connection: close\r\n")
        elif self.request.version == "1.0":
            parts.append(b"connection: keep-alive\r\n")
        parts.append(b"\r\n")

    def _finish(self) -> None:
        self.ended = True
        self.on_gone = None
        self.connection.finished(self)


def header_list(names: Sequence[str]) -> bytes:
    """Returns names of a client as the value of a header: their ASCII characters, at most 1 KiB."""
    joined = ", ".join(names).encode("ascii", "replace")[:MAX_LIST_BYTES]
    return bytes(byte if byte in _PRINTABLE else ord("?") for byte in joined).strip()


def checked(data: bytes) -> bytes:
    """Returns ``data``, which need not be JSON. Raises msgspec.DecodeError for JSON over a limit."""
    if data.count(b"[") + data.count(b"{") <= MAX_JSON_DEPTH:
        return data
    without_escapes = data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data
    brackets_and_quotes = without_escapes.translate(_STEPS, _OTHERS).replace(b'""', b"")  # two enclose no bracket
    steps = b"".join(brackets_and_quotes.split(b'"')[::2])  # every second part is a text
    if steps.count(1) > MAX_JSON_CONTAINERS:
        raise msgspec.DecodeError(f"more than {MAX_JSON_CONTAINERS} lists and objects")
    if max(accumulate(array("b", steps)), default=0) > MAX_JSON_DEPTH:
        raise msgspec.DecodeError(f"lists and objects in more than {MAX_JSON_DEPTH} levels")
    return data


def decoded(data: bytes, kind: type[T], subject: str, param: str | None = None) -> T:
    """Returns JSON as a value of that type. Raises ApiError 400 for other data, and for JSON over a limit."""
    try:
        return msgspec.json.decode(checked(data), type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise invalid(f"{subject}: {error}", param=param) from None
