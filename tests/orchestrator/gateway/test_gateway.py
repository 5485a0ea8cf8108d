"""The gateway over real sockets, with replicas in this process and a controller that the test plays."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx
import msgspec.structs
import pytest
from openai import NotFoundError, OpenAI

from orchestrator.gateway import app, request_log
from orchestrator.gateway.http import request_reader
from orchestrator.messages.replica_states import ModelState
from orchestrator.process.logs import Access
from tests.fleet import until
from tests.orchestrator.gateways import LiveGateway, routes
from tests.served import EPOCH, Served
from workers.engines.echo.engine import echo_tokens
from workers.messages.wire import PROTOCOL

Make = Callable[..., Served]


def echo_text(prompt: str, count: int) -> str:
    return bytes(echo_tokens(list(prompt.encode()), count)).decode()


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "hello", **fields}


def complete(gateway: LiveGateway, model: str = "m", **fields: Any) -> httpx.Response:
    return gateway.http.post("/v1/completions", json={"model": model, "prompt": "hello", **fields})


def error_of(response: httpx.Response) -> dict[str, Any]:
    body: dict[str, Any] = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


def events_of(lines: list[str]) -> list[Any]:
    """The JSON of each server-sent event; `[DONE]` must be the last and is left out."""
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


# Answers


def test_a_completion_is_the_replicas_text_with_its_usage(gateway: LiveGateway, replica: Make) -> None:
    """A plain completion has OpenAI's format, 16 tokens by default, and counts them."""
    gateway.serve(routes("m", replica()))

    answer = complete(gateway).json()

    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": echo_text("hello", 16), "logprobs": None, "finish_reason": "length"}
    ]
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 16, "total_tokens": 21}


def test_token_ids_are_accepted_unchanged(gateway: LiveGateway, replica: Make) -> None:
    """A prompt of ids gives the same answer as its text."""
    gateway.serve(routes("m", replica()))

    assert complete(gateway, prompt=list(b"hello")).json()["choices"] == complete(gateway).json()["choices"]


def test_a_chat_streams_role_text_finish_and_usage(gateway: LiveGateway, replica: Make) -> None:
    """A streamed chat has OpenAI's chunks in order, and usage if requested."""
    gateway.serve(routes("m", replica()))
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }

    with gateway.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = events_of(list(response.iter_lines()))

    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == echo_text("user: hi\nassistant:", 5)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(deltas) - 1) + ["length"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 5


def test_the_openai_client_gets_its_objects(gateway: LiveGateway, replica: Make) -> None:
    """The official client works with it: models, chat, completions, streamed and not, errors."""
    gateway.serve(routes("m", replica()))
    client = OpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0)

    assert [card.id for card in client.models.list()] == ["m"]
    assert client.models.retrieve("m").id == "m"
    text = client.completions.create(model="m", prompt="hello", max_tokens=4).choices[0].text
    streamed = client.completions.create(model="m", prompt="hello", max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == text == echo_text("hello", 4)
    chat = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}], max_completion_tokens=3
    )
    assert chat.choices[0].message.content == echo_text("user: hi\nassistant:", 3)
    with pytest.raises(NotFoundError, match="The model 'nope' does not exist"):
        client.completions.create(model="nope", prompt="x")


def test_a_stop_string_is_not_in_the_text(gateway: LiveGateway, replica: Make) -> None:
    """Generation ends before the stop string, with the reason `stop`."""
    gateway.serve(routes("m", replica()))
    whole = echo_text("hello", 30)

    choice = complete(gateway, max_tokens=30, stop=whole[10:13]).json()["choices"][0]

    assert choice["text"] == whole[: whole.index(whole[10:13])]
    assert choice["finish_reason"] == "stop"


