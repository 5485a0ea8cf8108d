"""The gateway's own HTTP: every limit, every deadline, and what may not get past them, byte by byte."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec.structs
import pytest

from orchestrator.access.keys import Allowance, KeyFile
from orchestrator.gateway import request_log
from orchestrator.gateway.app import Gateway
from orchestrator.process import logs
from orchestrator.process.home import Home
from tests.fleet import until
from tests.orchestrator.gateways import LiveGateway, routes
from tests.orchestrator.hostile import Closed, Raw, Wire, ask, completion, post, request
from tests.served import Served
from workers.engines.echo.engine import echo_tokens

BODY_BYTES = 20_000
HEADER_BYTES = 4096
READ_S = 0.5
Open = Callable[..., LiveGateway]
SMALL: dict[str, Any] = {"model": "m", "prompt": "hello", "max_tokens": 3}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    replica = Served(slots=4)
    yield replica
    replica.close()


@pytest.fixture(scope="module")
def gateway(served: Served) -> Iterator[LiveGateway]:
    """One with small limits."""
    live = LiveGateway(
        max_body_bytes=BODY_BYTES,
        max_header_bytes=HEADER_BYTES,
        max_messages=4,
        max_prompt_tokens=500,
        read_s=READ_S,
        idle_s=READ_S,
    )
    live.serve(routes("m", served), routes("other", served))
    yield live
    live.close()


@pytest.fixture
def opened(served: Served) -> Iterator[Open]:
    """Makes gateways with other settings, that serve the models `m` and `other`."""
    gateways: list[LiveGateway] = []

    def make(**settings: Any) -> LiveGateway:
        gateways.append(LiveGateway(**settings))
        return gateways[-1].serve(routes("m", served), routes("other", served))

    yield make
    for live in gateways:
        live.close()


def keys_of(gateway: LiveGateway) -> KeyFile:
    return KeyFile(Home(gateway.home).keys)


def demands(gateway: LiveGateway) -> bool:
    return ask(gateway.port, completion()).status == 401


def status_and_text(answer: Raw) -> tuple[int, str]:
    """The status and code of an error."""
    return answer.status, answer.code


def text(count: int = 3, prompt: bytes = b"hello") -> str:
    return bytes(echo_tokens(list(prompt), count)).decode()


# Limits


def big_head(size: int) -> bytes:
    return request("GET", "/livez", **{f"x-{i}": "y" * 1000 for i in range(size // 1000)})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "expected"),
    {
        "long headers": (big_head(6000), (431, "headers_too_large")),
        "a long header": (request("GET", "/livez", x="y" * 5000), (431, "headers_too_large")),
        "a long target": (request("GET", "/livez?" + "y" * 5000), (431, "headers_too_large")),
        "a head without end": (b"GET /livez HTTP/1.1\r\nhost: " + b"y" * 9000, (431, "headers_too_large")),
        "a target without end": (b"GET /" + b"y" * 9000, (431, "headers_too_large")),
        "empty lines without end": (b"\r\n" * 5000, (431, "headers_too_large")),
        "many headers": (request("GET", "/livez", **{f"x{i}": "" for i in range(120)}), (431, "headers_too_large")),  # type: ignore[arg-type]
        "headers without names to keep": (
            request("GET", "/livez")[:-2] + b"a:\r\n" * 101 + b"\r\n",
            (431, "headers_too_large"),
        ),
        "padding": (
            request("GET", "/livez")[:-2] + b"a:" + b" " * HEADER_BYTES + b"\r\n\r\n",
            (431, "headers_too_large"),
        ),
        "a long body": (post(b"x" * (BODY_BYTES + 1)), (413, "body_too_large")),
        "a body that would be long": (post(b"{}", content_length="999999999999"), (413, "body_too_large")),
        "a long body in chunks": (
            post(b"4000\r\n" + b"x" * 0x4000 + b"\r\n4000\r\n" + b"x" * 0x4000, transfer_encoding="chunked"),
            (413, "body_too_large"),
        ),
        "a long body in one chunk": (
            post(b"ffffff\r\n" + b"x" * 0x8000, transfer_encoding="chunked"),
            (413, "body_too_large"),
        ),
        "messages": (
            post({"model": "m", "messages": [{"role": "user", "content": "x"}] * 5}, CHAT),
            (400, "too_many_messages"),
        ),
        "prompt tokens": (completion(prompt="x" * 501), (400, "context_length_exceeded")),
        "tokens of a chat": (
            post({"model": "m", "messages": [{"role": "user", "content": "x" * 501}]}, CHAT),
            (400, "context_length_exceeded"),
        ),
    }.values(),
    ids=lambda value: None,
)
def test_requests_over_a_limit_are_rejected(gateway: LiveGateway, data: bytes, expected: tuple[int, str]) -> None:
    """Each limit has its status and code, in OpenAI's format."""
    assert status_and_text(ask(gateway.port, data)) == expected


def test_requests_just_within_the_limits_are_served(gateway: LiveGateway) -> None:
    """A body of exactly the limit, and headers just below theirs."""
    body = post({**SMALL, "user": ""})
    room = BODY_BYTES - int(body.split(b"content-length: ")[1].split(b"\r\n")[0])
    data = post({**SMALL, "user": "u" * room}, x_long="y" * (HEADER_BYTES - 300))

    assert ask(gateway.port, data).status == 200


def test_a_head_may_be_as_long_as_its_limit_on_the_wire(gateway: LiveGateway) -> None:
    """Every byte that was received counts, and one more is refused."""

    def padded(size: int) -> bytes:
        head = request("GET", "/livez", a="")
        return head[:-4] + b" " * (size - len(head)) + head[-4:]

    statuses = [ask(gateway.port, padded(size)).status for size in (HEADER_BYTES, HEADER_BYTES + 1)]

    assert statuses == [200, 431]


