"""A request for a model without a replica learns how long that takes: Retry-After, the message and the decision."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import msgspec.structs
import pytest

from orchestrator.messages.replica_states import ModelState
from orchestrator.messages.route_table import ModelRoutes
from tests.fleet import until
from tests.orchestrator.gateways import LiveGateway, routes
from tests.served import Served

Make = Callable[..., Served]
EXPLAIN = {"x-corewright-explain": "1"}
MESSAGES = [{"role": "user", "content": "hello"}]
SHAPES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "m", "prompt": "hello", "max_tokens": 3},
    "/v1/chat/completions": {"model": "m", "messages": MESSAGES, "max_tokens": 3},
    "/v1/messages": {"model": "m", "messages": MESSAGES, "max_tokens": 3},
    "/v1/responses": {"model": "m", "input": "hello", "max_output_tokens": 3},
    "/invocations": {"inputs": "hello", "parameters": {"max_new_tokens": 3}},
}


def loading(left_s: float | None, **fields: Any) -> ModelRoutes:
    """A model whose first replica is expected in so many seconds."""
    at = None if left_s is None else time.time() + left_s
    return msgspec.structs.replace(routes("m", state=ModelState.LOADING), ready_at=at, **fields)


def ask(gateway: LiveGateway, path: str = "/v1/completions", **headers: str) -> httpx.Response:
    return gateway.http.post(path, json=SHAPES[path], headers=headers)


@pytest.mark.parametrize("path", SHAPES)
def test_the_retry_time_is_the_rest_of_the_running_start(gateway: LiveGateway, path: str) -> None:
    """The same in each API."""
    gateway.serve(loading(41.0))

    response = ask(gateway, path)

    assert response.status_code == 503
    assert int(response.headers["retry-after"]) in (40, 41)
    assert "is expected to be ready in about 4" in response.text


def test_the_retry_time_of_a_model_in_a_sagemaker_container_is_the_same() -> None:
    """SageMaker drops the header, so the message has the time, too."""
    gateway = LiveGateway(sagemaker=True)
    try:
        gateway.serve(loading(41.0))
        response = gateway.http.post("/models/m/invoke", json=SHAPES["/invocations"])
    finally:
        gateway.close()
    assert int(response.headers["retry-after"]) in (40, 41)
    assert "is expected to be ready in about 4" in response.text


def test_a_start_that_takes_longer_than_expected_is_not_retried_each_second(gateway: LiveGateway) -> None:
    """It is late by 20 s, and expected to take as long again."""
    gateway.serve(loading(-20.0))

    assert int(ask(gateway).headers["retry-after"]) in (20, 21)


def test_a_long_start_is_retried_after_a_minute_and_its_time_is_in_the_message(gateway: LiveGateway) -> None:
    """Clients of OpenAI and of Anthropic ignore a Retry-After of more than 60 s, and retry at once."""
    gateway.serve(loading(300.0))

    response = ask(gateway)

    assert response.headers["retry-after"] == "60"
    assert "in about 300 s" in response.text


def test_without_an_expected_time_a_loading_model_is_retried_soon(gateway: LiveGateway) -> None:
    """No start of the model was measured yet."""
    gateway.serve(loading(None))

    assert ask(gateway).headers["retry-after"] == "2"


def test_a_full_queue_of_a_model_that_starts_is_retried_when_it_is_ready(gateway: LiveGateway, replica: Make) -> None:
    """No request leaves the queue before."""
    gateway.serve(loading(30.0, loads_on_request=True, max_queue=1))
    held = threading.Thread(target=ask, args=(gateway,))
    held.start()
    until(lambda: gateway.queue("m").waiting == 1, 10, "a request waits")

    refused = ask(gateway)

    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert int(refused.headers["retry-after"]) in (29, 30)
    gateway.serve(routes("m", replica()))
    held.join(20)


def test_a_request_that_was_held_in_vain_learns_the_time_of_the_next_start(gateway: LiveGateway) -> None:
    """Nothing was started: the next start takes as long as the last ones."""
    table = routes("m", state=ModelState.UNLOADED, holds=True)
    gateway.serve(msgspec.structs.replace(table, hold_s=0.2, start_s=7.0))

    response = ask(gateway, **EXPLAIN)

    assert response.headers["retry-after"] == "7"
    assert response.headers["x-corewright-decision"].endswith("; start=cold; expected_ms=7000")


def test_no_time_is_expected_for_a_model_that_gets_no_cores(gateway: LiveGateway) -> None:
    """When it will get some is unknown."""
    reason = "held back: no cores that serve less elsewhere"
    table = routes("m", state=ModelState.UNLOADED, holds=True, reason=reason)
    gateway.serve(msgspec.structs.replace(table, hold_s=0.2, start_s=7.0))

    response = ask(gateway, **EXPLAIN)

    assert response.headers["retry-after"] == "10"
    assert "expected" not in response.text + response.headers["x-corewright-decision"]


def test_a_refused_request_learns_the_expected_wait_if_it_requests_the_decision(gateway: LiveGateway) -> None:
    """Others get no header."""
    gateway.serve(loading(41.0))

    decision = ask(gateway, **EXPLAIN).headers["x-corewright-decision"]

    assert decision.startswith("queue_ms=0.000; start=cold; expected_ms=4")
    assert "x-corewright-decision" not in ask(gateway).headers


def test_a_held_request_learns_the_wait_that_was_expected(gateway: LiveGateway, replica: Make) -> None:
    """With its answer: the decision has the real wait, too."""
    gateway.serve(msgspec.structs.replace(routes("m", state=ModelState.UNLOADED, holds=True), start_s=12.5))
    answers: list[httpx.Response] = []
    held = threading.Thread(target=lambda: answers.append(ask(gateway, **EXPLAIN)))
    held.start()
    until(lambda: gateway.queue("m").waiting == 1, 10, "a request waits")
    gateway.serve(routes("m", replica(), holds=True))
    held.join(20)

    assert "start=cold; retries=0; expected_ms=12500" in answers[0].headers["x-corewright-decision"]


def test_a_stream_that_waits_learns_the_expected_wait_before_its_first_token(replica: Make) -> None:
    """In the head, which is sent with the first comment."""
    gateway = LiveGateway(keep_alive_s=0.05)
    try:
        gateway.serve(msgspec.structs.replace(routes("m", state=ModelState.UNLOADED, holds=True), start_s=12.5))
        body = {**SHAPES["/v1/completions"], "stream": True}
        with gateway.http.stream("POST", "/v1/completions", json=body, headers=EXPLAIN) as response:
            name, _, left_ms = response.headers["x-corewright-decision"].rpartition("=")
            gateway.serve(routes("m", replica(), holds=True))
            response.read()
        assert name.endswith("; start=cold; expected_ms")
        assert 2500 < int(left_ms) < 12500
    finally:
        gateway.close()
