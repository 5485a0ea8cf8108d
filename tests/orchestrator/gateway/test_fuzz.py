"""Thirty thousand wrong requests beside streams that are checked token for token."""

from __future__ import annotations

import collections
import gc
import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from orchestrator.gateway.openai import body_reader, protocol
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.process.collector import settle_collector
from tests.fleet import until
from tests.orchestrator.gateways import LiveGateway, routes
from tests.orchestrator.hostile import Closed, Raw, Wire, post, request
from tests.served import Served
from workers.engines.echo.engine import echo_tokens

SEED = 20260729
REQUESTS = 30_000
WORKERS = 12
READ_S = 0.5
ANSWER_S = 30.0  # for an answer, whatever it is: beyond it is a hang
MAX_LEN = 256
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Case = tuple[bytes, bool]  # what is sent, and whether an answer is due

DEEP = 100_000
ODD: tuple[bytes, ...] = (  # JSON values, and what is none
    *(b"1e999", b"-1e999", b"1e-999", b"NaN", b"Infinity", b"-0", b"-0.0", b"1.5", b"0", b"-1", b"1", b"2", b"128"),
    *(b"129", b"2048", b"2147483647", b"2147483648", b"4294967296", b"9223372036854775807", b"9223372036854775808"),
    *(b"-9223372036854775809", b"18446744073709551616", b"9" * 400, b"9" * 4299, b"9" * 5000, b"0." + b"3" * 5000),
    *(
        b"true",
        b"false",
        b"null",
        b"nil",
        b"undefined",
        b'""',
        b'" "',
        b'"m"',
        b'"\\u0000"',
        b'"\\ud800"',
        b'"\\udc00"',
    ),
    *(b'"\\ud83d\\ude00"', b'"\xff\xfe"', b'"\xc3"', b'"\xed\xa0\x80"', b'"\xf4\x90\x80\x80"', b'"\n"', b'"\\x"', b'"'),
    *(b'"' + b"x" * 5000 + b'"', b'"' + "\U0001f600".encode() * 500 + b'"', b"[]", b"[[]]", b"[null]", b'[""]', b"[1]"),
    *(
        b"[-1]",
        b"[256]",
        b"[257]",
        b'[1, "a"]',
        b"[[1], [2]]",
        b"[{}]",
        b"[1.0]",
        b"[true]",
        b"[" + b"7," * 5000 + b"7]",
    ),
    *(b"{}", b'{"": 1}', b'{"1": 1}', b'{"1": "x"}', b'{"-1": 1}', b'{"9e9": 1}', b'{"' + b"9" * 5000 + b'": 1}'),
    *(b'{"type": "text"}', b'{"type": "json_object"}', b'{"type": "json_schema", "json_schema": {"schema": {}}}'),
    *(b'[{"role": "user"}]', b'[{"role": "user", "content": null}]', b'[{"role": 1, "content": []}]'),
    *(b'[{"role": "user", "content": [{"type": "text"}, {"type": "image_url"}]}]', b'[{"role": "\\u0000"}]'),
    *(b'[{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}]', b'{"include_usage": true}'),
    *(b"[" * 500 + b"]" * 500, b'{"a":' * 500 + b"1" + b"}" * 500, b"[1,]", b"{,}", b"/*x*/1", b"0x10", b"01", b"+1"),
)
RARE: tuple[bytes, ...] = (
    b"[" * DEEP + b"]" * DEEP,
    b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    b"[" * DEEP,
    b'"' + b"y" * 1_000_000 + b'"',
    b"[" + b"1," * 300_000 + b"1]",
    b"{" + b",".join(b'"%d":1' % i for i in range(50_000)) + b"}",
)
FIELDS = sorted(
    {*protocol.ChatRequest.__struct_fields__, *protocol.CompletionRequest.__struct_fields__}
    | {"", "tokens", "add_special_tokens", "best_of", "suffix", "__class__", "prompt", "messages", "x" * 300}
)
BASES: dict[str, dict[str, bytes]] = {
    COMPLETIONS: {"model": b'"m"', "prompt": b'"hello"', "max_tokens": b"2"},
    CHAT: {"model": b'"m"', "messages": b'[{"role": "user", "content": "hi"}]', "max_tokens": b"2"},
    "/tokenize": {"model": b'"m"', "prompt": b'"hello"'},
    "/detokenize": {"model": b'"m"', "tokens": b"[104, 105]"},
}
READERS: dict[str, Callable[[bytes], object]] = {
    COMPLETIONS: body_reader.read_completion,
    CHAT: body_reader.read_chat,
    "/tokenize": body_reader.read_tokenize,
    "/detokenize": body_reader.read_detokenize,
}
VALID = (
    post({"model": "m", "prompt": "hello", "max_tokens": 2}),
    post({"model": "m", "prompt": ["a", "b"], "max_tokens": 2, "n": 2, "stream": True}),
    post({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True}, CHAT),
    post({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}, CHAT, x_request_id="a"),
    post(b'2c\r\n{"model": "m", "prompt": "hi", "max_tokens": 2}\r\n0\r\n\r\n', transfer_encoding="chunked"),
    request("GET", "/v1/models"),
    request("GET", "/v1/models/m"),
    request("GET", "/livez?x=y", accept="*/*", connection="keep-alive"),
    request("OPTIONS", COMPLETIONS, origin="http://localhost", access_control_request_method="POST"),
)
METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT", "PROPFIND", "G", "post", "")
VERSIONS = ("HTTP/1.1", "HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/9.9", "HTTP/1.1 ", "HTTP", "", "http/1.1")
HEADERS = (
    *(
        "Host: x",
        "Host:",
        "host : x",
        ": x",
        "x",
        "x:",
        "x: \x00",
        "x: \x7f",
        "x: \xff",
        "x: y\r",
        "x\x01: y",
        "x: y\n z",
    ),
    *(
        "Content-Length: 0",
        "Content-Length: 5",
        "Content-Length: -1",
        "Content-Length: 1e3",
        "Content-Length: 99999999",
    ),
    *(
        "Content-Length: 5\r\nContent-Length: 6",
        "Transfer-Encoding: chunked",
        "Transfer-Encoding: gzip",
        "Upgrade: h2c",
    ),
    *("Transfer-Encoding: chunked, identity", "Transfer-Encoding:", "Connection: close", "Connection: upgrade"),
    *("Connection: keep-alive, close", "Expect: 100-continue", "Expect: nothing", "Content-Type: text/html"),
    *(
        "Content-Encoding: gzip",
        "Authorization: Bearer x",
        "X-API-Key: x",
        "Origin: http://a",
        "Origin: null",
        "TE: gzip",
    ),
    *(
        "X-Request-Id: a b",
        "X-Request-Id: \t",
        "Cookie: " + "c" * 3000,
        "Range: bytes=0-1",
        "Accept: */*",
        "Trailer: x",
    ),
)
TARGETS = (
    *(
        "/",
        "*",
        "//",
        "/v1",
        "/v1/",
        "/v1/models/",
        "/v1/models/%00",
        "/v1/models/%ff",
        "/v1/models/%",
        "/v1/models/x/y",
    ),
    *(
        "/livez/",
        "/../livez",
        "/livez?%",
        "/livez#",
        "http://x",
        "http://x/livez",
        "http://[::1/livez",
        "x",
        "",
        "\xe4",
    ),
    *("/v1/models/" + "m" * 3000, "/\x00", "/ /", "/;", "/%2e%2e/", "https://u:p@h:1/livez?q#f", "/?" + "&" * 500),
)