def test_every_answer_belongs_to_its_request(gateway: LiveGateway, replica: Make) -> None:
    """64 concurrent requests through two replicas of 4 slots: each gets its own text."""
    gateway.serve(routes("m", replica(), replica()))
    answers: dict[int, str] = {}

    def ask(i: int) -> None:
        answers[i] = complete(gateway, prompt=f"request {i}", max_tokens=8 + i % 5).json()["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)

    assert answers == {i: echo_text(f"request {i}", 8 + i % 5) for i in range(64)}


# Probes


def test_readyz_follows_the_controller(fresh_gateway: LiveGateway, replica: Make) -> None:
    """Not ready before every model is, ready afterwards even during a restart of the controller, not while stopping."""
    gateway = fresh_gateway
    gateway.serve(routes("m"), ready=False)
    until(lambda: gateway.http.get("/readyz").status_code == 503, 5, "not ready")
    assert "m: loading" in gateway.http.get("/readyz").text
    assert gateway.http.get("/livez").status_code == 200

    gateway.serve(routes("m", replica()))
    assert gateway.http.get("/readyz").status_code == 200
    assert gateway.http.get("/health").status_code == 200

    gateway.serve(routes("m"), ready=False)
    assert gateway.http.get("/readyz").status_code == 200

    gateway.controller.set(routes("m"), stopping=True)
    until(lambda: gateway.http.get("/readyz").status_code == 503, 5, "not ready while stopping")
    assert error_of(complete(gateway))["message"] == "The model 'm' is stopping."


def test_the_last_routes_stay_in_force_while_the_controller_is_away(gateway: LiveGateway, replica: Make) -> None:
    """A controller that is started again does not disturb requests."""
    gateway.serve(routes("m", replica()))
    gateway.controller.answers = False
    try:
        assert complete(gateway).status_code == 200
    finally:
        gateway.controller.answers = True


# A model that is down


def test_a_model_that_is_down_returns_503_with_retry_after(gateway: LiveGateway) -> None:
    """At once, with its cause."""
    gateway.serve(routes("m", state=ModelState.FAILED, reason="weights-missing: no safetensors in /models/m"))

    response = complete(gateway)

    assert (response.status_code, error_of(response)["code"]) == (503, "model_unavailable")
    assert "weights-missing" in error_of(response)["message"]
    assert int(response.headers["retry-after"]) > 0


# The queue


class Stream:
    """A streamed completion on a socket of its own, which can be cut off at any time."""

    def __init__(
        self, gateway: LiveGateway, prompt: str = "hello", max_tokens: int = 4000, stream: bool = True
    ) -> None:
        body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": max_tokens, "stream": stream}).encode()
        self.socket = socket.create_connection(("127.0.0.1", gateway.port), timeout=10)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        self.socket.sendall(head.encode() + body)

    def read_until(self, text: str) -> str:
        received = ""
        while text not in received:
            data = self.socket.recv(65536)
            assert data, f"the stream ended without {text!r}: {received[-500:]}"
            received += data.decode()
        return received

    def hang_up(self) -> None:
        self.socket.close()


def test_a_full_queue_is_429_with_retry_after(gateway: LiveGateway, replica: Make) -> None:
    """With one slot in use and one request waiting, the third is rejected; the others are not affected."""
    served = replica(slots=1, step_ms=2)
    gateway.serve(routes("m", served, max_queue=1))
    running = Stream(gateway)
    running.read_until("data: ")
    waiting = Stream(gateway, "next", 3)
    until(lambda: gateway.queue("m").waiting == 1, 5, "one request waits")

    refused = complete(gateway)

    assert (refused.status_code, error_of(refused)["code"]) == (429, "queue_full")
    assert int(refused.headers["retry-after"]) >= 1
    running.hang_up()
    waiting.read_until("[DONE]")


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnected_client_frees_its_slot_within_two_steps(
    gateway: LiveGateway, replica: Make, stream: bool
) -> None:
    """After the disconnect the engine makes at most two more steps for that request."""
    served = replica(slots=1, step_ms=150)  # long beside the time that a hang-up takes on a busy machine
    gateway.serve(routes("m", served))
    running = Stream(gateway, stream=stream)
    until(lambda: served.batcher.stats.steps >= 3, 10, "it decodes")

    before = served.batcher.stats.steps
    running.hang_up()
    until(lambda: served.batcher.stats.live == 0, 10, "the slot is free")

    assert served.batcher.stats.steps - before <= 2


def test_a_disconnected_client_leaves_the_queue(gateway: LiveGateway, replica: Make) -> None:
    """A waiting request of a disconnected client is never started."""
    served = replica(slots=1, step_ms=5)
    gateway.serve(routes("m", served))
    running = Stream(gateway)
    running.read_until("data: ")
    waiting = Stream(gateway, "never", 3)
    until(lambda: gateway.queue("m").waiting == 1, 5, "one request waits")

    waiting.hang_up()

    until(lambda: gateway.queue("m").waiting == 0, 5, "the queue is empty")
    running.hang_up()
    until(lambda: served.batcher.stats.live == 0, 5, "the slot is free")


def test_an_unloaded_model_rejects_its_waiting_requests(gateway: LiveGateway, replica: Make) -> None:
    """Nothing will start it: the waiting request gets 503, the running one is completed."""
    served = replica(slots=1, step_ms=2)
    gateway.serve(routes("m", served))
    running = Stream(gateway, "runs", 300)
    running.read_until("data: ")
    waiting = Stream(gateway, "waits", 3)
    until(lambda: gateway.queue("m").waiting == 1, 5, "one request waits")

    gateway.serve(routes("m", state=ModelState.UNLOADED))

    assert "model_unavailable" in waiting.read_until("}}")
    running.read_until("[DONE]")


def test_a_lost_replica_ends_a_begun_stream_with_an_error_event(gateway: LiveGateway, replica: Make) -> None:
    """A stream of which something was sent ends with an error; it is not begun again."""
    served = replica(slots=1, step_ms=5)
    gateway.serve(routes("m", served))
    stream = Stream(gateway)
    stream.read_until("data: ")

    served.kill()

    received = stream.read_until('"error"')
    assert "replica_lost" in received
    assert "[DONE]" not in received


def test_requests_without_output_are_retried_on_another_replica(gateway: LiveGateway, replica: Make) -> None:
    """They get their answer although their replica died."""
    dying, living = replica(slots=2, step_ms=20), replica(slots=2)
    gateway.serve(routes("m", dying))
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: answers.append(complete(gateway, max_tokens=200))) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: dying.batcher.stats.live == 2, 10, "both run on the first replica")

    gateway.serve(routes("m", dying, living))
    dying.kill()
    for thread in threads:
        thread.join(20)

    assert [answer.json()["choices"][0]["text"] for answer in answers] == [echo_text("hello", 200)] * 2


