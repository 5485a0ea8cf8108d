"""A real S3 server for tests (moto's, in a process of its own), and a proxy before it that plays faults."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests.readable import is_readable

ACCESS_KEY = "AKIACOREWRIGHTMARKED"  # recognizable, so that a test can look for it where it must not be
SECRET_KEY = "secret/marked+0123456789abcdefghijklmnopqrs"
SESSION_TOKEN = "token-marked-0123456789"
REGION = "us-east-1"
INDISCREET = (  # S3 repeats in its errors what it was told and what it should have been signed by
    f"<Message>The security token {SESSION_TOKEN} of {ACCESS_KEY} was told</Message>"
    f"<AWSAccessKeyId>{ACCESS_KEY}</AWSAccessKeyId><Token-0>{SESSION_TOKEN}</Token-0>"
    "<StringToSign>AWS4-HMAC-SHA256\n20261122T000000Z\n20261122/us-east-1/s3/aws4_request</StringToSign>"
    f"<SignatureProvided>{'0' * 64}</SignatureProvided>"
    f"<CanonicalRequest>GET\n/\nX-Amz-Credential={ACCESS_KEY}\nx-amz-security-token:{SESSION_TOKEN}</CanonicalRequest>"
)
START_DEADLINE_S = 60.0
PIECE = 2**16  # bytes that the proxy hands on at once
SERIAL = count(1)
SERVE = """
import os, sys
os.environ["S3_IGNORE_SUBDOMAIN_BUCKETNAME"] = "true"
os.environ["S3_UPLOAD_PART_MIN_SIZE"] = "256"  # S3's is 5 MiB
os.environ["MOTO_S3_DEFAULT_KEY_BUFFER_SIZE"] = "8000000"
from workers.host.process_tree import end_with
end_with(int(sys.argv[1]))
import logging
logging.disable(logging.CRITICAL)
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
import json
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
for line in sys.stdin:
    bucket, keys = json.loads(line)
    for key in keys:
        s3_backends[DEFAULT_ACCOUNT_ID]["aws"].put_object(bucket, key, b"")
    print("filled", flush=True)
"""


class S3Server:
    """Moto's server on a free port. Its objects live as long as it does; ``close`` ends it, and so does the end of this
    process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        readable = is_readable(self._process.stdout, START_DEADLINE_S)
        line = self._process.stdout.readline() if readable else ""
        if not line.strip().isdigit():
            self.close()
            raise RuntimeError("the S3 server did not start")
        self._client: Any = None
        self.port = int(line)
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def env(self) -> dict[str, str]:
        """What a client's environment needs, and nothing of the machine's own configuration."""
        return environment(self.url)

    def client(self) -> Any:
        """boto3's, to put what a test needs. Needs no environment."""
        if self._client is None:
            self._client = client(self.url)
        return self._client

    def bucket(self, name: str | None = None, files: Mapping[str, bytes] | None = None) -> str:
        """Make a bucket with these objects; its URL. Without a name it gets one that nobody has."""
        s3 = self.client()
        name = name or f"bucket-{next(SERIAL)}"
        s3.create_bucket(Bucket=name)
        for key, data in (files or {}).items():
            s3.put_object(Bucket=name, Key=key, Body=data)
        return f"s3://{name}"

    def fill(self, bucket: str, keys: Iterable[str]) -> None:
        """Put empty objects behind its back: quickly, and with any key."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([bucket, [*keys]]) + "\n")
        self._process.stdin.flush()
        if self._process.stdout.readline() != "filled\n":
            raise RuntimeError("the S3 server has ended")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> S3Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def environment(url: str) -> dict[str, str]:
    """Of a client whose S3 is at ``url``."""
    return {
        "AWS_ENDPOINT_URL_S3": url,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_SESSION_TOKEN": SESSION_TOKEN,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1",
    }


def client(url: str) -> Any:
    """boto3's, for an S3 at ``url``."""
    import boto3
    from botocore.config import Config  # type: ignore[import-untyped]

    return boto3.client(
        "s3",
        endpoint_url=url,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        region_name=REGION,
        config=Config(s3={"addressing_style": "path"}),
    )


@dataclass
class Seen:
    """One request that came to the proxy."""

    method: str
    key: str  # without the bucket; empty: of the bucket
    query: str
    start: int | None = None  # the first byte that was asked for
    end: int | None = None  # the one after the last
    status: int = 0
    sent: int = 0  # bytes of the body that went to the client


