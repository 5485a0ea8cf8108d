"""Requests to models with the engine server: bodies pass through a real gateway, data plane and relay."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from tests.fleet import until
from tests.orchestrator.gateways import LiveGateway, routes
from tests.scripted_server import DONE, NAME, Call, RelayedReplica, chunk, event
from tests.served import Served

Make = Callable[..., RelayedReplica]
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
WHOLE = {
    "id": "c",
    "object": "text_completion",
    "model": NAME,
    "choices": [{"index": 0, "text": "abc", "finish_reason": "stop", "x_more": [1.50]}],
    "usage": USAGE,
}
STREAM = (chunk("a"), chunk("b"), chunk("c", "length"), chunk(usage=USAGE), DONE)


@pytest.fixture
def relayed() -> Iterator[Make]:
    made: list[RelayedReplica] = []

    def make(script: Callable[[Call], None], slots: int = 2) -> RelayedReplica:
        made.append(RelayedReplica(script, slots))
        return made[-1]

    yield make
    for replica in made:
        replica.close()


def serve(gateway: LiveGateway, *replicas: Any, name: str = "m", engine: str = "server") -> None:
    gateway.serve(routes(name, *replicas, engine=engine))


def complete(gateway: LiveGateway, **fields: Any) -> httpx.Response:
    return gateway.http.post("/v1/completions", json={"model": "m", "prompt": "hello", **fields})


def streamed(gateway: LiveGateway, **fields: Any) -> list[Any]:
    """The events of a streamed completion, without comments; `[DONE]` as it is."""
    lines = complete(gateway, stream=True, **fields).text.split("\n\n")
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def text_of(events: list[Any]) -> str:
    return "".join(choice["text"] for item in events if item != "[DONE]" for choice in item.get("choices", ()))


def once(first: Callable[[Call], None]) -> Callable[[Call], None]:
    """Answers the first call by ``first`` and all others with success."""
    calls: list[Call] = []

    def script(call: Call) -> None:
        calls.append(call)
        if len(calls) == 1:
            first(call)
        elif call.body.get("stream"):
            call.stream(*STREAM)
        else:
            call.answer(WHOLE)

    return script


# Bodies


def test_only_the_model_of_a_body_is_replaced(gateway: LiveGateway, relayed: Make) -> None:
    """Unknown fields, nested values and the route reach the server; its answer comes back with the client's name."""
    replica = relayed(lambda call: call.answer(WHOLE))
    serve(gateway, replica)
    fields = {"top_k": 3, "x_unknown": {"deep": [1, None]}, "image": "data:..."}

    response = complete(gateway, **fields)

    assert replica.calls[0].path == "/v1/completions"
    assert replica.calls[0].body == {"model": NAME, "prompt": "hello", **fields}
    assert response.json() == {**WHOLE, "model": "m"}
    assert response.headers["x-corewright-replica"] == "m/0"


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
def test_a_stream_shows_usage_only_on_request(gateway: LiveGateway, relayed: Make, options: Any) -> None:
    """The server always gets `include_usage`; its event is left out if the client has not set it."""
    replica = relayed(lambda call: call.stream(*STREAM))
    serve(gateway, replica)

    events = streamed(gateway, **({} if options is None else {"stream_options": options}))

    assert replica.calls[0].body["stream_options"] == {"include_usage": True}
    assert text_of(events) == "abc"
    assert events[-1] == "[DONE]"
    assert {item["model"] for item in events[:-1]} == {"m"}
    assert [item["usage"] for item in events[:-1] if item.get("usage")] == (
        [USAGE] if (options or {}).get("include_usage") else []
    )


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url"])
def test_parts_that_are_not_text_reach_a_vllm_server(gateway: LiveGateway, relayed: Make, kind: str) -> None:
    """With all other fields; other engines refuse them."""
    answer = {**WHOLE, "choices": [{"index": 0, "message": {"content": "a cat"}, "finish_reason": "stop"}]}
    replica = relayed(lambda call: call.answer(answer))
    serve(gateway, replica, engine="vllm")
    parts = [{"type": "text", "text": "What?"}, {"type": kind, kind: {"url": "data:;base64,AAAA", "detail": "low"}}]
    fields = {"messages": [{"role": "user", "content": parts}], "top_k": 3}

    response = gateway.http.post("/v1/chat/completions", json={"model": "m", **fields})

    assert response.json() == {**answer, "model": "m"}
    assert replica.calls[0].body == {"model": NAME, **fields}
    serve(gateway, replica, engine="echo")
    refused = gateway.http.post("/v1/chat/completions", json={"model": "m", **fields})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")