def test_many_repeated_headers_are_not_joined_one_by_one(opened: Open) -> None:
    """31,000 of them, without a key, took 60 to 90 ms of the event loop in each request."""
    gateway = opened()
    flood = request("GET", "/livez")[:-2] + b"a:\r\n" * 31_000 + b"\r\n"
    ask(gateway.port, request("GET", "/livez"))
    before = gateway.cpu_s
    for _ in range(20):
        assert ask(gateway.port, flood).status == 431

    assert (gateway.cpu_s - before) / 20 < 0.02


def test_repeated_headers_are_joined_in_their_order(gateway: LiveGateway) -> None:
    data = post(SMALL).replace(b"\r\n\r\n", b"\r\nX-Request-Id: a\r\nx-request-id: b\r\nX-REQUEST-ID: c\r\n\r\n", 1)

    assert ask(gateway.port, data).headers["x-request-id"] == "a, b, c"


def test_trailers_are_bounded(gateway: LiveGateway) -> None:
    """They cannot be used to bypass the limits: the client is rejected, and no more is read."""
    with Wire(gateway.port) as wire:
        wire.send(post(b"0\r\n", transfer_encoding="chunked"))
        sent = 0
        try:
            while sent < 50 * HEADER_BYTES:
                wire.send(b"".join(b"x%d: %s\r\n" % (sent + i, b"y" * 90) for i in range(10)))
                sent += 1000
                time.sleep(0)
        except Closed:
            pass
        assert wire.answer().status == 431


def test_trailers_are_not_headers(gateway: LiveGateway) -> None:
    """They change neither the type of the body nor the name of the request."""
    body = b"%x\r\n%b\r\n0\r\nContent-Type: text/html\r\nX-Request-Id: late\r\n\r\n"
    data = b'{"model": "m", "prompt": "hello"}'

    answer = ask(gateway.port, post(body % (len(data), data), transfer_encoding="chunked"))

    assert answer.status == 200
    assert answer.headers["x-request-id"] != "late"


def test_a_chunk_extension_has_an_end(gateway: LiveGateway) -> None:
    """A chunk's head may not go on for ever either."""
    with Wire(gateway.port) as wire:
        wire.offer(post(b"5;x=" + b"y" * 300_000, transfer_encoding="chunked"))
        wire.offer(b"y" * 300_000)
        assert wire.answer().status == 431


# Deadlines


@pytest.mark.parametrize(
    "data",
    [
        b"G",
        b"GET /livez HTTP/1.1\r\nhost: x\r\n",
        completion()[:-5],
        completion().partition(b"\r\n\r\n")[0] + b"\r\n\r\n",
    ],
    ids=["a byte", "half a head", "half a body", "no body"],
)
def test_an_incomplete_request_is_408(gateway: LiveGateway, data: bytes) -> None:
    """A client that is too slow gets the status, and its connection is closed soon."""
    with Wire(gateway.port) as wire:
        began = time.monotonic()
        wire.send(data)
        answer = wire.answer()
        took = time.monotonic() - began

        assert status_and_text(answer) == (408, "request_timeout")
        assert answer.headers["connection"] == "close"
        assert READ_S <= took < READ_S + 1.5
        assert wire.at_end()


def test_bytes_that_drop_in_do_not_move_the_deadline(gateway: LiveGateway) -> None:
    """The time is from the first byte to the last, whatever comes in between."""
    with Wire(gateway.port) as wire:
        began = time.monotonic()
        data = completion()
        wire.socket.settimeout(0.05)
        for i in range(len(data)):
            wire.offer(data[i : i + 1])
            try:
                if wire.socket.recv(1):
                    break
            except TimeoutError:
                continue
        assert time.monotonic() - began < READ_S + 2


def test_a_silent_connection_is_closed(gateway: LiveGateway) -> None:
    """Neither a new connection nor an idle one stays forever; no response is sent, since there was no request."""
    with Wire(gateway.port) as silent, Wire(gateway.port) as idle:
        idle.send(request("GET", "/livez"))
        assert idle.answer().status == 200
        assert silent.at_end()
        assert idle.at_end()


def test_a_rejected_connection_is_closed_soon(opened: Open) -> None:
    """It lingers so that its client can read the response, but not as long as an answer may take."""
    gateway = opened(read_s=0.3, write_s=60.0)
    with Wire(gateway.port) as wire:
        wire.send(b"GET /")
        assert wire.answer().status == 408
        until(lambda: gateway.connections == 0, 4, "the connection is let go")


def test_a_long_answer_is_whole(opened: Open) -> None:
    """An answer of many megabytes reaches a client that reads it, however slowly it begins."""
    gateway = opened()
    data = completion(prompt=["\x01" * 4000] * 2, n=100, echo=True, max_tokens=1)
    with Wire(gateway.port, receive_bytes=4096) as wire:
        wire.send(data)
        answer = wire.answer()
    assert answer.status == 200