@dataclass
class Fault:
    """What happens to the answers to some requests, ``times`` of them."""

    kind: str  # flip, cut, hold, shorten, status
    key: str | None
    at: int = 0  # a byte of the object, or how many are missing
    times: float = 1
    share: float = 1.0
    status: int = 503
    code: str = "SlowDown"
    methods: tuple[str, ...] = ("GET",)
    reached: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)


class FaultProxy:
    """Speaks HTTP on both sides; ``url`` takes the server's place.

    Offsets are those of the object, whatever range a request asks for, so that a fault hits the one that holds it.
    """

    def __init__(self, upstream: str, seed: int = 0) -> None:
        """``upstream``: the URL of the server."""
        self._upstream = (urlsplit(upstream).hostname or "", urlsplit(upstream).port or 80)
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._faults: list[Fault] = []
        self._open: set[socket.socket] = set()
        self._server: ThreadingHTTPServer | None = None
        self.requests: list[Seen] = []
        self.port = 0
        self.back()
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def env(self) -> dict[str, str]:
        return environment(self.url)

    # Faults

    def flip(self, key: str, at: int, times: float = 1) -> Fault:
        """The byte ``at`` arrives with all of its bits turned."""
        return self._add(Fault("flip", key, at, times))

    def cut(self, key: str, at: int, times: float = 1) -> Fault:
        """The connection is reset when the byte ``at`` is due."""
        return self._add(Fault("cut", key, at, times))

    def hold(self, key: str, at: int, times: float = 1) -> Fault:
        """Nothing more comes from the byte ``at`` on, until ``released`` is set; ``reached`` tells that it is so."""
        return self._add(Fault("hold", key, at, times))

    def shorten(self, key: str, by: int, times: float = float("inf")) -> Fault:
        """Answers hold ``by`` bytes less at their end, and say so: the object seems to be shorter."""
        return self._add(Fault("shorten", key, by, times))

    def answer(
        self,
        status: int = 503,
        code: str = "SlowDown",
        *,
        key: str | None = None,
        share: float = 1.0,
        times: float = float("inf"),
        methods: tuple[str, ...] = ("GET", "HEAD"),
    ) -> Fault:
        """A share of the requests is answered with an error of S3."""
        return self._add(Fault("status", key, 0, times, share, status, code, methods))

    def heal(self) -> None:
        """No faults any more; what is held goes on."""
        with self._lock:
            gone, self._faults = self._faults, []
        for fault in gone:
            fault.released.set()

    def away(self) -> None:
        """Open connections are reset, new ones refused."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            reset(connection)

    def back(self) -> None:
        """Listen (again)."""
        server = _Server(("127.0.0.1", self.port), _handler(self))
        self.port = server.server_address[1]
        self._server = server
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self.heal()
        self.away()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What came

    def seen(self, key: str | None = None, method: str = "GET") -> list[Seen]:
        """Requests, oldest first: of ``key``, or all of the method."""
        with self._lock:
            return [request for request in self.requests if request.method == method and key in (None, request.key)]

    def bytes(self, key: str | None = None) -> int:
        """That went to the client as bodies of GET requests for objects."""
        return sum(request.sent for request in self.seen(key) if request.key)

    def forget(self) -> None:
        """Count from zero."""
        with self._lock:
            self.requests.clear()

    # For the handler

    def _add(self, fault: Fault) -> Fault:
        with self._lock:
            self._faults.append(fault)
        return fault

    def _take(self, seen: Seen, kinds: tuple[str, ...], start: int = 0, end: int = 0) -> list[Fault]:
        """Faults of these kinds that hit an answer with the bytes from ``start`` to ``end``."""
        with self._lock:
            due = []
            for fault in self._faults:
                inside = fault.kind in ("shorten", "status") or start <= fault.at < end
                if fault.kind not in kinds or fault.key not in (None, seen.key) or fault.times < 1 or not inside:
                    continue
                if seen.method not in fault.methods or (fault.kind == "status" and not seen.key and fault.key is None):
                    continue
                if fault.share < 1.0 and self._random.random() >= fault.share:
                    continue
                fault.times -= 1
                due.append(fault)
                if fault.kind in ("shorten", "status"):
                    break  # one of these is enough for an answer
            return due


def reset(connection: socket.socket) -> None:
    """Close it with RST, as a peer that has died does."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 256

    def handle_error(self, *_: Any) -> None:
        """A client that has gone is no news."""