def test_a_request_at_a_silent_replica_moves_to_its_replacement(gateway: LiveGateway, replica: Make) -> None:
    """On a frozen host nothing ends the process and its connections: the route of a later epoch does."""
    silent, later = replica(stepped=True), replica(epoch=EPOCH + 1)
    gateway.serve(routes("m", silent))
    waiting = Stream(gateway, "hello", 3, stream=False)
    until(lambda: silent.batcher.stats.live == 1, 10, "the request is at the replica")
    replaced = routes("m", later)

    gateway.serve(
        msgspec.structs.replace(
            replaced, replicas=[msgspec.structs.replace(route, epoch=EPOCH + 1) for route in replaced.replicas]
        )
    )

    waiting.read_until("length")


def test_a_broken_connection_to_a_live_replica_is_reopened(gateway: LiveGateway, replica: Make) -> None:
    """A lost link is not a lost replica: as long as the routes have it, it is reconnected."""
    served = replica()
    gateway.serve(routes("m", served))
    served.kill()
    until(lambda: gateway.queue("m").links.slots == 0, 5, "the link is lost")

    served.restart_plane()

    until(lambda: gateway.queue("m").links.slots == 4, 5, "the link is back")
    assert complete(gateway).status_code == 200


def test_a_model_without_replicas_is_started_and_its_requests_wait(gateway: LiveGateway, replica: Make) -> None:
    """`min: 0`: the first request starts a replica, and is answered by it."""
    gateway.serve(routes("m", state=ModelState.UNLOADED, holds=True))
    gateway.controller.woken.clear()
    waiting = Stream(gateway, "hello", 3)
    until(lambda: gateway.controller.woken == ["m"], 5, "the model is woken")

    gateway.serve(routes("m", state=ModelState.LOADING, holds=True))
    gateway.serve(routes("m", replica(), holds=True))

    waiting.read_until("[DONE]")


def test_requests_that_wait_for_a_load_get_its_failure(gateway: LiveGateway) -> None:
    """No request keeps waiting for a model that cannot load."""
    gateway.serve(routes("m", state=ModelState.UNLOADED, holds=True))
    waiting = Stream(gateway, "hello", 3)
    until(lambda: gateway.queue("m").waiting == 1, 5, "one request waits")

    gateway.serve(routes("m", state=ModelState.FAILED, holds=True, reason="no weights"))

    assert "HTTP/1.1 503" in waiting.read_until("no weights")


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_returned_on_request(gateway: LiveGateway, replica: Make, stream: bool) -> None:
    """`return_token_ids` gives the ids beside the text, in vLLM's fields."""
    gateway.serve(routes("m", replica()))

    response = complete(gateway, max_tokens=6, return_token_ids=True, stream=stream)

    answers = events_of(response.text.splitlines()) if stream else [response.json()]
    ids = [id for answer in answers for id in answer["choices"][0]["token_ids"]]
    assert ids == echo_tokens(list(b"hello"), 6)