def test_requests_without_a_key_are_counted_and_not_logged_individually(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any client could fill the disk with them."""
    monkeypatch.setattr(request_log, "UNAUTHENTICATED_LOG_S", 0.0)
    KeyFile(Home(tmp_path).keys).create("k")
    log = tmp_path / "gateway.log"
    logs.set_up(log, "text")
    try:
        gateway = opened(home=str(tmp_path))
        for _ in range(20):
            assert ask(gateway.port, request("GET", "/v1/models")).status == 401
        until(lambda: sum(map(int, re.findall(r"(\d+) with status 401", log.read_text()))) == 20, 20, "all are counted")
    finally:
        logs.tear_down()
    assert "GET /v1/models" not in log.read_text()


# Connections


def test_no_client_is_late_before_the_gateway_has_read_the_data_of_a_pause(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled, swept = threading.Event(), threading.Event()
    monkeypatch.setattr(Gateway, "settled", property(lambda _: settled.is_set()))
    gateway = opened(read_s=0.1)
    sweep = gateway.http_server.sweep
    monkeypatch.setattr(gateway.http_server, "sweep", lambda now: (swept.set(), sweep(now)))
    with Wire(gateway.port) as wire:
        assert not swept.wait(1.0)
        settled.set()
        assert wire.at_end()


def test_a_connection_over_the_limit_is_503(opened: Open) -> None:
    """With a retry time; once another has closed, the next is served."""
    gateway = opened(max_connections=3)
    held = [Wire(gateway.port) for _ in range(3)]
    for wire in held:
        wire.send(request("GET", "/livez"))
        assert wire.answer().status == 200

    refused = ask(gateway.port, request("GET", "/livez"))
    held.pop().close()

    assert status_and_text(refused) == (503, "too_many_connections")
    assert int(refused.headers["retry-after"]) >= 1
    until(lambda: ask(gateway.port, request("GET", "/livez")).status == 200, 5, "there is room again")
    for wire in held:
        wire.send(request("GET", "/livez"))
        assert wire.answer().status == 200
        wire.close()


def test_a_key_has_so_many_connections(opened: Open) -> None:
    """One key's connections do not take those of another."""
    gateway = opened(max_connections_per_key=2)
    keys = keys_of(gateway)
    (_, first), (_, second) = keys.create("one"), keys.create("two")
    until(lambda: demands(gateway), 5, "keys are required")
    held = [Wire(gateway.port) for _ in range(2)]
    for wire in held:
        wire.send(completion_with(first))
        assert wire.answer().status == 200

    refused = ask(gateway.port, completion_with(first))

    assert status_and_text(refused) == (429, "too_many_connections")
    assert int(refused.headers["retry-after"]) >= 1
    assert ask(gateway.port, completion_with(second)).status == 200
    for wire in held:
        wire.close()
    until(lambda: ask(gateway.port, completion_with(first)).status == 200, 5, "the key has room again")


def completion_with(key: str, **fields: Any) -> bytes:
    return post({**SMALL, **fields}, authorization=f"Bearer {key}")


# HTTP as it may be spoken


def test_a_gateway_that_is_replaced_announces_the_end_of_each_connection(opened: Open) -> None:
    """A client whose idle connection was closed at once could lose a request that it is just sending."""
    gateway = opened()
    with Wire(gateway.port) as client:
        client.send(request("GET", "/livez"))
        assert client.answer().headers.get("connection") != "close"
        gateway.http_server.retire()
        client.send(request("GET", "/livez"))
        assert client.answer().headers["connection"] == "close"
        assert client.rest() == b""


def test_pipelined_requests_are_answered_in_order(gateway: LiveGateway) -> None:
    """Fast ones wait for slow ones before them, and each answer belongs to its request."""
    requests = [(f"p{i}", 1 + (i * 37) % 50) for i in range(30)]
    data = b"".join(
        completion(prompt=prompt, max_tokens=count, stream=i % 3 == 0) for i, (prompt, count) in enumerate(requests)
    )
    with Wire(gateway.port) as wire:
        wire.send(data + request("GET", "/livez"))
        for i, (prompt, count) in enumerate(requests):
            answer = wire.answer()
            expected = text(count, prompt.encode())
            if i % 3 == 0:
                assert answer.body.endswith(b"data: [DONE]\n\n")
            else:
                assert answer.json["choices"][0]["text"] == expected
        assert wire.answer().body == b"ok\n"


def test_a_hundred_pipelined_requests_are_answered(gateway: LiveGateway) -> None:
    """Immediate responses do not pile up on the stack."""
    with Wire(gateway.port) as wire:
        wire.send(request("GET", "/livez") * 1000)
        assert [wire.answer().status for _ in range(1000)] == [200] * 1000


@pytest.mark.parametrize(("bytes_each", "answers"), [(BODY_BYTES // 2, 3), (BODY_BYTES // 2 + 1, 0)])
def test_the_bodies_of_pipelined_requests_have_a_common_limit(
    gateway: LiveGateway, bytes_each: int, answers: int
) -> None:
    """That of one body: otherwise a client could fill the memory behind one slow request. It is disconnected."""
    first = completion(max_tokens=50)
    waiting = post({**SMALL, "user": ""})
    padding = bytes_each - (len(waiting) - waiting.index(b"\r\n\r\n") - 4)
    waiting = post({**SMALL, "user": "x" * padding})
    with Wire(gateway.port) as wire:
        wire.offer(first + waiting * 2)
        if answers:
            assert [wire.answer().status for _ in range(answers)] == [200] * answers
        else:
            with pytest.raises(Closed):
                wire.answer()


def test_a_malformed_request_behind_valid_ones_is_answered_after_them(gateway: LiveGateway) -> None:
    """It ends the connection, in its turn."""
    with Wire(gateway.port) as wire:
        wire.send(completion(max_tokens=50) + request("GET", "/livez") + b"\x00\x01\r\n\r\n")
        assert [wire.answer().status for _ in range(3)] == [200, 200, 400]
        assert wire.at_end()


def test_a_connection_continues_after_an_error_of_a_complete_request(gateway: LiveGateway) -> None:
    """An invalid body does not close the connection."""
    with Wire(gateway.port) as wire:
        for data, status in (
            (post(b"{"), 400),
            (request("GET", "/nowhere"), 404),
            (request("DELETE", "/v1/models"), 405),
            (post(b"a=b", content_type="application/x-www-form-urlencoded"), 415),
            (completion(), 200),
        ):
            wire.send(data)
            answer = wire.answer()
            assert answer.status == status
            assert "connection" not in answer.headers


def test_a_response_to_http_1_0_ends_with_its_connection(gateway: LiveGateway) -> None:
    """A response to HTTP/1.0 ends with its connection, unless the client requests keep-alive; a stream is not
    chunked.
    """
    old = completion(stream=True).replace(b"HTTP/1.1", b"HTTP/1.0")
    with Wire(gateway.port) as wire:
        wire.send(old)
        answer = wire.answer()
        assert "transfer-encoding" not in answer.headers
        assert answer.headers["connection"] == "close"
        assert answer.body.endswith(b"data: [DONE]\n\n")
    with Wire(gateway.port) as wire:
        for _ in range(2):
            wire.send(b"GET /livez HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
            assert wire.answer().headers["connection"] == "keep-alive"
        wire.send(b"GET /livez HTTP/1.0\r\n\r\n")
        assert wire.answer().status == 200
        assert wire.at_end()


def test_head_is_get_without_the_body(gateway: LiveGateway) -> None:
    """The same headers without a body; routes without GET reject it."""
    with Wire(gateway.port) as wire:
        for path, status in (("/livez", 200), ("/v1/models", 200), ("/v1/completions", 405), ("/nowhere", 404)):
            wire.send(request("HEAD", path))
            answer = wire.answer(head_only=True)
            assert answer.status == status
            assert int(answer.headers["content-length"]) > 0
        wire.send(request("GET", "/livez"))
        assert wire.answer().body == b"ok\n"


def test_a_client_that_waits_for_permission_is_answered_before_its_body(gateway: LiveGateway) -> None:
    """A client that waits for permission to send its body gets it; one whose body is too long is rejected at once."""
    data = completion()
    head, _, body = data.partition(b"\r\n\r\n")
    with Wire(gateway.port) as wire:
        wire.send(head + b"\r\nExpect: 100-Continue\r\n\r\n")
        assert wire.answer().status == 100
        wire.send(body)
        assert wire.answer().status == 200
        wire.send(request("POST", "/v1/completions", expect="100-continue", content_length="999999"))
        assert wire.answer().status == 413


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://anywhere/livez", 200),
        ("HTTP://anywhere:1/livez?a=b", 200),
        ("http://anywhere", 404),
        ("/livez?x=%00&y", 200),
        ("/v1/models/%6d", 200),
        ("/v1/models/m%00", 404),
        ("/v1/models/%ff%fe", 404),
        ("/v1/models/%", 404),
        ("/v1/models/%zz", 404),
        ("/v1/models/..%2f..%2fetc", 404),
        ("/v1/models/", 200),
        ("//v1//models", 200),
        ("/models", 200),
        ("/v1/v1/models", 200),
        ("//metrics", 404),
        ("/v1/metrics", 404),
        ("/v1/%63ompletions", 404),
        ("*", 404),
    ],
)
def test_a_target_may_be_absolute_or_escape_a_model_name(gateway: LiveGateway, target: str, status: int) -> None:
    """Absolute targets are taken by their path; percent signs are understood in a model's name, and nowhere else."""
    assert ask(gateway.port, request("GET", target)).status == status


@pytest.mark.parametrize("upgrade", ["websocket", "h2c"])
@pytest.mark.parametrize("body", [None, b'{"model": "m", "prompt": "hello", "max_tokens": 3}'])
def test_an_upgrade_offer_is_ignored(gateway: LiveGateway, upgrade: str, body: bytes | None) -> None:
    """The request is answered as if it had no offer (curl --http2 and Java's client send it), and either the
    connection continues, or its end is announced.
    """
    path, method = ("/v1/completions", "POST") if body else ("/livez", "GET")
    with Wire(gateway.port, deadline_s=5) as wire:
        wire.send(request(method, path, body, Connection="Upgrade, HTTP2-Settings", Upgrade=upgrade))
        answer = wire.answer()
        assert answer.status == 200
        if answer.headers.get("connection") == "close":
            assert wire.at_end()
        else:
            wire.send(request("GET", "/livez"))
            assert wire.answer().status == 200


def test_many_upgrade_offers_in_one_read(gateway: LiveGateway) -> None:
    """Pipelined requests that all have it are answered one after the other."""
    with Wire(gateway.port) as wire:
        wire.send(request("GET", "/livez", Connection="Upgrade", Upgrade="h2c") * 2000)
        assert [wire.answer().status for _ in range(2000)] == [200] * 2000


def test_an_upgrade_offer_with_connection_close(gateway: LiveGateway) -> None:
    """The other values of Connection apply."""
    with Wire(gateway.port) as wire:
        wire.send(request("GET", "/livez", Connection="close, Upgrade", Upgrade="h2c"))
        assert wire.answer().headers["connection"] == "close"
        assert wire.at_end()


def test_connect_is_rejected(gateway: LiveGateway) -> None:
    """The gateway is not a proxy."""
    with Wire(gateway.port) as wire:
        wire.send(b"CONNECT localhost:22 HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answer = wire.answer()
        assert answer.status in (404, 405)
        assert answer.headers["connection"] == "close"
        assert wire.at_end()


@pytest.mark.parametrize(
    "head",
    {
        "both lengths": "content-length: 5\r\ntransfer-encoding: chunked",
        "both lengths, turned": "transfer-encoding: chunked\r\ncontent-length: 5",
        "two lengths": "content-length: 5\r\ncontent-length: 6",
        "the same length twice": "content-length: 5\r\ncontent-length: 5",
        "a list of lengths": "content-length: 5, 5",
        "a signed length": "content-length: +5",
        "a negative length": "content-length: -5",
        "a length with an underscore": "content-length: 1_0",
        "a length in hex": "content-length: 0x5",
        "a length that overflows": "content-length: 99999999999999999999999999",
        "an empty length": "content-length: ",
        "a word for a length": "content-length: five",
        "gzip, then chunked": "transfer-encoding: gzip, chunked",
        "chunked twice": "transfer-encoding: chunked, chunked",
        "gzip and chunked": "transfer-encoding: gzip\r\ntransfer-encoding: chunked",
        "chunked and identity": "transfer-encoding: chunked\r\ntransfer-encoding: identity",
        "not quite chunked": "transfer-encoding: xchunked",
        "chunked with a tail": "transfer-encoding: chunked;x=y",
        "chunked behind a tab": "transfer-encoding: \x0bchunked",
        "a space before the colon": "transfer-encoding : chunked",
        "a folded line": "x: y\r\n content-length: 5",
        "a bare CR": "x: y\rcontent-length: 5",
        "a NUL": "x: y\x00z",
        "no name": ": x",
        "a name with a space": "a b: c",
    }.values(),
    ids=lambda head: head.encode("unicode_escape").decode(),
)
def test_a_request_of_ambiguous_length_is_rejected_and_ends_its_connection(gateway: LiveGateway, head: str) -> None:
    """Input that two servers could parse in two ways is rejected: no second request can hide in it."""
    hidden = request("GET", "/livez", x_request_id="smuggled")
    with Wire(gateway.port) as wire:
        wire.offer(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + head.encode() + b"\r\n\r\n0\r\n\r\n" + hidden)
        answer = wire.answer()
        assert answer.status in (400, 413)
        assert answer.code
        assert answer.headers["connection"] == "close"
        assert wire.at_end()


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [
        ("1.1", [], 400),
        ("1.1", ["a", "b"], 400),
        ("1.1", ["a", "a"], 400),
        ("1.1", [""], 200),
        ("1.1", ["a:8080"], 200),
        ("1.0", [], 200),
        ("1.0", ["a", "b"], 400),
    ],
)
def test_a_request_has_exactly_one_host(gateway: LiveGateway, version: str, hosts: list[str], status: int) -> None:
    """RFC 9112, 3.2: two servers in a row must not see different hosts."""
    fields = "".join(f"host: {host}\r\n" for host in hosts)
    with Wire(gateway.port) as wire:
        wire.offer(f"GET /livez HTTP/{version}\r\n{fields}\r\n".encode())
        answer = wire.answer()
        assert answer.status == status
        if status == 400:
            assert answer.code == "malformed_http"
            assert wire.at_end()


def test_chunks_in_http_1_0_are_refused(gateway: LiveGateway) -> None:
    """HTTP/1.0 has no chunks: a proxy before us would not know them."""
    data = post(b"2\r\n{}\r\n0\r\n\r\n", transfer_encoding="chunked").replace(b"HTTP/1.1", b"HTTP/1.0")
    with Wire(gateway.port) as wire:
        wire.send(data)
        answer = wire.answer()
        assert status_and_text(answer) != (400, "invalid_json")
        assert answer.status == 400


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /livez HTTP/1.1\nhost: x\n\n",
        b"GET /livez HTTP/3.7\r\n\r\n",
        b"get /livez HTTP/1.1\r\n\r\n",
        b"GET /v1/\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /v1/\xc3\xa4 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\nhost: x\r\n\r\n",
        b"hello\r\n\r\n",
        post(b"5 \r\nhello\r\n0\r\n\r\n", transfer_encoding="chunked"),
        post(b"0x5\r\nhello\r\n0\r\n\r\n", transfer_encoding="chunked"),
        post(b"-5\r\nhello\r\n0\r\n\r\n", transfer_encoding="chunked"),
        post(b"5\nhello\n0\n\n", transfer_encoding="chunked"),
        post(b"5\r\nhelloXX0\r\n\r\n", transfer_encoding="chunked"),
        post(b"ffffffffffffffffff\r\nhello\r\n0\r\n\r\n", transfer_encoding="chunked"),
    ],
)
def test_input_that_is_not_http_is_400(gateway: LiveGateway, data: bytes) -> None:
    """Malformed requests get a readable error, and the connection closes."""
    with Wire(gateway.port) as wire:
        wire.offer(data)
        answer = wire.answer()
        assert answer.status in (400, 404, 413)
        assert answer.code


@pytest.mark.parametrize("line", ["GET /livez", "GET /livez HTTP/0.9", "GET /livez HTTP/2.0"])
def test_other_versions_of_http_are_400(gateway: LiveGateway, line: str) -> None:
    """With the version that is understood."""
    answer = ask(gateway.port, f"{line}\r\nHost: x\r\n\r\n".encode())
    assert (answer.status, answer.code) == (400, "malformed_http")
    assert "use HTTP/1.1" in answer.body.decode()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content_type": "application/json; charset=utf-8"}, 200),
        ({"Content_TYPE": "Application/JSON"}, 200),
        ({"content_type": "text/plain"}, 415),
        ({"content_type": "multipart/form-data; boundary=x"}, 415),
        ({"content_encoding": "identity"}, 200),
        ({"content_encoding": "gzip"}, 415),
        ({"content_encoding": "br, gzip"}, 415),
    ],
)
def test_content_types_and_encodings(gateway: LiveGateway, headers: dict[str, str], status: int) -> None:
    """JSON as it is, and nothing else; names of headers in any case."""
    answer = ask(gateway.port, post(SMALL, **headers))
    assert answer.status == status
    assert status == 200 or answer.code