def test_events_may_arrive_in_any_pieces(gateway: LiveGateway, relayed: Make) -> None:
    """A stream of single bytes, with comments and carriage returns, is the same stream."""
    stream = (b": ping\r\n\r\n" + b"".join(STREAM)).replace(b"\n\n", b"\r\n\r\n")
    replica = relayed(lambda call: call.stream(*[stream[i : i + 1] for i in range(len(stream))]))
    serve(gateway, replica)

    assert text_of(streamed(gateway)) == "abc"


def test_embeddings_and_tokenizer_routes_are_the_servers(gateway: LiveGateway, relayed: Make) -> None:
    """Routes without a finish reason are forwarded; a route that the server lacks is its 404."""
    vectors = {"object": "list", "model": NAME, "data": [{"embedding": [0.25]}], "usage": {"prompt_tokens": 4}}

    def script(call: Call) -> None:
        if call.path in ("/v1/embeddings", "/rerank"):
            call.answer(vectors)
        elif call.path == "/tokenize":
            call.answer({"tokens": [1, 2]})
        else:
            call.answer({"error": {"message": "no such route"}}, 404)

    serve(gateway, relayed(script))

    assert gateway.http.post("/v1/embeddings", json={"model": "m", "input": "a"}).json() == {**vectors, "model": "m"}
    assert gateway.http.post("/rerank", json={"model": "m", "x": 1}).json() == {**vectors, "model": "m"}
    assert gateway.http.post("/tokenize", json={"model": "m", "content": "a"}).json() == {"tokens": [1, 2]}
    refused = gateway.http.post("/detokenize", json={"model": "m", "tokens": [1]})
    assert (refused.status_code, refused.json()["error"]["message"]) == (404, "no such route")


def test_both_kinds_of_model_are_served_together(
    gateway: LiveGateway, relayed: Make, replica: Callable[..., Served]
) -> None:
    """The model's name decides whether a body is forwarded."""
    forwarding = relayed(lambda call: call.answer(WHOLE))
    gateway.serve(routes("m", forwarding, engine="server"), routes("own", replica()))  # type: ignore[arg-type]

    own = gateway.http.post("/v1/completions", json={"model": "own", "prompt": "hello", "max_tokens": 2}).json()

    assert own["usage"]["completion_tokens"] == 2
    assert complete(gateway).json()["choices"][0]["text"] == "abc"
    assert len(forwarding.calls) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a"}, "model"),
        ({"model": "m", "max_tokens": "3"}, "max_tokens"),
        ({"model": "m", "stream": 1}, "stream"),
    ],
)
def test_what_the_gateway_reads_is_checked(
    gateway: LiveGateway, relayed: Make, body: dict[str, Any], param: str
) -> None:
    """A wrong value of a field that the gateway uses is a 400 that names it, and nothing is forwarded."""
    replica = relayed(lambda call: call.answer(WHOLE))
    serve(gateway, replica)

    response = gateway.http.post("/v1/completions", json=body)

    assert (response.status_code, response.json()["error"]["param"], replica.calls) == (400, param, [])


# Errors


