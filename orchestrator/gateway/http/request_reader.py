"""Reads requests from the bytes of one connection, with httptools, and enforces their limits."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import httptools

from orchestrator.gateway.http.exchange import Request
from orchestrator.gateway.openai import errors

if TYPE_CHECKING:
    from orchestrator.gateway.http.connection import HttpConnection

MAX_HEADERS = 100  # lines
MIN_LINE_BYTES = 3  # of a header beside its name and value: a colon and the end of the line
LARGE_BYTES = 2**16  # a larger body is read only after its sender is authenticated
MAX_UNREAD_BYTES = 2**30  # of incomplete bodies, of all connections


class RequestReader:
    """Calls ``begun``, ``received`` and ``refuse`` of its connection; httptools calls the methods ``on_...``."""

    def __init__(self, connection: HttpConnection) -> None:
        self.reading = False  # a request has begun and is incomplete
        self.stopped = False  # nothing more is read
        self._connection = connection
        self._server = connection.server
        self._limit = connection.server.settings.max_header_bytes
        self._parser: Any = httptools.HttpRequestParser(self)
        self._in_head = True
        self._unfinished_bytes = 0  # received since the last complete head, piece of a body or end
        self._progress = 0  # complete heads, pieces of bodies and ends
        self._body_bytes = 0
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._repeated: dict[bytes, list[bytes]] = {}  # all values of a header that came more than once
        self._head_lines = 0
        self._head_bytes = 0  # of the target and the headers, without padding: a head may follow another in one piece
        self._body: bytes | bytearray = b""

    @property
    def path(self) -> str:
        """The path of the incomplete request, as far as it is known."""
        return self._url.partition(b"?")[0].decode("ascii", "replace") if self.reading else ""

    def feed(self, data: bytes) -> None:
        """Parses what has arrived, in pieces of at most what a head, or trailers, may still have."""
        at = 0
        while at < len(data) and not self.stopped:
            piece = data[at : at + self._limit - self._unfinished_bytes]
            at += len(piece)
            progress = self._progress
            self._parse(piece)
            if self._progress != progress:
                self._unfinished_bytes = 0
            else:
                self._unfinished_bytes += len(piece)
                if self._unfinished_bytes >= self._limit:
                    self._connection.refuse(errors.headers_too_large(self._limit))

    def _parse(self, data: bytes) -> None:
        while data and not self.stopped:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as error:
                data = self._without_upgrade(data[error.args[0] :])
            except httptools.HttpParserError as error:
                self._connection.refuse(errors.not_http(str(error)))

    def on_message_begin(self) -> None:
        if self.stopped:
            return
        self.reading = True
        self._in_head = True
        self._url = b""
        self._headers = {}
        self._repeated = {}
        self._head_lines = self._head_bytes = 0
        if self._body_bytes:
            self._drop_body()
        self._connection.begun()

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head or self.stopped:
            return  # a trailer must not change the head
        self._head_lines += 1
        self._head_bytes += len(name) + len(value) + MIN_LINE_BYTES
        if self._head_bytes > self._limit or self._head_lines > MAX_HEADERS:
            self._connection.refuse(errors.headers_too_large(self._limit))
            return
        name, headers = name.lower(), self._headers
        if name in headers:
            self._repeated.setdefault(name, [headers[name]]).append(value)
        else:
            headers[name] = value

    def on_headers_complete(self) -> None:
        if self.stopped:
            return
        settings, headers = self._server.settings, self._headers
        self._in_head = False
        self._progress += 1
        for name, values in self._repeated.items():  # as in RFC 9110: two keys or encodings become one that is unknown
            headers[name] = b", ".join(values)
        host, version = headers.get(b"host"), self._parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self._connection.refuse(errors.not_http(f"HTTP/{version} is not supported; use HTTP/1.1"))
            return
        if b"," in host if host is not None else version == "1.1":  # two are joined above
            self._connection.refuse(errors.not_http("exactly one Host header is required"))  # RFC 9112, 3.2
            return
        size, encoding = int(headers.get(b"content-length") or 0), headers.get(b"transfer-encoding")
        if encoding is not None and (encoding.lower() != b"chunked" or version != "1.1"):
            self._connection.refuse(errors.unknown_encoding("transfer-encoding", encoding.lower()))
        elif b"content-encoding" in headers and headers[b"content-encoding"].lower() != b"identity":
            self._connection.refuse(errors.unknown_encoding("content-encoding", headers[b"content-encoding"]))
        elif size > settings.max_body_bytes:
            self._connection.refuse(errors.body_too_large(settings.max_body_bytes))
        elif (size > LARGE_BYTES or encoding is not None) and (error := self._server.early(headers)):
            self._connection.refuse(error)
        elif b"expect" in headers and headers[b"expect"].lower() == b"100-continue" and self._connection.is_waiting:
            self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        if self.stopped:
            return
        self._body_bytes += len(body)
        self._progress += 1
        server = self._server
        server.unread_bytes += len(body)
        if self._body_bytes > server.settings.max_body_bytes:
            self._connection.refuse(errors.body_too_large(server.settings.max_body_bytes))
        elif server.unread_bytes > MAX_UNREAD_BYTES:
            self._connection.refuse(errors.too_many_bodies())
        elif not self._body:
            self._body = body
        else:  # one buffer: a list of small pieces would take more memory than their bytes
            if type(self._body) is bytes:
                self._body = bytearray(self._body)
            self._body += body

    def on_message_complete(self) -> None:
        self.reading = False
        self._in_head = True
        self._progress += 1
        parser = self._parser
        if self.stopped or parser.should_upgrade():  # the body is still to be read, see _without_upgrade
            return
        path, _, query = self._url.partition(b"?")
        if not path.startswith(b"/") and path != b"*":
            path = _path_of(path)
        try:
            request = Request(
                parser.get_method().decode("ascii"),
                path.decode("ascii"),
                query.decode("ascii"),
                self._headers,
                bytes(self._body),
                parser.get_http_version(),
                parser.should_keep_alive(),
                time.monotonic(),
            )
        except UnicodeDecodeError:
            self._connection.refuse(errors.not_http("the target is not ASCII"))
            return
        self._headers = {}
        self._drop_body()
        self._connection.received(request)

    def _without_upgrade(self, body: bytes) -> bytes:
        """Returns the request without its offer of another protocol, to be parsed again: Java's client sends such an
        offer with every request, and httptools stops before the ``body`` of one. The answer is HTTP/1.1."""
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._connection.refuse(errors.method_not_allowed("CONNECT", "the target of a proxy", ""))
            return b""
        offer = (b"connection", b"upgrade", b"http2-settings")
        closes = b"close" in self._headers.get(b"connection", b"").lower().replace(b" ", b"").split(b",")
        fields = [b"connection: close\r\n"] if closes else []
        fields += [b"%b: %b\r\n" % (name, value) for name, value in self._headers.items() if name not in offer]
        version = self._parser.get_http_version().encode()
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self._url, version, b"".join(fields))
        self._parser = httptools.HttpRequestParser(self)
        return head + body

    def stop(self) -> None:
        """Discards an incomplete request; nothing more is read."""
        self.stopped = True
        self.reading = False
        self._drop_body()

    def close(self) -> None:
        """Stops, and lets go of the parser, which refers back to this object."""
        self.stop()
        self._parser = None

    def _drop_body(self) -> None:
        self._server.unread_bytes -= self._body_bytes
        self._body_bytes = 0
        self._body = b""


def _path_of(target: bytes) -> bytes:
    """Returns the path of a target in absolute form, as sent to a proxy."""
    try:
        return httptools.parse_url(target).path or b"/"
    except httptools.HttpParserInvalidURLError:
        return target