# Names of requests


@pytest.mark.parametrize("path", ["/livez", "/nowhere", "/v1/models"])
def test_a_request_keeps_its_id(gateway: LiveGateway, path: str) -> None:
    """x-request-id is returned with every response, including errors, exactly once."""
    answer = ask(gateway.port, request("GET", path, X_Request_ID="abc-123.Z"))
    assert answer.headers["x-request-id"] == "abc-123.Z"
    assert answer.names.count("x-request-id") == 1


@pytest.mark.parametrize("given", ["", "x" * 200, "caf\xe9", "a\tb"])
def test_an_id_that_no_log_can_hold_is_replaced(gateway: LiveGateway, given: str) -> None:
    """An id is printable ASCII of at most 128 characters; for any other the gateway generates one."""
    answer = ask(gateway.port, request("GET", "/livez", x_request_id=given))
    assert answer.status == 200
    assert answer.headers["x-request-id"] not in ("", given)


def test_requests_without_ids_get_different_ones(gateway: LiveGateway) -> None:
    """So that every response can be found in the log."""
    names = {ask(gateway.port, request("GET", "/livez")).headers["x-request-id"] for _ in range(5)}
    assert len(names) == 5


def test_every_response_has_each_header_once(gateway: LiveGateway) -> None:
    """No header is repeated in any kind of response."""
    for data in (completion(), completion(stream=True), request("GET", "/x"), post(b"{"), b"bad\r\n\r\n"):
        answer = ask(gateway.port, data)
        assert len(set(answer.names)) == len(answer.names), answer.names