def odd(rng: random.Random) -> bytes:
    return rng.choice(RARE) if rng.random() < 0.003 else rng.choice(ODD)


def odd_body(rng: random.Random, path: str) -> bytes:
    """JSON of that route in which something is wrong, or which is nearly JSON."""
    fields = list(BASES[path].items())
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kind = rng.randrange(5)
        if kind == 0 and fields:
            at = rng.randrange(len(fields))
            fields[at] = (fields[at][0], odd(rng))
        elif kind == 1 and fields:
            del fields[rng.randrange(len(fields))]
        elif kind == 2 and fields:
            fields.append(rng.choice(fields))
        else:
            fields.append((rng.choice(FIELDS), odd(rng)))
    body = b"{" + b", ".join(b"%b: %b" % (json.dumps(name).encode(), value) for name, value in fields) + b"}"
    kind = rng.randrange(14)
    if kind == 0:
        return body[: rng.randrange(len(body))]
    if kind == 1:
        return body + rng.choice((b"}", b"\x00", b"x", b" " * 1000, body))
    if kind == 2:
        return body.decode("latin-1").encode(rng.choice(("utf-16", "utf-32", "utf-16-le", "utf-8-sig")))
    if kind == 3:
        return flipped(rng, body[:3000])
    return body


def flipped(rng: random.Random, data: bytes) -> bytes:
    """The bytes with some changed, lost, doubled or put in."""
    mutation = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        at, kind = rng.randrange(len(mutation) + 1), rng.randrange(5)
        if kind == 0:
            mutation[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del mutation[at : at + rng.randrange(1, 9)]
        elif kind == 2:
            mutation[at:at] = mutation[at : at + rng.randrange(1, 30)]
        elif kind == 3:
            mutation[at:at] = rng.choice((b"\r\n", b"\r", b"\n", b"\x00", b" ", b":", b"\xff", b"0", b"9", b",", b"%"))
        else:
            mutation[at:at] = rng.randbytes(rng.randrange(1, 20))
    return bytes(mutation)


def json_case(rng: random.Random, paths: list[str]) -> Case:
    path = rng.choice(tuple(BASES))
    return post(odd_body(rng, path), path if rng.random() < 0.95 else rng.choice(paths)), True


def head_case(rng: random.Random, paths: list[str]) -> Case:
    """A head of odd parts; sometimes with an unexpected body."""
    target = rng.choice(TARGETS) if rng.random() < 0.5 else rng.choice(paths)
    lines = [" ".join((rng.choice(METHODS), target, rng.choice(VERSIONS) if rng.random() < 0.5 else "HTTP/1.1"))]
    lines += rng.choices(HEADERS, k=rng.randrange(6))
    head = rng.choice(("\r\n", "\r\n", "\r\n", "\n", "\r")).join(lines).encode("latin-1", "replace")
    return head + rng.choice((b"\r\n\r\n", b"\r\n\r\n", b"\n\n", b"\r\n")) + rng.choice(
        (b"", b"", b"hello", b"{}")
    ), False


def flipped_case(rng: random.Random, paths: list[str]) -> Case:
    return flipped(rng, rng.choice(VALID)), False


def cut_case(rng: random.Random, paths: list[str]) -> Case:
    data = rng.choice(VALID)
    return data[: rng.randrange(len(data))], False


def noise_case(rng: random.Random, paths: list[str]) -> Case:
    return rng.randbytes(rng.choice((1, 10, 100, 1000, 40_000))), False


def route_case(rng: random.Random, paths: list[str]) -> Case:
    """Any method and body on any route."""
    method = rng.choice(METHODS[:9])
    body = odd(rng) if rng.random() < 0.5 else None
    return request(method, rng.choice([*paths, *TARGETS[:6]]), body, content_type="application/json"), True


SHARES: tuple[tuple[Callable[[random.Random, list[str]], Case], int], ...] = (
    (json_case, 16_000),
    (head_case, 4_500),
    (flipped_case, 5_500),
    (cut_case, 800),
    (noise_case, 1_200),
    (route_case, 2_000),
)


class Fuzz:
    """Sends the cases of one worker and judges what comes back."""

    def __init__(self, port: int, paths: list[str], number: int) -> None:
        self.wrong: list[str] = []
        self.statuses: collections.Counter[int | str] = collections.Counter()
        self.slowest_s = 0.0
        self._port = port
        self._paths = paths
        self._rng = random.Random(f"{SEED} {number}")
        self._kept: Wire | None = None
        kinds = [make for make, count in SHARES for _ in range(count // WORKERS)]
        self._rng.shuffle(kinds)
        self._kinds = kinds
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        for make in self._kinds:
            data, due = make(self._rng, self._paths)
            began = time.monotonic()
            try:
                status: int | str = self._send(data, due)
            except TimeoutError:
                status = "hang"
            except Exception as error:  # noqa: BLE001 - whatever it is, the gateway should not have answered so
                status = f"{type(error).__name__}: {error}"
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            self.statuses[status] += 1
            good = status == "closed" and not due
            if not good and not (isinstance(status, int) and (200 <= status < 300 or 400 <= status < 500)):
                self.wrong.append(f"{status} for {data[:400]!r} ({len(data)} bytes)")

    def _send(self, data: bytes, due: bool) -> int | str:
        """One case: an int is the status, "closed" no answer."""
        if not due:
            with Wire(self._port, deadline_s=ANSWER_S) as wire:
                wire.offer(data)
                return self._judged(wire, data, may_go_on=True)
        if self._kept is None:
            self._kept = Wire(self._port, deadline_s=ANSWER_S)
        wire = self._kept
        try:
            wire.offer(data)
            status = self._judged(wire, data, may_go_on=False)
        except Closed:
            self._drop()
            with Wire(self._port, deadline_s=ANSWER_S) as fresh:  # the kept one may have been idle for too long
                fresh.offer(data)
                return self._judged(fresh, data, may_go_on=False)
        except BaseException:
            self._drop()
            raise
        return status

    def _judged(self, wire: Wire, data: bytes, *, may_go_on: bool) -> int | str:
        method = data.partition(b" ")[0]
        try:
            answer = wire.answer(head_only=method == b"HEAD")
            while answer.status == 100:
                answer = wire.answer(head_only=method == b"HEAD")
        except Closed:
            if may_go_on:
                return "closed"
            raise
        self._check(answer, head_only=method == b"HEAD")
        if answer.headers.get("connection") == "close" and wire is self._kept:
            self._drop()
        return answer.status

    def _check(self, answer: Raw, head_only: bool) -> None:
        if head_only:
            return
        if answer.status >= 400:
            if not answer.headers["content-type"].startswith("text/plain"):  # of a probe
                error = answer.json
                assert error["error"]["message"] if error.get("type") == "error" else answer.code, error
            assert len(answer.body) < 20_000, len(answer.body)
        elif answer.headers.get("content-type", "").startswith("text/event-stream"):
            last = answer.body.split(b"\n\n")[-2]
            assert last.startswith((b"data: [DONE]", b"event: message_stop", b"event: response.")), last
        elif answer.headers.get("content-type") == "application/json":
            assert isinstance(answer.json, dict)

    def _drop(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None


class Watch:
    """Streams beside all that, one after the other: every token is checked as it comes."""

    def __init__(self, port: int, number: int) -> None:
        self.whole = 0
        self.wrong: list[str] = []
        self.longest_gap_s = 0.0
        self._port = port
        self._number = number
        self._over = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def end(self) -> None:
        self._over.set()
        self.thread.join(60)
        assert not self.thread.is_alive()

    def _run(self) -> None:
        turn = 0
        while not self._over.is_set() and not self.wrong:
            prompt, count = f"watch {self._number} {turn}", 200
            expected = echo_tokens(list(prompt.encode()), count)
            try:
                self._follow(prompt, count, expected)
            except Exception as error:  # noqa: BLE001 - reported by the test
                self.wrong.append(f"{prompt}: {error!r}")
            turn += 1

    def _follow(self, prompt: str, count: int, expected: list[int]) -> None:
        body = {"model": "m", "prompt": prompt, "max_tokens": count, "stream": True, "return_token_ids": True}
        with Wire(self._port, deadline_s=ANSWER_S) as wire:
            wire.send(post(body))
            head = wire.read_until(b"\r\n\r\n")
            if b" 429 " in head.split(b"\r\n")[0]:
                return  # the queue was full of what was fuzzed
            assert b" 200 " in head.split(b"\r\n")[0], head
            got: list[int] = []
            last = time.monotonic()
            while b"[DONE]" not in (event := wire.read_until(b"\n\n")):
                now = time.monotonic()
                self.longest_gap_s, last = max(self.longest_gap_s, now - last), now
                data = json.loads(event[event.index(b"data: ") + 6 :])
                got += data["choices"][0]["token_ids"]
                assert got == expected[: len(got)]
            assert got == expected
            self.whole += 1


@pytest.mark.parametrize("path", BASES)
def test_no_odd_value_of_a_field_is_an_internal_error(path: str) -> None:
    """It is accepted, or refused with status 400."""
    statuses = set()
    for field in FIELDS:
        for value in ODD:
            fields = {**BASES[path], field: value}
            body = b"{" + b", ".join(json.dumps(name).encode() + b": " + part for name, part in fields.items()) + b"}"
            try:
                body_reader.read(READERS[path], body)
            except ApiError as error:
                statuses.add(error.status)
    assert statuses == {400}


@pytest.fixture
def served() -> Iterator[Served]:
    replica = Served(slots=16, step_ms=0.5, max_len=MAX_LEN)
    yield replica
    replica.close()


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_thirty_thousand_invalid_requests_do_no_harm(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """Only 4xx, or 2xx for valid ones, or a closed connection for bytes that are not HTTP: no 500, no hang, no lost
    slot, no log line, and all tokens of the streams beside it.
    """
    assert sum(count // WORKERS * WORKERS for _, count in SHARES) >= REQUESTS - 100
    caplog.set_level(logging.ERROR)
    gateway = LiveGateway(read_s=READ_S, idle_s=5.0)
    try:
        gateway.serve(routes("m", served, max_len=MAX_LEN))
        watches = [Watch(gateway.port, i) for i in range(3)]
        workers = [Fuzz(gateway.port, [*gateway.paths, "/v1/models/m", "/nowhere"], i) for i in range(WORKERS)]
        for thread in (*watches, *workers):
            thread.thread.start()  # type: ignore[attr-defined]
        deadline = time.monotonic() + 360
        for worker in workers:
            worker.thread.join(max(0.0, deadline - time.monotonic()))
        hanging = [worker for worker in workers if worker.thread.is_alive()]
        for watch in watches:
            watch.end()

        statuses = sum((worker.statuses for worker in workers), collections.Counter())
        assert not hanging, statuses
        assert not [fault for worker in workers for fault in worker.wrong][:20]
        assert not [fault for watch in watches for fault in watch.wrong]
        assert min(watch.whole for watch in watches) >= 10
        assert sum(statuses.values()) >= REQUESTS - 100
        queue = gateway.queue("m")
        until(lambda: queue.links.live == 0 and queue.waiting == 0, 10, "nothing waits or runs")
        until(lambda: served.batcher.stats.live == 0, 10, "every slot is free")
        until(lambda: gateway.connections == 0, 10, "every connection is gone")
        assert served.batcher.stats.waiting == 0
        assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
    finally:
        gateway.close()


HELD_UP_S = 0.6  # of CPU time that one request of 8 MiB may take from the event loop


def large(value: bytes, field: str = "user", **fields: Any) -> bytes:
    """A completion with that JSON in a field."""
    known = {"model": "m", "prompt": "x", "max_tokens": 1, **fields}
    known.pop(field, None)
    return post(json.dumps(known).encode()[:-1] + b', "%b": %b}' % (field.encode(), value))


LARGE: dict[str, Callable[[], bytes]] = {
    "token ids": lambda: large(b"[" + b"1," * 4_000_000 + b"1]", "prompt"),
    "a list of token ids": lambda: large(b"[[" + b"1," * 4_000_000 + b"1]]", "prompt"),
    "prompts times n": lambda: large(json.dumps(["x" * 3500] * 2048).encode(), "prompt", n=128),
    "prompts of ids times n": lambda: large(json.dumps([[1] * 1300] * 2048).encode(), "prompt", n=128),
    "a long text": lambda: large(b'"' + b"x" * 8_000_000 + b'"', "prompt"),
    "stop ids times n": lambda: large(b"[" + b"1," * 3_900_000 + b"1]", "stop_token_ids", n=128),
    "stops": lambda: large(b"[" + b'"a",' * 2_000_000 + b'"a"]', "stop"),
    "a long stop times n": lambda: large(b'"' + b"a" * 8_000_000 + b'"', "stop", n=128),
    "biases": lambda: large(b"{" + b",".join(b'"%d":1' % i for i in range(600_000)) + b"}", "logit_bias"),
    "what is passed over": lambda: large(b"[" + b'{"a":[1,2]},' * 600_000 + b"1]", "metadata"),
    "a schema times n": lambda: large(
        b'{"type":"json_schema","json_schema":{"schema":{"enum":[' + b"1," * 3_500_000 + b"1]}}}",
        "response_format",
        n=128,
    ),
    "an echo times n": lambda: large(json.dumps(["\x01" * 200] * 2).encode(), "prompt", n=100, echo=True),
}


@pytest.fixture
def settled() -> Iterator[None]:
    """The collector as in a gateway's own process; else it goes through all that the tests have made."""
    before = gc.get_threshold()
    settle_collector()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


@pytest.mark.slow
@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("what", LARGE)
def test_a_large_request_delays_other_clients_only_briefly(served: Served, what: str) -> None:
    """Any 8 MiB of JSON are served or rejected before others see more than a pause."""
    gateway = LiveGateway()
    try:
        gateway.serve(routes("m", served, max_len=MAX_LEN))
        data = LARGE[what]()
        assert len(data) < 8 * 2**20
        before = gateway.cpu_s
        with Wire(gateway.port, deadline_s=60) as wire:
            wire.offer(data)
            answer = wire.answer()
        assert answer.status < 500
        assert gateway.cpu_s - before < HELD_UP_S
        until(lambda: gateway.queue("m").links.live == 0 and gateway.queue("m").waiting == 0, 10, "nothing is left")
    finally:
        gateway.close()