@pytest.mark.parametrize(
    ("fault", "streams"),
    [
        (lambda call: call.answer({"error": "busy"}, 503), False),
        (lambda call: call.answer({"error": "busy"}, 503), True),
        (lambda call: call.answer({"error": "busy"}, 429), False),
        (lambda call: call.answer({"error": {"message": "busy", "code": 503}}), False),
        (lambda call: setattr(call, "close_connection", True), False),
        (lambda call: call.stream(b"{", breaks=True), False),
        (lambda call: call.stream(breaks=True), True),
        (lambda call: call.stream(event({"choices": [{"delta": {"role": "assistant"}}]}), breaks=True), True),
        (lambda call: call.stream(event({"error": {"message": "busy", "code": 503}}), DONE), True),
        (lambda call: call.stream(DONE), True),
        (lambda call: call.stream(), True),
    ],
    ids=[
        *("503", "503-to-a-stream", "429", "503-in-200", "no-answer", "half-an-answer", "lost", "lost-after-the-role"),
        *("503-event", "only-done", "empty"),
    ],
)
def test_a_request_without_text_is_retried(
    gateway: LiveGateway, relayed: Make, fault: Callable[[Call], None], streams: bool
) -> None:
    """A server that refuses or is lost before the first text costs the client nothing."""
    replica = relayed(once(fault))
    serve(gateway, replica)

    answer = text_of(streamed(gateway)) if streams else complete(gateway).json()["choices"][0]["text"]

    assert (answer, len(replica.calls)) == ("abc", 2)


@pytest.mark.parametrize("streams", [False, True])
def test_a_server_that_begins_no_attempt_is_named_in_the_error(
    gateway: LiveGateway, relayed: Make, streams: bool
) -> None:
    """After two retries the client gets the server's own message, and when to try again."""
    replica = relayed(lambda call: call.answer({"error": "no memory left"}, 503))
    serve(gateway, replica)

    response = complete(gateway, stream=streams)

    assert (response.status_code, response.json()["error"]["code"]) == (503, "server_unavailable")
    assert "no memory left" in response.json()["error"]["message"]
    assert response.headers["retry-after"] == "1"
    assert len(replica.calls) == 3
    until(lambda: gateway.queue("m").links.live == 0, 10, "its slot is free")


@pytest.mark.parametrize(
    "pieces",
    [
        (chunk("a"),),
        (chunk("a"), DONE),
        (chunk("a"), event({"error": {"message": "gone", "code": 500}}), DONE),
        (chunk("a"), event({"error": {"message": "gone", "code": 503}}), DONE),
        (chunk("a"), b"data: {broken\n\n"),
    ],
    ids=["ends", "done-without-finish", "error-event", "503-event", "not-json"],
)
@pytest.mark.parametrize("breaks", [False, True])
def test_after_the_first_text_a_failure_is_an_error_event(
    gateway: LiveGateway, relayed: Make, pieces: tuple[bytes, ...], breaks: bool
) -> None:
    """Only a finish reason is success: the client gets what came, then an error, and never `[DONE]`."""
    read = threading.Event()
    replica = relayed(lambda call: call.stream(*pieces, breaks=breaks, after_first=read))
    serve(gateway, replica)

    with gateway.http.stream("POST", "/v1/completions", json={"model": "m", "stream": True}) as response:
        lines = []
        for line in response.iter_lines():
            lines += [line.removeprefix("data: ")] if line else []
            read.set()

    first, last = map(json.loads, lines)
    assert (text_of([first]), last["error"]["code"]) == ("a", "engine_failed")
    assert len(replica.calls) == 1


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("body", [{"n": 2}, {"prompt": ["a", "b"]}, {"n": 2, "prompt": [[1], [2]]}])
def test_a_stream_without_all_choices_is_no_success(
    gateway: LiveGateway, relayed: Make, body: dict[str, Any], breaks: bool
) -> None:
    """Each choice needs a finish reason, also one of which nothing has come."""
    serve(gateway, relayed(lambda call: call.stream(chunk("a", "stop"), breaks=breaks)))

    text = complete(gateway, stream=True, **body).text

    assert "engine_failed" in text
    assert "[DONE]" not in text


def test_an_answer_without_all_choices_is_no_success(gateway: LiveGateway, relayed: Make) -> None:
    """A server that ignores `n` has not answered the request."""
    serve(gateway, relayed(lambda call: call.answer(WHOLE)))

    response = complete(gateway, n=2)

    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_failed")
    assert "1 of 2 choices" in response.json()["error"]["message"]