# Browsers


def test_scripts_of_other_origins_are_rejected_by_default(gateway: LiveGateway) -> None:
    """Without CORS settings no page of another origin can use the loopback gateway, not even blindly."""
    foreign = ask(gateway.port, post(SMALL, origin="https://evil.example"))
    preflight = ask(
        gateway.port,
        request("OPTIONS", "/v1/completions", origin="https://evil.example", access_control_request_method="POST"),
    )
    rebound = ask(gateway.port, post(SMALL, origin="http://evil.example:80", host="evil.example:80"))
    own = ask(gateway.port, post(SMALL, origin=f"http://localhost:{gateway.port}", host=f"localhost:{gateway.port}"))

    for answer in (foreign, preflight, rebound):
        assert status_and_text(answer) == (403, "origin_not_allowed")
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert own.status == 200


def test_scripts_of_named_origins_are_served(opened: Open) -> None:
    """Preflights and answers, errors among them, carry the headers; those of other origins are still refused."""
    gateway = opened(cors_origins=("https://app.example",))
    keys_of(gateway).create("any")
    until(lambda: demands(gateway), 5, "keys are required")
    preflight = request(
        "OPTIONS",
        "/v1/chat/completions",
        origin="https://app.example",
        access_control_request_method="POST",
        access_control_request_headers="authorization",
    )

    allowed = ask(gateway.port, preflight)
    refused = ask(gateway.port, post(SMALL, origin="https://app.example"))
    other = ask(gateway.port, post(SMALL, origin="https://app.example.evil"))

    assert allowed.status == 204
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    for header in ("authorization", "x-api-key", "anthropic-version", "anthropic-beta"):
        assert header in allowed.headers["access-control-allow-headers"].split(", ")
    assert status_and_text(refused) == (401, "invalid_api_key")
    assert refused.headers["access-control-allow-origin"] == "https://app.example"
    assert refused.headers["vary"] == "origin"
    assert status_and_text(other)[0] == 403