def test_a_replica_of_a_distant_version_gets_no_request(gateway: LiveGateway, replica: Make) -> None:
    """Their protocols may differ by one: another replica is not connected, and not retried in a loop."""
    other = replica(protocol=PROTOCOL + 2)
    gateway.controller.set(routes("m", other))

    queue = until(lambda: gateway.queue("m") if "m" in gateway.queues else None, 5, "the model is known")

    def answer() -> httpx.Response | None:
        response = complete(gateway)
        return response if response.status_code == 503 else None

    refused = until(answer, 10, "requests are refused, and none waits for a replica that will not serve")

    assert queue.links.slots == queue.waiting == 0
    assert error_of(refused)["type"] == "service_unavailable"


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_choices_are_answered_together(gateway: LiveGateway, replica: Make, stream: bool) -> None:
    """A list of prompts with n=2: choices in order, each with its own text, streamed or not."""
    gateway.serve(routes("m", replica()))
    body = {"prompt": ["one", "two", "three"], "n": 2, "max_tokens": 6, "stream": stream}

    response = complete(gateway, **body)  # type: ignore[arg-type]

    answers = events_of(response.text.splitlines()) if stream else [response.json()]
    texts = [""] * 6
    for answer in answers:
        for choice in answer["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [echo_text(prompt, 6) for prompt in ("one", "one", "two", "two", "three", "three")]


def test_echo_repeats_the_prompt(gateway: LiveGateway, replica: Make) -> None:
    """`echo` puts the prompt's text before the answer, for text and for token ids."""
    gateway.serve(routes("m", replica()))

    for prompt in ("hello", list(b"hello")):
        answer = complete(gateway, prompt=prompt, max_tokens=3, echo=True).json()
        assert answer["choices"][0]["text"] == "hello" + echo_text("hello", 3)


def test_a_rejected_choice_cancels_the_others(gateway: LiveGateway, replica: Make) -> None:
    """Three choices that do not all fit in the queue are rejected together, and none of them runs."""
    served = replica(slots=1, step_ms=5)
    gateway.serve(routes("m", served, max_queue=2))
    with gateway.http.stream("POST", "/v1/completions", json=body(max_tokens=4000, stream=True)):
        until(lambda: served.batcher.stats.live == 1, 5, "the slot is taken")

        refused = complete(gateway, n=3, max_tokens=1000)

        assert (refused.status_code, error_of(refused)["code"]) == (429, "queue_full")
        assert gateway.queue("m").waiting == 0
    until(lambda: served.batcher.stats.live == 0, 5, "nothing runs")


def test_more_choices_than_capacity_are_rejected_at_once(gateway: LiveGateway, replica: Make) -> None:
    """A request that exceeds all slots and the whole queue can never be answered: it is the client's error."""
    gateway.serve(routes("m", replica(slots=1), max_queue=2))

    refused = complete(gateway, n=4)

    assert (refused.status_code, error_of(refused)["code"]) == (400, "too_many_choices")


@pytest.mark.parametrize(
    "field", [{"stop_token_ids": [2**70]}, {"top_k": 2**70}, {"min_tokens": 2**70}, {"no_repeat_ngram_size": 2**70}]
)
def test_a_number_outside_the_frame_format_is_rejected_without_harm(
    gateway: LiveGateway, replica: Make, field: dict[str, Any]
) -> None:
    """It is the client's error; it uses no slot, and a stream beside it keeps all its tokens."""
    gateway.serve(routes("m", replica(slots=1, step_ms=1)))
    beside = Stream(gateway, "beside", 200)
    beside.read_until("data: ")

    assert complete(gateway, **field).status_code == 400

    beside.read_until("[DONE]")
    assert complete(gateway, max_tokens=2).status_code == 200


def test_a_draining_replica_returns_a_request(gateway: LiveGateway, replica: Make) -> None:
    """Another replica serves it, and the client does not see the retry."""
    draining, other = replica(), replica()
    gateway.serve(routes("m", draining))
    draining.batcher.drain(0.0)
    waiting = Stream(gateway, "hello", 3, stream=False)

    gateway.serve(routes("m", draining, other))

    waiting.read_until("length")


def test_a_replica_that_returns_to_the_routes_is_used_again(gateway: LiveGateway, replica: Make) -> None:
    """A route that disappears and returns during a stream serves new requests at once."""
    served = replica(slots=2, step_ms=2)
    gateway.serve(routes("m", served))
    stream = Stream(gateway, "hello", 1000)
    stream.read_until("data: ")
    gateway.serve(routes("m"))

    gateway.serve(routes("m", served))

    assert complete(gateway, max_tokens=2).status_code == 200
    stream.hang_up()


def test_a_started_model_is_requested_again_after_a_controller_restart(gateway: LiveGateway, replica: Make) -> None:
    """As long as a request waits for a model that is unloaded, the gateway requests it."""
    gateway.serve(routes("m", state=ModelState.UNLOADED, holds=True))
    gateway.controller.woken.clear()
    waiting = Stream(gateway, "hello", 3)
    until(lambda: gateway.controller.woken == ["m"], 5, "woken")

    gateway.serve(routes("m", state=ModelState.UNLOADED, holds=True, reason="started again"))

    until(lambda: gateway.controller.woken == ["m", "m"], 5, "woken again")
    gateway.serve(routes("m", replica(), holds=True))
    waiting.read_until("[DONE]")


# Who answered, and what the gateway counts


def test_an_answer_has_its_replica_and_the_gateways_overhead(gateway: LiveGateway, replica: Make) -> None:
    """The request's id is returned with the replica and the gateway's own milliseconds."""
    gateway.serve(routes("m", replica()))
    body = {"model": "m", "prompt": "hello", "max_tokens": 3}

    for stream in (False, True):
        answer = gateway.http.post("/v1/completions", json={**body, "stream": stream}, headers={"x-request-id": "r-17"})
        assert answer.headers["x-request-id"] == "r-17"
        assert answer.headers["x-corewright-replica"] == "m/0"
        assert 0 <= float(answer.headers["x-corewright-overhead-ms"]) < 1000


def test_a_model_can_be_requested_by_its_aliases(gateway: LiveGateway, replica: Make) -> None:
    """An alias is listed, and serves requests like the model's name."""
    served = replica()
    gateway.serve(msgspec.structs.replace(routes("m", served), aliases=["other"]))

    cards = gateway.http.get("/v1/models").json()["data"]

    assert [(card["id"], card["root"]) for card in cards] == [("m", "m"), ("other", "m")]
    assert gateway.http.get("/v1/models/other").json()["id"] == "other"
    answer = complete(gateway, "other").json()
    assert answer["choices"] == complete(gateway).json()["choices"]
    assert answer["model"] == "other"


def test_adapters_are_models_of_their_own(fresh_gateway: LiveGateway, replica: Make) -> None:
    """They are listed with their parent, answer under their own name, and are counted apart, by the model's name."""
    fresh_gateway.serve(msgspec.structs.replace(routes("m", replica()), aliases=["other"], adapters=["support"]))

    cards = fresh_gateway.http.get("/v1/models").json()["data"]
    assert {(card["id"], card["parent"]) for card in cards} == {
        ("m", None),
        ("other", "m"),
        ("m:support", "m"),
        ("other:support", "m"),
    }
    for name in ("m", "m:support", "other:support"):
        assert complete(fresh_gateway, name).json()["model"] == name
    assert complete(fresh_gateway, "m:legal").status_code == 404
    page = fresh_gateway.http.get("/metrics").text
    counted = dict(re.findall(r'vllm:prompt_tokens_total\{.*?model_name="([^"]*)".*?\} (\S+)', page))
    assert float(counted["m:support"]) == 2 * float(counted["m"])


def test_metrics_count_requests_and_tokens_by_model_and_replica(fresh_gateway: LiveGateway, replica: Make) -> None:
    """vLLM's names, with the actual numbers; a rejection counts as one."""
    fresh_gateway.serve(routes("m", replica()))
    for stream in (False, True):
        complete(fresh_gateway, max_tokens=7, stream=stream)
    complete(fresh_gateway, temperature=9)

    page = fresh_gateway.http.get("/metrics").text

    labels = '{engine="0",model_name="m"}'
    assert sample(page, "vllm:prompt_tokens_total" + labels) == 10
    assert sample(page, "vllm:generation_tokens_total" + labels) == 14
    assert sample(page, "vllm:time_to_first_token_seconds_count" + labels) == 2
    assert sample(page, "vllm:inter_token_latency_seconds_count" + labels) == 12
    assert sample(page, 'vllm:request_success_total{engine="0",finished_reason="length",model_name="m"}') == 2
    assert 'status="400"' in page


def test_a_moved_request_is_counted_with_the_reason(fresh_gateway: LiveGateway, replica: Make) -> None:
    """For the model, once for each move."""
    dying, living = replica(slots=1, step_ms=20), replica(slots=1)
    fresh_gateway.serve(routes("m", dying))
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(complete(fresh_gateway, max_tokens=200)))
    asking.start()
    until(lambda: dying.batcher.stats.live == 1, 10, "it runs on the first replica")
    fresh_gateway.serve(routes("m", dying, living))
    dying.kill()
    asking.join(20)

    page = fresh_gateway.http.get("/metrics").text

    assert answers[0].status_code == 200
    assert sample(page, 'corewright_request_retries_total{kind="lost",model="m"}') == 1