def test_a_connection_lost_after_the_finish_costs_nothing(gateway: LiveGateway, relayed: Make) -> None:
    """The answer is complete with its finish reason; the tokens are then counted here."""
    serve(gateway, relayed(lambda call: call.stream(chunk("a"), chunk("b", "stop"), breaks=True)))

    assert streamed(gateway)[-1] == "[DONE]"


@pytest.mark.parametrize("status", [400, 404, 451])
def test_a_rejected_request_has_the_servers_message_in_our_shape(
    gateway: LiveGateway, relayed: Make, status: int
) -> None:
    """4xx passes as it is, an unusual one as 400; it is not retried."""
    replica = relayed(lambda call: call.answer({"error": {"message": "too long", "code": status}}, status))
    serve(gateway, replica)

    response = complete(gateway)

    assert response.status_code == (400 if status == 451 else status)
    assert response.json()["error"] == {
        "message": "too long",
        "type": "invalid_request_error",
        "param": None,
        "code": "rejected_by_server",
    }
    assert len(replica.calls) == 1


def test_a_rejection_in_a_stream_is_a_rejection(gateway: LiveGateway, relayed: Make) -> None:
    """A 400 that comes as an event of a 200 stream is a 400."""
    serve(gateway, relayed(lambda call: call.stream(event({"error": {"message": "bad", "code": 400}}), DONE)))

    assert complete(gateway, stream=True).status_code == 400


@pytest.mark.parametrize(
    "answer",
    [
        lambda call: call.answer({"error": {"message": "boom"}}, 500),
        lambda call: call.answer({"error": "Unauthorized"}, 401),
        lambda call: call.answer({**WHOLE, "choices": [{"index": 0, "text": "a", "finish_reason": None}]}),
        lambda call: call.answer({**WHOLE, "choices": []}),
        lambda call: call.answer({"error": {"message": "boom", "code": 500}}),
        lambda call: call.answer(b"<html>"),
        lambda call: call.stream(*STREAM),
    ],
    ids=["500", "401", "no-finish", "no-choices", "error-with-200", "not-json", "a-stream"],
)
def test_a_broken_answer_is_ours_to_report(gateway: LiveGateway, relayed: Make, answer: Callable[[Call], None]) -> None:
    """What the client did not cause is `engine_failed`."""
    serve(gateway, relayed(answer))

    response = complete(gateway)

    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_failed")