def test_an_origin_is_returned_as_one_header(opened: Open) -> None:
    """With `*` any origin is returned, and cannot become a header or a response of its own."""
    gateway = opened(cors_origins=("*",))
    for origin in ("null", "a b", "x" * 1000, "\xe9\xff", "a\tb", "http://x/\x7f"):
        with Wire(gateway.port) as wire:
            wire.send(request("GET", "/livez", origin=origin) + request("GET", "/v1/models"))
            answer = wire.answer()
            assert answer.status in (200, 400)
            assert len(set(answer.names)) == len(answer.names)
            if answer.status == 200:
                assert wire.answer().json["object"] == "list"


# Keys


def test_keys_are_checked_for_validity_scope_and_model(opened: Open) -> None:
    """Without a key, with a wrong one, an expired one: 401. For another model, or without the scope: 403."""
    gateway = opened()
    keys = keys_of(gateway)
    _, good = keys.create("good")
    _, narrow = keys.create("narrow", models=["other"])
    _, admin = keys.create("admin", scopes=["admin"])
    _, over = keys.create("over", expires=time.time() + 0.05, now=time.time())
    until(lambda: demands(gateway) and ask(gateway.port, completion_with(admin)).status == 403, 5, "all keys are read")

    def answer_to(**headers: str) -> Raw:
        return ask(gateway.port, post(SMALL, **headers))

    wrong = good[:-1] + ("A" if good[-1] != "A" else "B")
    assert answer_to(x_api_key=good).status == 200
    assert answer_to(authorization=f"bearer {good}").status == 200
    for headers in (
        {},
        {"authorization": f"Bearer {wrong}"},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": f"Basic {good}"},
        {"authorization": f"Bearer {good} {good}"},
        {"authorization": f"Bearer {good[:-1]}"},
        {"authorization": "Bearer cw-\xe9\xe9\xe9\xe9\xe9\xe9\xe9\xe9-" + "\xff" * 43},
        {"x_api_key": "x" * 3000},
        {"x_api_key": over},
        {"authorization": good},
    ):
        answer = answer_to(**headers)
        assert status_and_text(answer) == (401, "invalid_api_key"), headers
        assert answer.headers["www-authenticate"] == "Bearer"
        assert good not in answer.body.decode()
    assert status_and_text(answer_to(authorization=f"Bearer {narrow}")) == (403, "key_not_allowed")
    assert status_and_text(answer_to(authorization=f"Bearer {admin}")) == (403, "key_not_allowed")
    assert ask(gateway.port, completion_with(narrow, model="other")).status == 200
    listed = ask(gateway.port, request("GET", "/v1/models", x_api_key=narrow)).json["data"]
    assert [card["id"] for card in listed] == ["other"]
    assert ask(gateway.port, request("GET", "/v1/models/m", x_api_key=narrow)).status == 403
    assert status_and_text(ask(gateway.port, request("GET", "/v1/models", x_api_key=admin))) == (403, "key_not_allowed")
    assert ask(gateway.port, completion_with(narrow, model="nope")).status == 403  # nor does it learn what there is


