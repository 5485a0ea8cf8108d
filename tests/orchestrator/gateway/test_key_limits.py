"""The limits of keys at the gateways: exact at each, and exchanged between them."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.access.keys import Allowance, ApiKey, KeyFile, KeyRing
from orchestrator.gateway.key_limits import Exceeded, KeyCounts, KeyLimits, reserve
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.messages.key_usage import KeyUsageExchange
from orchestrator.process.home import Home
from tests.fleet import until
from tests.orchestrator.encoded import EncoderReplica, HeldEncoder
from tests.orchestrator.gateways import LiveGateway, routes
from tests.served import Served

NOW = 5000.0  # monotonic seconds


def key(id: str = "0123abcd", **limits: Any) -> ApiKey:
    return ApiKey(
        id=id, name="ci", digest="0" * 64, scopes=("inference",), models=(), created=0.0, expires=None, **limits
    )


def refusal(limits: KeyLimits, of: ApiKey, tokens: int = 1, now: float = NOW, **named: Any) -> ApiError:
    with pytest.raises(ApiError) as refused:
        limits.take(of, tokens, now, **named)
    return refused.value


def limit_headers(limits: KeyLimits, of: ApiKey, now: float = NOW) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in limits.headers(of, now)}


def test_a_key_without_limits_has_no_headers_about_them() -> None:
    limits = KeyLimits()
    assert not key(weight=3.0).limited
    assert (limits.headers(None, NOW), limits.headers(key(), NOW)) == ((), ())


def test_a_client_gets_its_limits_in_openais_headers() -> None:
    """Only those that are set."""
    limits, ci = KeyLimits(), key(requests_per_minute=600, tokens_per_minute=6000)
    limits.take(ci, 864, NOW)
    assert limit_headers(limits, ci) == {
        "x-ratelimit-limit-requests": "600",
        "x-ratelimit-remaining-requests": "599",
        "x-ratelimit-reset-requests": "100ms",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "5136",
        "x-ratelimit-reset-tokens": "8.64s",
    }
    assert "x-ratelimit-limit-requests" not in limit_headers(limits, key(tokens_per_minute=6000))
    assert limit_headers(limits, key(max_concurrent=1)) == {}


def test_a_request_over_a_limit_is_rejected_until_the_retry_time() -> None:
    """429, with a computed Retry-After; rejected requests are not charged."""
    limits, ci = KeyLimits(), key(requests_per_minute=600, tokens_per_minute=6000)
    limits.take(ci, 5900, NOW)
    for _ in range(3):
        refused = refusal(limits, ci, 500)
        assert (refused.status, refused.code, refused.retry_after_s) == (429, "rate_limit_exceeded", 4)
    assert "6000 tokens per minute" in refused.message
    assert refusal(limits, ci, 500, NOW + 3.9).retry_after_s == 1
    assert limits.take(ci, 500, NOW + 4).reserved == 500
    assert limit_headers(limits, ci, NOW + 4)["x-ratelimit-remaining-requests"] == "599"


def test_a_request_that_can_never_pass_is_not_429() -> None:
    """Which clients would retry repeatedly. Without a number from the client, its bucket is reserved."""
    limits, ci = KeyLimits(), key(tokens_per_minute=100)
    refused = refusal(limits, ci, 101)
    assert (refused.status, refused.code, refused.retry_after_s) == (400, "over_rate_limit", None)
    assert refusal(limits, ci, 4096, least=101).code == "over_rate_limit"
    assert limits.take(ci, 4096, NOW, least=100).reserved == 100


def test_unused_tokens_are_returned_once() -> None:
    """And the place with them."""
    limits, ci = KeyLimits(), key(tokens_per_minute=6000, max_concurrent=1)
    grant = limits.take(ci, 6000, NOW)
    assert refusal(limits, ci).message.startswith("This API key's limit of 1 requests at a time")
    grant.settle(1000, NOW)
    grant.settle(0, NOW)
    assert limit_headers(limits, ci)["x-ratelimit-remaining-tokens"] == "5000"
    limits.take(ci, 1, NOW)
    refused = refusal(limits, ci)
    assert (refused.status, refused.code, refused.retry_after_s) == (429, "rate_limit_exceeded", 1)


def test_the_end_of_one_request_frees_one_place() -> None:
    """The others keep theirs."""
    limits, ci = KeyLimits(), key(max_concurrent=3)
    first, *_ = [limits.take(ci, 1, NOW) for _ in range(3)]
    first.settle(1, NOW)
    limits.take(ci, 1, NOW)
    assert refusal(limits, ci).status == 429


def test_a_changed_limit_applies_from_the_next_request_on() -> None:
    """Running requests are counted, too."""
    limits = KeyLimits()
    limits.take(key(max_concurrent=2), 1, NOW)
    assert "limit of 1 requests" in refusal(limits, key(max_concurrent=1)).message
    limits.take(key(max_concurrent=2), 1, NOW)
    assert limits.take(key(requests_per_minute=1), 1, NOW).reserved == 1


def exchanged(now: float, *gateways: KeyLimits, keys: KeyRing, rounds: int = 2) -> None:
    """The gateways report to the controller, each in turn: in the second round each has what all have used."""
    exchange = KeyUsageExchange()
    for gateway in gateways:  # it is known from its first report on
        exchange.receive(str(id(gateway)), [])
    for _ in range(rounds):
        for gateway in gateways:
            gateway.charge(exchange.receive(str(id(gateway)), gateway.report(now)), keys, now)


LIMITS: dict[str, Any] = {"requests_per_minute": 6, "tokens_per_minute": 100, "max_concurrent": 5}
TAKEN = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40), st.none() | st.integers(0, 60)), max_size=20)


@given(TAKEN)
def test_after_an_exchange_every_gateway_counts_as_one_that_had_all_requests(
    taken: list[tuple[int, int, int | None]],
) -> None:
    """What a key uses in the second between two reports can exceed its limits, and is owed. ``taken`` has the gateway,
    the reserved tokens, and those used by requests that have ended."""
    ci, gateways, alone = key(**LIMITS), [KeyLimits() for _ in range(3)], KeyCounts()
    live = 0
    for number, tokens, used in taken:
        with contextlib.suppress(ApiError):
            grant = gateways[number].take(ci, tokens, NOW)
            alone = KeyCounts(NOW, alone.requests + 1, alone.tokens + (tokens if used is None else used))
            live += used is None
            if used is not None:
                grant.settle(used, NOW)
    exchanged(NOW, *gateways, keys=KeyRing([ci]))

    expected = reserve(alone, ci, live, 1, NOW)
    for gateway in gateways:
        if isinstance(expected, Exceeded):
            assert str(expected.limit) in refusal(gateway, ci).message
        else:
            grant = gateway.take(ci, 1, NOW)
            grant.settle(0, NOW)


@pytest.mark.parametrize("keys", [1, 60_000])
def test_the_limits_of_a_gateway_are_exact_for_any_number_of_keys(keys: int) -> None:
    """None is lost to another one."""
    limits = KeyLimits()
    for number in range(keys):
        limits.take(key(f"{number:08x}", requests_per_minute=2), 1, NOW)
    for number in range(0, keys, 1000):
        ci = key(f"{number:08x}", requests_per_minute=2)
        limits.take(ci, 1, NOW)
        assert refusal(limits, ci).status == 429


def test_two_gateways_exceed_a_limit_by_what_they_accept_between_two_reports() -> None:
    """And no more: what was accepted too much is owed, and refused until the bucket has refilled."""
    ci = key(requests_per_minute=60)
    first, other = KeyLimits(), KeyLimits()
    accepted = 0
    for second in range(120):
        for gateway in (first, other):
            for _ in range(10):
                with contextlib.suppress(ApiError):
                    gateway.take(ci, 1, NOW + second).settle(1, NOW + second)
                    accepted += 1
        exchanged(NOW + second, first, other, keys=KeyRing([ci]))
    assert 60 + 119 <= accepted <= 60 + 119 + 20


def test_keys_without_requests_for_ten_minutes_are_forgotten() -> None:
    """Their buckets are full again, whatever they owed."""
    limits = KeyLimits()
    for number in range(10):
        limits.take(key(f"{number:08x}", requests_per_minute=60), 1, NOW).settle(1, NOW)
    limits.report(NOW + 599)
    assert len(limits._counts) == 10
    limits.report(NOW + 601 + 60)
    assert limits._counts == {}


# Over HTTP


def test_every_response_to_a_limited_key_has_its_limits(replica: Callable[..., Served]) -> None:
    """Rejections too; a change of the key applies on an open connection. Reserved tokens are returned."""
    live = LiveGateway()
    try:
        keys = KeyFile(Home(live.home).keys)
        _, text = keys.create("ci", allowance=Allowance(requests_per_minute=2, tokens_per_minute=1000))
        live.serve(routes("m", replica()))

        def ask(**fields: Any) -> httpx.Response:
            body = {"model": "m", "prompt": "hello", "max_tokens": 7, **fields}
            return live.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {text}"})

        until(lambda: live.http.get("/v1/models").status_code == 401, 5, "a key is required")
        first, second, third = ask(), ask(stream=True, max_tokens=900), ask()
        assert [answer.status_code for answer in (first, second, third)] == [200, 200, 429]
        assert third.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(third.headers["retry-after"]) <= 30
        assert [answer.headers["x-ratelimit-limit-requests"] for answer in (first, second, third)] == ["2"] * 3
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in (first, second, third)] == [
            "1",
            "0",
            "0",
        ]
        assert int(second.headers["x-ratelimit-remaining-tokens"]) <= 95

        keys.change("ci", requests_per_minute=None)
        changed = until(lambda: answer if (answer := ask()).status_code == 200 else None, 5, "the limit is gone")
        assert "x-ratelimit-limit-requests" not in changed.headers
        assert ask(max_tokens=1500).json()["error"]["code"] == "over_rate_limit"
    finally:
        live.close()


def test_requests_with_a_key_without_limits_are_not_counted(replica: Callable[..., Served]) -> None:
    live = LiveGateway()
    try:
        _, text = KeyFile(Home(live.home).keys).create("ci")
        live.serve(routes("m", replica()))
        until(lambda: live.http.get("/v1/models").status_code == 401, 5, "a key is required")
        body = {"model": "m", "prompt": "hello", "max_tokens": 7}
        answer = live.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {text}"})
        assert answer.status_code == 200
        assert live._server.gateway._limits.report(time.monotonic()) == []
    finally:
        live.close()


def test_a_disconnected_client_frees_its_place(replica: Callable[..., Served]) -> None:
    """And its reservation."""
    live = LiveGateway()
    try:
        _, text = KeyFile(Home(live.home).keys).create("ci", allowance=Allowance(max_concurrent=1))
        live.serve(routes("m", replica(step_ms=50)))
        body = {"model": "m", "prompt": "hello", "max_tokens": 900, "stream": True}
        headers = {"Authorization": f"Bearer {text}"}

        def ask() -> int:
            return live.http.post("/v1/completions", json={**body, "max_tokens": 1}, headers=headers).status_code

        until(lambda: live.http.get("/v1/models").status_code == 401, 5, "a key is required")
        with live.http.stream("POST", "/v1/completions", json=body, headers=headers) as running:
            assert running.status_code == 200
            assert ask() == 429
        until(lambda: ask() == 200, 5, "its place is free")
    finally:
        live.close()


@pytest.mark.parametrize(
    ("path", "fields"),
    [("completions", {"model": "m", "prompt": "a" * 60}), ("embeddings", {"model": "e", "input": "a" * 60})],
)
def test_a_disconnected_client_pays_for_a_prompt_that_a_replica_has(
    path: str, fields: dict[str, str], replica: Callable[..., Served]
) -> None:
    """Also before the first token, or the embedding: the replica has begun to compute it."""
    live, served, encoder = LiveGateway(), replica(stepped=True), EncoderReplica(HeldEncoder())
    try:
        ci, text = KeyFile(Home(live.home).keys).create("ci", allowance=Allowance(tokens_per_minute=200))
        live.serve(routes("m", served), routes("e", encoder, kind="embedding", max_len=64))
        until(lambda: live.http.get("/v1/models").status_code == 401, 5, "a key is required")
        limits, body = live._server.gateway._limits, json.dumps(fields)
        with socket.create_connection(("127.0.0.1", live.port), timeout=10) as client:
            head = f"host: x\r\nauthorization: Bearer {text}\r\ncontent-length: {len(body)}"
            client.sendall(f"POST /v1/{path} HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
            until(lambda: served.batcher.stats.live or encoder.requests, 10, "a replica has the prompt")
        until(lambda: not limits._live, 10, "the request is over")
        assert int(limit_headers(limits, ci, time.monotonic())["x-ratelimit-remaining-tokens"]) < 200
    finally:
        live.close()
        encoder.close()


def test_tokens_of_encoded_inputs_count_towards_the_limit() -> None:
    """All of a request's inputs together; what is refused is not encoded."""
    live, encoder = LiveGateway(), EncoderReplica()
    try:
        _, text = KeyFile(Home(live.home).keys).create("ci", allowance=Allowance(tokens_per_minute=200))
        live.serve(routes("e", encoder, kind="embedding", max_len=64))

        def embed(*inputs: str) -> httpx.Response:
            headers = {"Authorization": f"Bearer {text}"}
            return live.http.post("/v1/embeddings", json={"model": "e", "input": inputs}, headers=headers)

        until(lambda: live.http.get("/v1/models").status_code == 401, 5, "a key is required")
        first, second = embed("a" * 60, "b" * 60), embed("a" * 60, "b" * 60)
        assert [first.status_code, second.status_code] == [200, 429]
        assert 80 <= int(first.headers["x-ratelimit-remaining-tokens"]) <= 85
        assert embed(*["c" * 60] * 4).status_code == 400  # never within the limit
        assert len(encoder.requests) == 1
    finally:
        live.close()
        encoder.close()


def test_the_retry_time_is_never_too_short() -> None:
    """Whole seconds, rounded up: a retry just then is accepted."""
    limits, ci = KeyLimits(), key(requests_per_minute=7)  # one each 8.57 s
    for _ in range(7):
        limits.take(ci, 1, NOW)
    assert refusal(limits, ci).retry_after_s == 9
    assert limits.take(ci, 1, NOW + 9).reserved == 1