def test_events_without_text_are_bounded(gateway: LiveGateway, relayed: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica keeps only so many bytes of an answer that has not begun, even if its text arrives with them."""
    monkeypatch.setattr("workers.engines.server.forwarded_answer.LONGEST_EVENT", 1000)
    role = event({"choices": [{"delta": {"role": "assistant"}}]})
    serve(gateway, relayed(lambda call: call.stream(b"".join([role] * 20 + [*STREAM]))))

    response = complete(gateway, stream=True)

    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_failed")


# Slots, cancellation, back pressure


def test_the_server_gets_no_more_requests_than_slots(gateway: LiveGateway, relayed: Make) -> None:
    """The third request of a replica with two slots waits in the gateway."""
    go = threading.Event()

    def script(call: Call) -> None:
        go.wait(10)
        call.answer(WHOLE)

    replica = relayed(script, slots=2)
    serve(gateway, replica)
    threads = [threading.Thread(target=complete, args=(gateway,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: gateway.queue("m").waiting == 1 and len(replica.calls) == 2, 10, "two run and one waits")
    assert replica.relay.stats.live == 2
    go.set()
    for thread in threads:
        thread.join(10)

    assert len(replica.calls) == 3


def test_a_client_that_leaves_closes_the_servers_connection(gateway: LiveGateway, relayed: Make) -> None:
    """That is how servers notice a cancelled request; the slot is free again."""
    gone = threading.Event()

    def script(call: Call) -> None:
        call.send_response(200)
        call.send_header("content-type", "text/event-stream")
        call.end_headers()
        call.wfile.write(chunk("a"))
        call.wait_until_gone()
        gone.set()

    replica = relayed(script)
    serve(gateway, replica)
    with gateway.http.stream("POST", "/v1/completions", json={"model": "m", "stream": True}) as response:
        next(response.iter_raw())

    assert gone.wait(10)
    until(lambda: gateway.queue("m").links.live == 0 and replica.relay.stats.live == 0, 10, "the slot is free")


def test_a_large_answer_passes_whole(gateway: LiveGateway, relayed: Make) -> None:
    """Twenty megabytes, in parts within the window, arrive unchanged."""
    vectors = {"object": "list", "model": "m", "data": [{"embedding": "x" * (20 * 2**20)}]}
    serve(gateway, relayed(lambda call: call.answer(vectors)))

    assert gateway.http.post("/v1/embeddings", json={"model": "m", "input": "a"}).json() == vectors


def test_a_reader_that_stops_does_not_stop_others(relayed: Make) -> None:
    """A replica sends at most the window of an answer that its gateway does not read, and other answers go on."""
    from workers.engines.server.completion_relay import WINDOW_BYTES
    from workers.messages.requests import AnswerPart, FinishReason, Forwarded, GenerateRequest, TokenEvent

    sent: dict[str, list[TokenEvent]] = {"large": [], "small": []}
    replica = relayed(
        lambda call: call.answer({**WHOLE, "pad": "x" * (2 * WINDOW_BYTES if call.body["prompt"] == "large" else 1)})
    )

    def emit(events: list[TokenEvent]) -> None:
        for each in events:
            sent[each.id].append(each)

    replica.relay._emit = emit

    for id in ("large", "small"):
        forwarded = Forwarded("/v1/completions", json.dumps({"model": "m", "prompt": id}).encode())
        replica.relay.submit(GenerateRequest(id=id, prompt_ids=[], max_tokens=1, forwarded=forwarded))
    until(lambda: sent["small"] and sent["small"][-1].finish is FinishReason.STOP, 10, "the small answer is complete")
    until(lambda: _bytes(sent["large"]) > WINDOW_BYTES // 2, 10, "the window is full")

    assert _bytes(sent["large"]) <= WINDOW_BYTES
    while not sent["large"][-1].finish:
        replica.relay.taken("large", 2**16)
        until(partial(_grown, sent["large"], len(sent["large"])), 10, "the answer goes on")
    assert sent["large"][-1].part == AnswerPart(b"", 0, USAGE["prompt_tokens"])


def _grown(events: list[Any], before: int) -> bool:
    return len(events) > before or bool(events[-1].finish)


def _bytes(events: list[Any]) -> int:
    return sum(len(each.part.data) for each in events)


def test_a_whole_answer_that_takes_long_is_not_a_stuck_step(relayed: Make) -> None:
    """No byte comes before the end of an answer that is not streamed, so that only streams show a hang."""
    from workers.messages.requests import Forwarded, GenerateRequest

    go = threading.Event()
    replica = relayed(lambda call: go.wait(10) and call.answer(WHOLE))

    bodies = {"whole": {"model": "m"}, "stream": {"model": "m", "stream": True}}
    for id, body in bodies.items():
        forwarded = Forwarded("/v1/completions", json.dumps(body).encode())
        replica.relay.submit(GenerateRequest(id=id, prompt_ids=[], max_tokens=1, forwarded=forwarded))
        until(lambda: replica.relay.stats.waiting == 0, 10.0, "the server has it")
        assert (replica.relay.stats.step_started_at is None) == (id == "whole")
    go.set()


# Usage


def test_the_servers_usage_is_counted(relayed: Make) -> None:
    """The metrics have what the server reports, streamed and not."""
    gateway = LiveGateway()
    try:
        serve(gateway, relayed(once(lambda call: call.stream(*STREAM))))
        streamed(gateway)
        complete(gateway)
        until(lambda: _value(_page(gateway), "vllm:generation_tokens_total") == 6, 10, "both are counted")
        assert _value(_page(gateway), "vllm:prompt_tokens_total") == 14
    finally:
        gateway.close()


def _page(gateway: LiveGateway) -> str:
    return gateway.http.get("/metrics").text


def _value(page: str, name: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name + "{"))