@pytest.mark.parametrize("log_prompts", [False, True])
def test_the_log_line_of_a_request_has_its_prompt_only_if_enabled(
    log_prompts: bool, replica: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the answer; bodies of other routes are never logged."""
    lines: list[Access] = []
    monkeypatch.setattr(request_log, "access_log", lines.append)
    live = LiveGateway(log_prompts=log_prompts)
    try:
        live.serve(routes("m", replica()))
        complete(live, max_tokens=3)
        complete(live, "nobody", max_tokens=3)
        until(lambda: len(lines) == 2, 5, "both are over")
    finally:
        live.close()

    texts = [("hello" in (line.prompt or ""), line.answer) for line in lines]
    assert texts == [(log_prompts, echo_text("hello", 3) if log_prompts else None), (False, None)]
    assert lines[1].prompt is None


def test_a_gateway_knows_the_routes_before_it_listens(replica: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another gateway on the same port serves requests until then."""
    known: list[bool] = []
    join = app.Gateway.join

    async def joined(self: app.Gateway) -> bool:
        known.append("m" in self.served.queues)
        return await join(self)

    monkeypatch.setattr(app.Gateway, "join", joined)
    live = LiveGateway(models=(routes("m", replica()),))
    live.close()
    assert known == [True]


def sample(page: str, name: str) -> float:
    """The value of one series, whatever the order of its labels."""
    wanted = name.partition("{")[0], set(name.partition("{")[2].rstrip("}").split(","))
    for line in page.splitlines():
        if not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            if (series.partition("{")[0], set(series.partition("{")[2].rstrip("}").split(","))) == wanted:
                return float(value)
    raise AssertionError(f"{name} is not on the page")


# What is no request


def test_input_that_is_not_http_gets_an_error_and_is_closed(gateway: LiveGateway) -> None:
    """One response, in the format of every other error."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as client:
        client.sendall(b"BREW /pot HTCPCP/1.0\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(65536), b""))

    head, _, content = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(content)["error"]["code"] == "malformed_http"


def test_a_compressed_body_is_refused(gateway: LiveGateway) -> None:
    """A body is read as it is; to unpack one could take any amount of memory."""
    refused = gateway.http.post("/v1/completions", content=b"\x1f\x8b", headers={"content-encoding": "gzip"})

    assert (refused.status_code, error_of(refused)["code"]) == (415, "unsupported_encoding")


def test_incomplete_bodies_have_a_common_limit(
    gateway: LiveGateway, replica: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many clients that withhold the ends of large bodies cannot fill the memory; later they count no more."""
    monkeypatch.setattr(request_reader, "MAX_UNREAD_BYTES", 300_000)
    gateway.serve(routes("m", replica()))
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as first:
        first.sendall(head + b" " * 190_000)
        until(lambda: gateway.http_server.unread_bytes == 190_000, 5, "the body is there but for its end")

        refused = gateway.http.post("/v1/completions", content=b" " * 200_000)

        assert (refused.status_code, error_of(refused)["code"]) == (503, "too_many_bodies")
    until(lambda: gateway.http_server.unread_bytes == 0, 5, "nothing is held")
    assert complete(gateway).status_code == 200