def test_probes_need_no_key_but_all_other_routes_do(opened: Open) -> None:
    """A client without a key cannot discover the routes or the fields of a body."""
    gateway = opened()
    keys_of(gateway).create("one")
    until(lambda: demands(gateway), 5, "keys are required")

    for path in ("/livez", "/readyz", "/health", "/ping"):
        assert ask(gateway.port, request("GET", path)).status == 200
    for data in (
        request("GET", "/v1/models"),
        request("GET", "/version"),
        request("GET", "/nowhere"),
        request("GET", "/metrics"),
        post(b"{"),
        request("GET", "http://x/v1/models"),
        request("GET", "/livez/../v1/models"),
        request("GET", "/%6civez"),
        request("OPTIONS", "/v1/models"),
    ):
        assert status_and_text(ask(gateway.port, data)) == (401, "invalid_api_key"), data


@pytest.mark.parametrize("length", ["content_length", "chunked"])
def test_a_client_without_a_key_cannot_send_a_long_body(opened: Open, length: str) -> None:
    """It is rejected after its headers: nothing of the body is awaited or stored."""
    gateway = opened()
    _, key = keys_of(gateway).create("one")
    until(lambda: demands(gateway), 5, "keys are required")
    fields = {"transfer_encoding": "chunked"} if length == "chunked" else {"content_length": "8000000"}
    with Wire(gateway.port) as wire:
        wire.send(request("POST", "/v1/completions", authorization="Bearer wrong", **fields))  # type: ignore[arg-type]
        answer = wire.answer()
        assert status_and_text(answer) == (401, "invalid_api_key")
        assert answer.headers["connection"] == "close"
    with Wire(gateway.port) as wire:
        wire.send(request("POST", "/v1/completions", authorization=f"Bearer {key}", expect="100-continue", **fields))  # type: ignore[arg-type]
        assert wire.answer().status == 100


def test_a_key_expires_on_open_connections_too(opened: Open) -> None:
    """The gateway rechecks the key of a connection for each request."""
    gateway = opened()
    keys = keys_of(gateway)
    keys.create("lasting")
    until(lambda: demands(gateway), 5, "keys are required")
    _, key = keys.create("short", expires=time.time() + 1.5)
    until(lambda: ask(gateway.port, completion_with(key)).status == 200, 1, "it is known")
    with Wire(gateway.port) as wire:

        def status() -> int:
            wire.send(completion_with(key))
            return wire.answer().status

        assert status() == 200
        until(lambda: status() == 401, 5, "it has expired")


def test_a_revoked_key_ends_on_open_connections_too(opened: Open) -> None:
    """Within a second, on a connection that it has used before; and the last key revoked opens nothing."""
    gateway = opened()
    keys = keys_of(gateway)
    _, key = keys.create("one")
    until(lambda: demands(gateway), 5, "keys are required")
    with Wire(gateway.port) as wire:
        wire.send(completion_with(key))
        assert wire.answer().status == 200

        keys.revoke("one")
        began = time.monotonic()

        def refused() -> bool:
            wire.send(completion_with(key))
            return wire.answer().status == 401

        until(refused, 5, "the key is refused")
        assert time.monotonic() - began < 1.0
    assert demands(gateway)


def test_a_stream_that_began_before_its_key_was_revoked_is_completed() -> None:
    """As docs/security.md promises. The next request on its connection is rejected, as are those on others."""
    slow = Served(step_ms=10)
    gateway = LiveGateway()
    try:
        gateway.serve(routes("m", slow))
        keys = keys_of(gateway)
        _, key = keys.create("one")
        until(lambda: demands(gateway), 5, "keys are required")
        with Wire(gateway.port) as wire:
            wire.send(completion_with(key, stream=True, max_tokens=300))
            wire.read_until(b"data: ")
            keys.revoke("one")
            until(lambda: ask(gateway.port, completion_with(key)).status == 401, 5, "the key is refused")
            assert gateway.queue("m").links.live == 1
            stream = wire.read_until(b"data: [DONE]\n\n")
            wire.read_until(b"0\r\n\r\n")
            assert b'"finish_reason":"length"' in stream
            wire.send(completion_with(key))
            assert wire.answer().status == 401
    finally:
        gateway.close()
        slow.close()


def test_a_broken_or_lost_key_file_opens_nothing(opened: Open) -> None:
    """The loaded keys stay, and a key is still required."""
    gateway = opened()
    keys = keys_of(gateway)
    _, key = keys.create("one")
    until(lambda: demands(gateway), 5, "keys are required")
    path: Path = keys.path

    for harm in (lambda: path.write_text('{"version": 1, "keys": ['), path.unlink):
        harm()
        end = time.monotonic() + 0.6
        while time.monotonic() < end:
            assert demands(gateway)
            assert ask(gateway.port, completion_with(key)).status == 200


def test_two_keys_in_one_request_are_rejected(opened: Open) -> None:
    """Neither a repeated header nor two headers may be read in one of two ways; also after a request with one key."""
    gateway = opened()
    _, key = keys_of(gateway).create("one")
    _, other = keys_of(gateway).create("other")
    until(lambda: demands(gateway), 5, "keys are required")
    until(lambda: ask(gateway.port, post(SMALL, x_api_key=other)).status == 200, 5, "the gateway knows the keys")
    for first, second in ((key, "x"), ("x", key), (key, other)):
        data = post(SMALL, authorization=f"Bearer {first}", AUTHORIZATION=f"Bearer {second}")
        assert ask(gateway.port, data).status in (400, 401)
        with Wire(gateway.port) as wire:
            wire.send(post(SMALL, authorization=f"Bearer {key}"))
            assert wire.answer().status == 200
            wire.send(post(SMALL, authorization=f"Bearer {first}", x_api_key=second))
            assert status_and_text(wire.answer()) == (401, "invalid_api_key")


