"""Raw clients of the gateway, which send what no library would."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.fleet import until
from workers.engines.echo.engine import echo_tokens

ANSWER_S = 10.0  # for the answer to anything
CONNECT_S = 10.0


@dataclass
class Raw:
    """One answer as it came."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes
    names: list[str] = field(default_factory=list)  # of the headers, as often as they came

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """Of an error in OpenAI's shape; fails for anything else."""
        body = self.json
        assert body.keys() == {"error"}, body
        assert body["error"].keys() == {"message", "type", "param", "code"}, body
        assert body["error"]["message"]
        assert self.headers["content-type"].startswith("application/json"), self.headers
        return str(body["error"]["code"])


class Closed(Exception):
    """The connection ended without an answer, or in the midst of one."""


class Wire:
    """One connection, byte by byte. Every wait has a deadline: a hang is a ``TimeoutError``."""

    def __init__(
        self,
        port: int,
        *,
        tls: ssl.SSLContext | None = None,
        receive_bytes: int | None = None,
        deadline_s: float = ANSWER_S,
    ) -> None:
        """``receive_bytes`` is the size of the kernel's buffer on this side."""
        plain = socket.socket()
        plain.settimeout(CONNECT_S)
        if receive_bytes is not None:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            plain.connect(("127.0.0.1", port))
            self.socket = plain if tls is None else tls.wrap_socket(plain, server_hostname="localhost")
        except BaseException:
            plain.close()
            raise
        self.socket.settimeout(deadline_s)
        self._deadline_s = deadline_s
        self._buffer = b""
        self._pause_s = 0.0

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, data: bytes) -> None:
        """Raises Closed when nobody takes it."""
        try:
            self.socket.sendall(data)
        except (ConnectionError, ssl.SSLError) as error:
            raise Closed(str(error)) from None

    def offer(self, data: bytes) -> None:
        """Send as much of it as is taken: the other side may have heard enough."""
        with contextlib.suppress(Closed, TimeoutError):
            self.send(data)

    def answer(self, *, head_only: bool = False, pause_s: float = 0.0) -> Raw:
        """The next answer, with so long a pause before each read. Raises Closed, and TimeoutError when none comes."""
        self._pause_s = pause_s
        head = self._until(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        version, status, _ = lines[0].split(" ", 2)
        assert version == "HTTP/1.1", lines[0]
        pairs = [line.split(": ", 1) for line in lines[1:] if line]
        headers = {name.lower(): value for name, value in pairs}
        names = [name for name, _ in pairs]
        if status == "100" or head_only or status == "204":
            body = b""
        elif headers.get("transfer-encoding") == "chunked":
            body = self._chunks()
        elif "content-length" in headers:
            body = self._exactly(int(headers["content-length"]))
        else:
            body = self.rest()
        return Raw(int(status), headers, body, names)

    def rest(self) -> bytes:
        """All that comes until the end of the connection."""
        while self._receive():
            pass
        data, self._buffer = self._buffer, b""
        return data

    def at_end(self) -> bool:
        """Returns whether the other side closes, and says nothing more."""
        try:
            return self.rest() == b""
        except Closed:
            return True

    def read_until(self, text: bytes) -> bytes:
        return self._until(text)

    def reset(self) -> None:
        """End it as a process ends that is killed with unread data: with RST."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()

    def _receive(self) -> bool:
        if self._pause_s:
            time.sleep(self._pause_s)
        try:
            data = self.socket.recv(2**18)
        except (ConnectionError, ssl.SSLError) as error:
            if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
                return False
            raise Closed(str(error)) from None
        self._buffer += data
        return bool(data)

    def _until(self, mark: bytes) -> bytes:
        started = 0
        while (at := self._buffer.find(mark, started)) < 0:
            started = max(0, len(self._buffer) - len(mark))
            if not self._receive():
                raise Closed(f"after {self._buffer[-200:]!r}")
        end = at + len(mark)
        data, self._buffer = self._buffer[:end], self._buffer[end:]
        return data

    def _exactly(self, count: int) -> bytes:
        parts = [self._buffer]
        have = len(self._buffer)
        self._buffer = b""
        while have < count:
            if not self._receive():
                raise Closed(f"{have} bytes of {count}")
            parts.append(self._buffer)
            have += len(self._buffer)
            self._buffer = b""
        data = b"".join(parts)
        data, self._buffer = data[:count], data[count:]
        return data

    def _chunks(self) -> bytes:
        parts = []
        while size := int(self._until(b"\r\n")[:-2], 16):
            parts.append(self._exactly(size))
            assert self._exactly(2) == b"\r\n"
        assert self._until(b"\r\n") == b"\r\n"
        return b"".join(parts)


def request(method: str, path: str, body: bytes | None = None, **headers: str) -> bytes:
    """The bytes of a request. Header names are given with `_` for `-`; Host and Content-Length come by themselves."""
    lines = [f"{method} {path} HTTP/1.1"]
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if "host" not in {name.lower() for name in named}:
        lines.append("host: localhost")
    if body is not None and not {"content-length", "transfer-encoding"} & {name.lower() for name in named}:
        lines.append(f"content-length: {len(body)}")
    lines += [f"{name}: {value}" for name, value in named.items()]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + (body or b"")


def post(value: Any, path: str = "/v1/completions", **headers: str) -> bytes:
    """A request with that JSON, or with those bytes."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return request("POST", path, body, **headers)


def completion(**fields: Any) -> bytes:
    return post({"model": "m", "prompt": "hello", "max_tokens": 3, **fields})


def ask(port: int, data: bytes, *, deadline_s: float = ANSWER_S, tls: ssl.SSLContext | None = None) -> Raw:
    """The answer to one request on a connection of its own."""
    with Wire(port, deadline_s=deadline_s, tls=tls) as wire:
        wire.offer(data)
        return wire.answer(head_only=data.startswith(b"HEAD "))


class Droves:
    """Many connections that one thread feeds: each sends its bytes one at a time, and says when it was ended."""

    def __init__(self, port: int, count: int, data: bytes) -> None:
        self.ended: dict[int, float] = {}  # when the other side closed it, monotonic
        self.received: dict[int, bytes] = {}
        self._data = data
        self._sent = dict.fromkeys(range(count), 0)
        self._selector = selectors.DefaultSelector()
        self.began = time.monotonic()
        for number in range(count):
            connection = socket.create_connection(("127.0.0.1", port), CONNECT_S)
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, number)
            self.received[number] = b""

    @property
    def open(self) -> int:
        return len(self.received) - len(self.ended)

    def turn(self, pause_s: float) -> None:
        """Every open connection sends one more byte; then what comes within ``pause_s`` is read."""
        for key in list(self._selector.get_map().values()):
            number, connection = key.data, key.fileobj
            at = self._sent[number]
            if at < len(self._data):
                assert isinstance(connection, socket.socket)
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    self._sent[number] = at + connection.send(self._data[at : at + 1])
        until = time.monotonic() + pause_s
        while (left := until - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                self._read(key)
            if not self._selector.get_map():
                return

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def _read(self, key: selectors.SelectorKey) -> None:
        connection = key.fileobj
        assert isinstance(connection, socket.socket)
        try:
            data = connection.recv(65536)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        self.received[key.data] += data
        if not data:
            self.ended[key.data] = time.monotonic()
            self._selector.unregister(connection)
            connection.close()


class Lost(NamedTuple):
    """A request whose connection broke; the times are monotonic."""

    client: int
    began: float
    ended: float
    error: str


class Steady:
    """Ordinary clients that ask one question after the other for as long as the block lasts, in turn on a connection
    that they keep and on a new one, streamed and whole. Every answer must be exact; all else is in ``wrong``."""

    def __init__(
        self,
        port: int,
        *,
        clients: int = 4,
        model: str = "m",
        tokens: int = 8,
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
        key: str | None = None,
        may_lose: bool = False,
        deadline_s: float = ANSWER_S,
    ) -> None:
        """``may_lose``: a connection may break under a request (it is counted as lost), but none may be refused."""
        self.counts: Counter[str] = Counter()  # "exact", "lost", and "again" for what a closed kept connection cost
        self.wrong: list[str] = []
        self.lost: list[Lost] = []
        self.slowest_s = 0.0
        self._port, self._model, self._tokens, self._tls = port, model, tokens, tls
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._may_lose, self._deadline_s = may_lose, deadline_s
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(i,), daemon=True) for i in range(clients)]

    def __enter__(self) -> Steady:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(self._deadline_s * 3)
        self.wrong += ["a client hangs"] * sum(thread.is_alive() for thread in self._threads)

    def wait_answered(self, more: int, deadline_s: float = 30.0) -> None:
        """Wait for so many further answers; returns early when something is wrong."""
        enough = self.counts["exact"] + more
        until(lambda: self.wrong or self.counts["exact"] >= enough, deadline_s, f"{more} more answers: {self.counts}")

    def _work(self, client: int) -> None:
        kept: Wire | None = None
        number = 0
        while not self._over.is_set():
            number += 1
            prompt, stream = f"client {client} asks {number}", number % 4 < 2
            fields = {"model": self._model, "prompt": prompt, "max_tokens": self._tokens, "stream": stream}
            data = post(fields, **self._headers)
            began = time.monotonic()
            try:
                if number % 2 and kept is not None:
                    try:
                        kept.send(data)
                        answer = kept.answer()
                    except Closed as closed:
                        if str(closed) not in ("after b''", "[Errno 104] Connection reset by peer") and not (
                            str(closed).startswith("[Errno 32]")
                        ):
                            raise
                        self._count("again")  # it was closed while nothing was asked, as any server may
                        kept.close()
                        kept = Wire(self._port, tls=self._tls(), deadline_s=self._deadline_s)
                        kept.send(data)
                        answer = kept.answer()
                else:
                    if kept is not None:
                        kept.close()
                    kept = Wire(self._port, tls=self._tls(), deadline_s=self._deadline_s)
                    kept.send(data)
                    answer = kept.answer()
                if answer.headers.get("connection") == "close":
                    kept.close()
                    kept = None
                problem = self._problem(answer, prompt, stream)
                self._count("exact" if problem is None else "wrong", time.monotonic() - began)
                if problem is not None:
                    self.wrong.append(f"{prompt}: {problem}")
            except ConnectionRefusedError as error:
                self.wrong.append(f"{prompt}: refused: {error}")
                return
            except (Closed, ConnectionError) as error:
                self._count("lost")
                self.lost.append(Lost(client, began, time.monotonic(), repr(error)))
                kept = None
                if not self._may_lose:
                    self.wrong.append(f"{prompt}: {error!r}")
            except Exception as error:  # noqa: BLE001 - told by the test
                self.wrong.append(f"{prompt}: {error!r}")
                return
        if kept is not None:
            kept.close()

    def _count(self, kind: str, took_s: float = 0.0) -> None:
        with self._lock:
            self.counts[kind] += 1
            self.slowest_s = max(self.slowest_s, took_s)

    def _problem(self, answer: Raw, prompt: str, stream: bool) -> str | None:
        expected = bytes(echo_tokens(list(prompt.encode()), self._tokens)).decode()
        if answer.status != 200:
            return f"{answer.status} {answer.body[:200]!r}"
        if not stream:
            got = answer.json["choices"][0]["text"]
        else:
            events = answer.body.decode().split("\n\n")
            if events[-2:] != ["data: [DONE]", ""]:
                return f"a stream that ends with {events[-2:]}"
            got = "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-2])
        return None if got == expected else f"{got!r} instead of {expected!r}"