def _handler(proxy: FaultProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        owner = proxy

    return Handler


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    owner: FaultProxy

    def setup(self) -> None:
        super().setup()
        with self.owner._lock:
            self.owner._open.add(self.connection)

    def finish(self) -> None:
        with self.owner._lock:
            self.owner._open.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, *_: Any) -> None:
        pass

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True

    def do_any(self) -> None:
        seen = self._seen()
        body = self._body()
        with self.owner._lock:
            self.owner.requests.append(seen)
        if faults := self.owner._take(seen, ("status",)):
            self._refuse(seen, faults[0])
            return
        with contextlib.closing(HTTPConnection(*self.owner._upstream, timeout=60)) as upstream:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("expect", "connection"):
                    upstream.putheader(name, value)
            upstream.endheaders(body)
            self._answer(seen, upstream.getresponse())

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_any

    def _seen(self) -> Seen:
        parts = urlsplit(self.path)
        _, _, key = unquote(parts.path).lstrip("/").partition("/")
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start = int(span[1]) if span else None
        end = int(span[2]) + 1 if span and span[2] else None
        return Seen(self.command, key, parts.query, start, end)

    def _body(self) -> bytes | None:
        length = int(self.headers.get("Content-Length") or 0)
        if not length and "chunked" in self.headers.get("Transfer-Encoding", ""):
            raise RuntimeError("the proxy takes no chunked bodies")
        return self.rfile.read(length) if length else None

    def _refuse(self, seen: Seen, fault: Fault) -> None:
        seen.status = fault.status
        body = f"<Error><Code>{fault.code}</Code>{INDISCREET}</Error>".encode()
        self.send_response(fault.status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _answer(self, seen: Seen, response: HTTPResponse) -> None:
        seen.status = response.status
        data = response.read() if self.command != "HEAD" else b""
        headers = [pair for pair in response.getheaders() if pair[0].lower() not in ("connection", "transfer-encoding")]
        whole = response.status in (200, 206) and self.command == "GET" and seen.key
        begin = seen.start or 0
        if whole and (faults := self.owner._take(seen, ("shorten",))):
            data, headers = _shortened(data, headers, faults[0].at, begin)
        self.send_response_only(response.status, response.reason)
        for name, value in headers:
            self.send_header(name, value)
        if self.command != "HEAD" and not any(name.lower() == "content-length" for name, _ in headers):
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        faults = self.owner._take(seen, ("flip", "cut", "hold"), begin, begin + len(data)) if whole else []
        for fault in [fault for fault in faults if fault.kind == "flip"]:
            turned = bytearray(data)
            turned[fault.at - begin] ^= 0xFF
            data = bytes(turned)
        for fault in sorted((fault for fault in faults if fault.kind != "flip"), key=lambda fault: fault.at):
            self._write(seen, data[seen.sent : fault.at - begin])
            fault.reached.set()
            if fault.kind == "cut":
                self.close_connection = True
                return reset(self.connection)
            fault.released.wait()
        return self._write(seen, data[seen.sent :])

    def _write(self, seen: Seen, data: bytes) -> None:
        for begin in range(0, len(data), PIECE):
            part = data[begin : begin + PIECE]
            self.wfile.write(part)
            seen.sent += len(part)


def _shortened(data: bytes, headers: list[tuple[str, str]], by: int, begin: int) -> tuple[bytes, list[tuple[str, str]]]:
    data = data[: max(0, len(data) - by)]
    lines = []
    for name, value in headers:
        if name.lower() == "content-length":
            value = str(len(data))
        if name.lower() == "content-range":
            value = f"bytes {begin}-{begin + len(data) - 1}/{begin + len(data)}"
        lines.append((name, value))
    return data, lines


@contextlib.contextmanager
def s3_environment(env: Mapping[str, str]) -> Iterator[None]:
    """``env`` is this process's meanwhile, without a profile of the machine's."""
    before = dict(os.environ)
    os.environ.pop("AWS_PROFILE", None)
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One for all tests: each makes a bucket of its own."""
    with S3Server() as server:
        yield server


@pytest.fixture
def s3_proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    """Before the server; this process's environment leads clients to it."""
    with FaultProxy(s3_server.url) as proxy, s3_environment(proxy.env):
        yield proxy


def main() -> None:
    """A server to try things with: prints the environment of its clients, and ends with standard input."""
    with S3Server() as server:
        print(json.dumps(server.env), flush=True)  # noqa: T201
        sys.stdin.read()


if __name__ == "__main__":
    main()