def test_one_key_may_be_in_both_headers(opened: Open) -> None:
    gateway = opened()
    _, key = keys_of(gateway).create("one")
    data = post(SMALL, authorization=f"Bearer {key}", x_api_key=key)

    until(lambda: demands(gateway), 5, "keys are required")

    assert ask(gateway.port, data).status == 200


# Odd bodies


@pytest.mark.parametrize(
    "fields",
    {
        "an id of many digits": {"logit_bias": {"9" * 5000: 1}},
        "an id in Arabic digits": {"logit_bias": {"\u0663": 1}},
        "negative ids that are echoed": {"prompt": [-5], "echo": True},
        "ids that are too large, echoed": {"prompt": [2**40], "echo": True},
        "ids of a thousand digits": {"prompt": [10**1000]},
        "true for an id": {"prompt": [True]},
        "a nest of lists": {"prompt": [[[1]]]},
        "no prompt of several": {"prompt": ["a", ""]},
        "a stop of another kind": {"stop": [1]},
        "an empty stop": {"stop": [""]},
        "a model of another kind": {"model": ["m"]},
        "a model that is nothing": {"model": None},
        "an object for a number": {"temperature": {}},
        "a text for a number": {"max_tokens": "3"},
        "a fraction of a token": {"max_tokens": 1.5},
        "no tokens": {"max_tokens": 0},
        "all tokens": {"max_tokens": 2**31 - 1},
        "more than all": {"max_tokens": 2**63},
        "a seed that no frame holds": {"seed": 2**64},
        "many choices": {"n": 129},
        "many prompts": {"prompt": ["x"] * 2049},
    }.values(),
    ids=lambda fields: str(fields)[:40],
)
def test_an_odd_field_is_the_clients_mistake(gateway: LiveGateway, fields: dict[str, Any]) -> None:
    """400 with what is wrong, never 500."""
    answer = ask(gateway.port, completion(**fields))
    assert answer.status in (400, 404, 422), answer.body[:300]
    assert answer.code is not None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"{}",
        b"\xef\xbb\xbf{}",
        b'{"model": "m", "prompt": "\\ud800"}',
        b'{"model": "m", "prompt": "\xff"}',
        b'{"model": "m", "prompt": "x", "temperature": 1e999}',
        b'{"model": "m", "prompt": "x", "temperature": NaN}',
        b'{"model": "m", "prompt": "x", "temperature": -Infinity}',
        b'{"model": "m", "prompt": [' + b"9" * 5000 + b"]}",
        b'{"model": "m", "prompt": "x", "user": ' + b"[" * 9000 + b"]" * 9000 + b"}",
        '{"model": "m", "prompt": "x"}'.encode("utf-16"),
        '{"model": "m", "prompt": "x"}'.encode("utf-32"),
    ],
    ids=lambda body: repr(body[:30]),
)
def test_an_invalid_json_body_is_400(gateway: LiveGateway, body: bytes) -> None:
    """Wrong encodings, invalid numbers, endless nesting."""
    for path in ("/v1/completions", CHAT):
        answer = ask(gateway.port, post(body, path))
        assert answer.status == 400
        assert answer.code


def test_an_error_does_not_repeat_the_whole_input(opened: Open) -> None:
    """The message quotes its beginning: a client cannot enlarge the response."""
    gateway = opened()
    for data in (
        completion(model="\x00" * 1_000_000),
        post(b'{"model":"m","prompt":"x","' + b"a" * 7_000_000 + b'":1}'),
        post({"model": "m", "messages": [{"role": "user", "content": [{"type": "x" * 1_000_000}]}]}, CHAT),
        completion(response_format={"type": "x" * 1_000_000}),
        completion(logit_bias={"x" * 1_000_000: 1}),
    ):
        answer = ask(gateway.port, data)
        assert answer.status in (400, 404)
        assert len(answer.body) < 10_000


def test_a_client_without_a_key_writes_no_log_lines(opened: Open, tmp_path: Path) -> None:
    """For any number of requests: they are counted, and one line has their number."""
    gateway = opened()
    keys_of(gateway).create("someone")
    until(lambda: demands(gateway), 5, "a key is needed")
    writer = logs.set_up(tmp_path / "gateway.log", stderr=False)
    try:
        for i in range(50):
            assert ask(gateway.port, request("GET", f"/{'x' * 1000}{i}")).status == 401
        until(lambda: writer.flush(5.0) and (tmp_path / "gateway.log").read_text(), 10, "they are told")
        written = (tmp_path / "gateway.log").read_text()
    finally:
        logs.tear_down()

    assert len(written.splitlines()) <= 2
    assert "with status 401" in written
    assert "xxx" not in written


def test_a_key_for_a_model_does_not_include_its_adapters(opened: Open, served: Served) -> None:
    """And one for an adapter does not include the model; an alias of the model is one of the adapter, too. The limits
    of its key are the adapter's own."""
    gateway = opened()
    model = msgspec.structs.replace(routes("m", served), aliases=["alias"], adapters=["support"])
    gateway.serve(model)
    keys = keys_of(gateway)
    names = ("m", "alias", "m:support", "alias:support")
    twice = Allowance(requests_per_minute=2)
    secrets = [keys.create("base", models=["m"])[1], keys.create("adapter", models=["m:support"], allowance=twice)[1]]
    until(lambda: demands(gateway) and ask(gateway.port, completion_with(secrets[0])).status == 200, 5, "keys are read")

    statuses = [[ask(gateway.port, completion_with(key, model=name)).status for name in names] for key in secrets]

    assert statuses == [[200, 200, 403, 403], [403, 403, 200, 200]]
    again = zip(secrets, ("m", "m:support"), strict=True)
    assert [ask(gateway.port, completion_with(key, model=name)).status for key, name in again] == [200, 429]
