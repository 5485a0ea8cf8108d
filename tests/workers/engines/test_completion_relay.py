"""The relay to a server, over a server in this process that answers as each test scripts it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.fleet import until
from workers.batching.step_loop import BatcherClosed
from workers.engines.echo.engine import EOS_ID, VOCAB_SIZE, echo_tokens
from workers.engines.server.completion_relay import CompletionRelay
from workers.engines.server.completion_stream import Piece, ServerError, StreamReader, constraint_fields
from workers.engines.server.server_process import Address, CompletionServer
from workers.messages.engine_protocol import EngineLoadError, EngineSpec
from workers.messages.requests import (
    AnswerConstraint,
    AnswerMarkers,
    FinishReason,
    Forwarded,
    GenerateRequest,
    InvalidField,
    TokenEvent,
)
from workers.text.tokenizer import ByteTokenizer

DEADLINE_S = 20.0
SLOTS, MAX_LEN = 3, 64
PROMPT = [72, 105]
SPEC = EngineSpec(
    slots=SLOTS,
    max_len=MAX_LEN,
    prefill_buckets=(MAX_LEN,),
    decode_buckets=(MAX_LEN,),
    vocab_size=VOCAB_SIZE,
    eos_token_ids=frozenset({EOS_ID}),
    scores_prompts=True,
)
Answer = Callable[["FakeServer", dict[str, Any], web.StreamResponse], Awaitable[None]]


def chunk(ids: list[int], finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": "", "token_ids": ids, "finish_reason": finish, **more}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


async def echo(server: FakeServer, body: dict[str, Any], response: web.StreamResponse) -> None:
    """The echo engine's tokens, two in a chunk."""
    ids = echo_tokens(body["prompt"], body["max_tokens"])
    for at in range(0, len(ids), 2):
        last = at + 2 >= len(ids)
        await response.write(chunk(ids[at : at + 2], "length" if last else None))
    await response.write(b"data: [DONE]\n\n")


class FakeServer:
    """Its socket, the bodies that it got, and how many requests it has now."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answer: Answer = echo
        self.status = 200
        self.error: Any = {"error": {"message": "no", "code": 400}}
        self.bodies: list[dict[str, Any]] = []
        self.ids: list[str] = []
        self.adapters: dict[str, str] = {}  # paths of those that are loaded
        self.changes: list[str] = []  # of the adapters
        self.metrics = ""
        self.held_change = ""  # of the adapters: it waits for ``go``
        self.live = self.most = 0
        self.gone = threading.Event()  # a client left before the end of its answer
        self.go = asyncio.Event()  # awaited by answers that wait
        self.ended = threading.Event()  # the process is gone
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._on_loop(self._start())

    def _on_loop(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE_S)

    async def _start(self) -> None:
        app = web.Application()
        app.add_routes([web.post("/v1/completions", self._completions), web.post("/v1/{change}", self._change)])
        app.add_routes([web.get("/metrics", self._metrics)])
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self.path)).start()

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.ids.append(request.headers["X-Request-Id"])
        if self.status != 200:
            return web.json_response(self.error, status=self.status)
        self.live += 1
        self.most = max(self.most, self.live)
        try:
            response = web.StreamResponse()
            await response.prepare(request)
            await self.answer(self, body, response)
        except (asyncio.CancelledError, ConnectionResetError):
            self.gone.set()
            raise
        finally:
            self.live -= 1
        return response

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def _change(self, request: web.Request) -> web.Response:
        """Loads or unloads an adapter, as vLLM does."""
        body, change = await request.json(), request.match_info["change"].removesuffix("_lora_adapter")
        name = body["lora_name"]
        self.changes.append(f"{change} {name}")
        if self.changes[-1] == self.held_change:
            await self.go.wait()
        if (change == "load") == (name in self.adapters) or self.status != 200:
            known = f"The lora adapter '{name}' has already been loaded." if change == "load" else "not found"
            return web.json_response({"error": {"message": known if self.status == 200 else "no"}}, status=400)
        if change == "load":
            self.adapters[name] = body["lora_path"]
        else:
            del self.adapters[name]
        return web.Response(text="Success")

    def call(self, function: Callable[[], object]) -> None:
        """Calls a function on the server's event loop."""
        self._loop.call_soon_threadsafe(function)

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self.go.set)

    def stop(self) -> None:
        if not self.ended.is_set():
            self._on_loop(self._runner.cleanup())
        self.ended.set()

    def close(self) -> None:
        """Stop, and end the event loop."""
        self.ended.set()
        self._on_loop(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def wait(self) -> int:
        self.ended.wait()
        return 137


class Received:
    """Events by request."""

    def __init__(self) -> None:
        self.events: dict[str, list[TokenEvent]] = {}
        self._changed = threading.Condition()

    def __call__(self, events: list[TokenEvent]) -> None:
        with self._changed:
            for event in events:
                self.events.setdefault(event.id, []).append(event)
            self._changed.notify_all()

    def end(self, id: str) -> TokenEvent:
        """The last event of a request; waits for it."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(e.finish for e in self.events.get(id, ())), DEADLINE_S), id
            return self.events[id][-1]

    def ids(self, id: str) -> list[int]:
        self.end(id)
        return [token for event in self.events[id] for token in event.token_ids]

    def text(self, id: str) -> str:
        self.end(id)
        return "".join(event.text for event in self.events[id])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    server = FakeServer(tmp_path / "s")
    yield server
    server.close()


@pytest.fixture
def received() -> Received:
    return Received()


@pytest.fixture
def relay(server: FakeServer, received: Received) -> Iterator[CompletionRelay]:
    relay = CompletionRelay(known(server), ByteTokenizer(), received)
    yield relay
    relay.close()


def known(server: FakeServer, **fields: Any) -> CompletionServer:
    return CompletionServer(Address(str(server.path)), "tiny", SPEC, (0, 32), server.wait, server.stop, **fields)


@pytest.fixture
def adapted(server: FakeServer, received: Received) -> Iterator[CompletionRelay]:
    """With three adapters, of which two are loaded at a time."""
    folders = {name: f"/{name}" for name in "xyz"}
    relay = CompletionRelay(known(server, adapters=folders, most_adapters=2, max_rank=16), ByteTokenizer(), received)
    yield relay
    relay.close()


def adapter_folder(path: Path, rank: int = 8) -> str:
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({"r": rank}))
    return str(path)


def request(id: str = "a", **fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"id": id, "prompt_ids": PROMPT, "max_tokens": 5, "temperature": 0.0, **fields})


def test_tokens_and_text_arrive_whatever_the_chunks(
    server: FakeServer, relay: CompletionRelay, received: Received
) -> None:
    relay.submit(request())

    assert received.ids("a") == echo_tokens(PROMPT, 5)
    assert received.text("a") == bytes(echo_tokens(PROMPT, 5)).decode()
    assert received.end("a").finish is FinishReason.LENGTH
    assert server.ids == ["a"]


def test_every_sampling_parameter_is_named(server: FakeServer, relay: CompletionRelay, received: Received) -> None:
    """The server's own defaults come from the checkpoint, and it ignores what it does not know."""
    relay.submit(request(top_k=7, seed=3, stop_token_ids=[9], logit_bias={5: 1.5}))
    received.end("a")

    (body,) = server.bodies
    assert body["prompt"] == PROMPT
    assert body["stop_token_ids"] == [9, EOS_ID]
    assert (body["top_k"], body["seed"], body["logit_bias"], body["n"]) == (7, 3, {"5": 1.5}, 1)
    assert body["ignore_eos"] is True  # the server's EOS is the tokenizer's; the model's ids are stop ids
    named = {"temperature", "top_p", "min_p", "min_tokens", "max_tokens", "ignore_eos", "return_token_ids", "stream"}
    assert named | {"repetition_penalty", "presence_penalty", "frequency_penalty"} <= body.keys()


def test_a_guided_answer_may_end_with_the_servers_eos(
    server: FakeServer, relay: CompletionRelay, received: Received
) -> None:
    """A complete JSON can be followed by the tokenizer's EOS only, which is not one of the model's."""

    async def ended(server: FakeServer, body: dict[str, Any], response: web.StreamResponse) -> None:
        await response.write(chunk([65]) + chunk([9], "stop"))

    server.answer = ended
    relay.submit(request(guide=AnswerConstraint('{"type": "object"}')))

    assert received.end("a").finish is FinishReason.STOP
    assert server.bodies[0]["structured_outputs"] == {"json": {"type": "object"}}
    assert not server.bodies[0]["ignore_eos"]


REASONS = AnswerMarkers(("<call>",), open="<think>", close="</think>")
THOUGHT = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
CALL = {"type": "sequence", "elements": [{"type": "const_string", "value": "<call>"}, {"type": "any_text"}]}
BOTH = {"type": "or", "elements": [{"type": "regex", "pattern": "a+"}, CALL]}
EITHER = {"type": "or", "elements": [BOTH, {"type": "sequence", "elements": [THOUGHT, BOTH]}]}


@pytest.mark.parametrize(
    ("constraint", "version", "fields"),
    [
        (AnswerConstraint("a+", "regex"), (0, 12), {"structured_outputs": {"regex": "a+"}}),
        (AnswerConstraint('["a"]', "choice"), (0, 11), {"guided_choice": ["a"]}),
        (AnswerConstraint("a+", "regex", REASONS), (0, 12), EITHER),
        (
            AnswerConstraint('{"type": "null"}', markers=AnswerMarkers(close="</think>", opened=True)),
            (0, 12),
            {
                "type": "sequence",
                "elements": [{**THOUGHT, "begin": ""}, {"type": "json_schema", "json_schema": {"type": "null"}}],
            },
        ),
    ],
)
def test_a_constraint_is_sent_in_the_servers_form(
    constraint: AnswerConstraint, version: tuple[int, int], fields: dict[str, Any]
) -> None:
    """With reasoning or calls beside it as a structural tag, whose formats xgrammar documents."""
    sent = constraint_fields(constraint, version)
    if constraint.markers != AnswerMarkers():
        tag = json.loads(sent["structured_outputs"]["structural_tag"])
        assert tag == {"type": "structural_tag", "format": fields}
    else:
        assert sent == fields


@pytest.mark.parametrize(
    ("constraint", "version"),
    [
        (AnswerConstraint("{}", markers=REASONS), (0, 11)),
        (AnswerConstraint("{}", "structural_tag"), (0, 11)),
        (AnswerConstraint("{}", "structural_tag", REASONS), (0, 12)),
    ],
)
def test_a_constraint_that_the_server_has_no_form_for_is_refused(
    constraint: AnswerConstraint, version: tuple[int, int]
) -> None:
    with pytest.raises(InvalidField):
        constraint_fields(constraint, version)


def test_what_the_server_would_ignore_is_refused(relay: CompletionRelay) -> None:
    with pytest.raises(ValueError, match="no_repeat_ngram_size"):
        relay.submit(request(no_repeat_ngram_size=2))


def test_a_stop_string_ends_the_answer_and_the_servers_request(
    server: FakeServer, relay: CompletionRelay, received: Received
) -> None:
    """The server does not know it: the connection is closed."""

    async def endless(server: FakeServer, body: dict[str, Any], response: web.StreamResponse) -> None:
        for token in b"one END two":
            await response.write(chunk([token]))
        await server.go.wait()

    server.answer = endless
    relay.submit(request(stop=["END"], max_tokens=40))

    assert received.text("a") == "one "
    assert received.end("a").finish is FinishReason.STOP
    assert server.gone.wait(DEADLINE_S)


def test_eos_ends_the_answer_and_is_not_text(server: FakeServer, relay: CompletionRelay, received: Received) -> None:
    async def ended(server: FakeServer, body: dict[str, Any], response: web.StreamResponse) -> None:
        await response.write(chunk([65]) + chunk([EOS_ID], "stop"))

    server.answer = ended
    relay.submit(request())

    assert (received.text("a"), received.ids("a")) == ("A", [65, EOS_ID])
    assert received.end("a").finish is FinishReason.STOP


def test_logprobs_of_the_prompt_come_before_those_of_the_answer(
    server: FakeServer, relay: CompletionRelay, received: Received
) -> None:
    """The server echoes the prompt for them, in the first chunk; each side gets the alternatives that it requests."""

    async def echoed(server: FakeServer, body: dict[str, Any], response: web.StreamResponse) -> None:
        logprobs = {
            "token_logprobs": [None, -1.5, -0.25],
            "top_logprobs": [None, {"token_id:66": -1.5, "token_id:67": -0.5}, {"token_id:65": -0.25}],
        }
        await response.write(chunk([65], "length", logprobs=logprobs))

    server.answer = echoed
    relay.submit(request(prompt_ids=[65, 66], logprobs=0, prompt_logprobs=1, max_tokens=1))
    relay.submit(request("b", prompt_ids=[65, 66], prompt_logprobs=2, max_tokens=0))

    ended = [received.end("a"), received.end("b")]
    scored = {id: received.events[id][0].prompt_logprobs for id in ("a", "b")}
    assert [(item.id, item.logprob, item.top) for item in scored["a"]] == [
        (65, None, []),
        (66, -1.5, [(67, -0.5, "C", [67])]),
    ]
    assert [len(item.top) for item in scored["b"]] == [0, 2]
    assert [(each.token_ids, each.finish) for each in ended] == [([65], FinishReason.LENGTH), ([], FinishReason.LENGTH)]
    assert [(item.logprob, item.top) for item in ended[0].logprobs] == [(-0.25, [])]
    assert [(body["echo"], body["max_tokens"]) for body in server.bodies] == [(True, 1)] * 2


def test_logprobs_are_keyed_by_id(server: FakeServer, relay: CompletionRelay, received: Received) -> None:
    """The most probable first; null, which JSON has for minus infinity, is OpenAI's smallest value."""

    async def ended(server: FakeServer, body: dict[str, Any], response: web.StreamResponse) -> None:
        logprobs = {
            "tokens": ["token_id:65"],
            "token_logprobs": [None],
            "top_logprobs": [{"token_id:66": -2.5, "token_id:67": -0.5}],
        }
        await response.write(chunk([65], "length", logprobs=logprobs))

    server.answer = ended
    relay.submit(request(logprobs=2, max_tokens=1))

    (logprobs,) = received.end("a").logprobs
    assert (logprobs.id, logprobs.logprob, logprobs.text) == (65, -9999.0, "A")
    assert logprobs.top == [(67, -0.5, "C", [67]), (66, -2.5, "B", [66])]
    assert server.bodies[0]["return_tokens_as_token_ids"] is True


@pytest.mark.parametrize(
    ("sent", "finish", "error"),
    [
        (b'data: {"error": {"message": "bad schema", "code": 400}}\n\ndata: [DONE]\n\n', "invalid", "bad schema"),
        (b'data: {"error": {"message": "engine died", "code": 500}}\n\ndata: [DONE]\n\n', "error", "engine died"),
        (chunk([65]) + b"data: [DONE]\n\n", "error", "without a finish reason"),
        (b"data: [DONE]\n\n", "unserved", "without a finish reason"),
        (chunk([65], "abort"), "error", "abort"),
        (b"data: nonsense\n\n", "error", "not a completion"),
        (chunk([65], "length", logprobs={"token_logprobs": []}), "error", "not a completion"),
        (chunk([-1], "length"), "error", "cannot be read"),
        (b'data: {"error": {"message": "odd", "code": 7}}\n\n', "error", "odd"),
    ],
)
def test_only_a_finish_reason_is_success(
    server: FakeServer, relay: CompletionRelay, received: Received, sent: bytes, finish: str, error: str
) -> None:
    """A stream has status 200 and [DONE] also for a failure. Without a token another replica may answer."""

    async def scripted(server: FakeServer, body: dict[str, Any], response: web.StreamResponse) -> None:
        await response.write(sent)

    server.answer = scripted
    relay.submit(request())

    assert received.end("a").finish == finish
    assert error in (received.end("a").error or "")


@pytest.mark.parametrize(
    ("status", "body", "finish", "error"),
    [
        (400, {"error": {"message": "too long", "code": 400}}, "invalid", "too long"),
        (401, {"error": "Unauthorized"}, "error", "Unauthorized"),
        (503, {"error": {"message": "Service Unavailable"}}, "unserved", "Service Unavailable"),
        (500, "broken", "error", "broken"),
    ],
)
def test_errors_of_the_server_keep_their_message(
    server: FakeServer, relay: CompletionRelay, received: Received, status: int, body: Any, finish: str, error: str
) -> None:
    server.status, server.error = status, body
    relay.submit(request())

    assert received.end("a").finish == finish
    assert error in (received.end("a").error or "")


async def held(server: FakeServer, body: dict[str, Any], response: web.StreamResponse) -> None:
    """One token, and the rest when the test says so."""
    ids = echo_tokens(body["prompt"], body["max_tokens"])
    await response.write(chunk(ids[:1]))
    await server.go.wait()
    await response.write(chunk(ids[1:], "length"))


def test_a_cancelled_request_leaves_the_server(server: FakeServer, relay: CompletionRelay, received: Received) -> None:
    server.answer = held
    relay.submit(request())
    until(lambda: "a" in received.events, DEADLINE_S, "its first token")

    relay.cancel("a")
    relay.cancel("unknown")

    assert received.end("a").finish is FinishReason.CANCELLED
    assert server.gone.wait(DEADLINE_S)
    assert relay.stats.live == 0


def test_a_drain_waits_for_live_requests_and_refuses_new_ones(
    server: FakeServer, relay: CompletionRelay, received: Received
) -> None:
    server.answer = held
    relay.submit(request())
    until(lambda: "a" in received.events, DEADLINE_S, "its first token")

    assert not relay.drain(0.0)
    with pytest.raises(BatcherClosed, match="draining"):
        relay.submit(request("b"))
    server.release()

    assert relay.drain(DEADLINE_S)
    assert received.ids("a") == echo_tokens(PROMPT, 5)


def test_a_drain_ends_after_the_last_events_are_emitted(server: FakeServer, received: Received) -> None:
    """The controller kills a drained replica at once."""
    drained: list[bool] = []

    def emit(events: list[TokenEvent]) -> None:
        drained.append(draining.drain(0.0))
        received(events)

    draining = CompletionRelay(known(server), ByteTokenizer(), emit)
    draining.submit(request())
    received.end("a")

    assert drained
    assert not any(drained)
    draining.close()


def test_the_end_of_the_server_fails_the_replica(
    server: FakeServer, relay: CompletionRelay, received: Received
) -> None:
    """A request that has a token ends with an error; one without may run elsewhere."""

    async def first_only(server: FakeServer, body: dict[str, Any], response: web.StreamResponse) -> None:
        if body["prompt"] == PROMPT:
            await response.write(chunk([65]))
        await server.go.wait()

    server.answer = first_only
    relay.submit(request("begun"))
    relay.submit(request("waits", prompt_ids=[1]))
    until(lambda: "begun" in received.events and server.live == 2, DEADLINE_S, "both are in the server")

    server.ended.set()
    with pytest.raises(RuntimeError, match="exit code 137"):
        relay.run()

    assert received.end("begun").finish is FinishReason.ERROR
    assert received.end("waits").finish is FinishReason.REFUSED
    with pytest.raises(BatcherClosed, match="exit code 137"):
        relay.submit(request("late"))


def test_a_server_that_does_not_listen_any_more_has_failed(server: FakeServer, received: Received) -> None:
    """Before its processes are gone: its requests go to another replica at once."""
    server.path.unlink()  # before the relay has a connection
    relay = CompletionRelay(known(server), ByteTokenizer(), received)

    relay.submit(request())

    assert received.end("a").finish is FinishReason.REFUSED
    with pytest.raises(RuntimeError, match="does not listen"):
        relay.run()
    relay.close()


def test_a_hung_server_shows_as_a_step_that_lasts(
    server: FakeServer, relay: CompletionRelay, received: Received
) -> None:
    """The age of the last byte while requests wait, as the watchdog reads it; an idle server has no step."""
    assert relay.stats.step_started_at is None
    server.answer = held
    relay.submit(request())
    until(lambda: "a" in received.events, DEADLINE_S, "its first token")

    first = relay.stats.step_started_at

    assert first is not None
    assert relay.stats.step_started_at == first  # nothing has arrived since
    assert (relay.stats.live, relay.stats.prefilling, relay.stats.tokens) == (1, 0, 1)


def test_a_hung_server_shows_while_an_answer_comes_in_one_piece(
    server: FakeServer, received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its metrics go on, but count no token any more."""
    monkeypatch.setattr("workers.engines.server.completion_relay.SCRAPE_S", 0.01)
    server.metrics = 'vllm:generation_tokens_total{engine="0"} 1.0\n'
    server.answer = held
    relay = CompletionRelay(known(server), ByteTokenizer(), received)
    try:
        forwarded = Forwarded("/v1/completions", b'{"model": "m", "prompt": [1], "max_tokens": 5}')
        relay.submit(GenerateRequest(id="a", prompt_ids=[], max_tokens=1, forwarded=forwarded))
        until(lambda: server.live == 1, DEADLINE_S, "the server has it")
        until(lambda: relay.stats.step_started_at is not None, DEADLINE_S, "no token is counted")
        for count in range(2, 50):
            server.metrics = f'vllm:generation_tokens_total{{engine="0"}} {count}.0\n'
            until(lambda: relay.stats.step_started_at is None, DEADLINE_S, "a token is counted")
    finally:
        relay.close()


def test_ragged_requests_do_not_mix(server: FakeServer, relay: CompletionRelay, received: Received) -> None:
    """Each gets its own tokens, over connections that are used again, and the server never has more than the slots."""
    prompts = {f"r{i}": [40 + i, *range(40, 40 + i % 7)] for i in range(30)}
    for id, prompt in prompts.items():
        relay.submit(request(id, prompt_ids=prompt, max_tokens=1 + len(prompt) % 5))

    for id, prompt in prompts.items():
        assert received.ids(id) == echo_tokens(prompt, 1 + len(prompt) % 5)
    assert sorted(server.ids) == sorted(prompts)
    assert server.most <= SLOTS


def test_the_bytes_of_a_stream_may_be_split_anywhere() -> None:
    stream = b": ping\n\n" + chunk([1, 2]) + b"\r\n" + chunk([], None) + chunk([3], "stop") + b"data: [DONE]\n\n"
    whole = list(StreamReader(lambda id: b"").feed(stream))
    assert whole == [Piece([1, 2], [], None), Piece([], [], None), Piece([3], [], "stop")]

    for width in (1, 2, 3, 7, 50):
        reader = StreamReader(lambda id: b"")
        parts = [stream[at : at + width] for at in range(0, len(stream), width)]
        assert [piece for part in parts for piece in reader.feed(part)] == whole


def test_an_error_event_is_raised_with_its_status() -> None:
    with pytest.raises(ServerError, match="queue is full") as raised:
        list(StreamReader(lambda id: b"").feed(b'data: {"error": {"message": "queue is full", "code": 503}}\n'))
    assert raised.value.status == 503


def test_an_adapter_is_loaded_for_its_first_request(
    server: FakeServer, adapted: CompletionRelay, received: Received
) -> None:
    """The server gets the adapter's own name; the model itself needs no adapter."""
    for id, adapter in (("a", "x"), ("b", "x"), ("c", "")):
        adapted.submit(request(id, adapter=adapter))
        received.end(id)

    assert [body["model"] for body in server.bodies] == ["tiny:x", "tiny:x", "tiny"]
    assert (server.changes, server.adapters) == (["load tiny:x"], {"tiny:x": "/x"})


def test_the_least_recently_used_adapter_is_unloaded(
    server: FakeServer, adapted: CompletionRelay, received: Received
) -> None:
    for id, adapter in enumerate("xyxzx"):
        adapted.submit(request(str(id), adapter=adapter))
        received.end(str(id))

    assert server.changes == ["load tiny:x", "load tiny:y", "unload tiny:y", "load tiny:z"]


def test_an_adapter_with_requests_stays_loaded(
    server: FakeServer, adapted: CompletionRelay, received: Received
) -> None:
    """A request of a third one waits for the end of one of them."""

    async def waiting(server: FakeServer, body: dict[str, Any], response: web.StreamResponse) -> None:
        await server.go.wait()
        await echo(server, body, response)

    server.answer = waiting
    for adapter in "xy":
        adapted.submit(request(adapter, adapter=adapter))
    until(lambda: server.live == 2, DEADLINE_S, "both run")
    adapted.submit(request("z", adapter="z"))
    server.release()

    assert received.ids("z") == echo_tokens(PROMPT, 5)
    assert received.ids("x") == received.ids("y") == echo_tokens(PROMPT, 5)
    assert [change.split()[0] for change in server.changes] == ["load", "load", "unload", "load"]
    assert "tiny:z" in server.adapters


def test_a_load_does_not_delay_requests_for_other_adapters(
    server: FakeServer, adapted: CompletionRelay, received: Received
) -> None:
    """Not even if its client leaves; the next request uses what was loaded."""
    adapted.submit(request("first", adapter="x"))
    received.end("first")
    server.held_change = "load tiny:y"
    for id in ("loads", "leaves"):
        adapted.submit(request(id, adapter="y"))
    until(lambda: server.held_change in server.changes, DEADLINE_S, "it is being loaded")

    adapted.submit(request("later", adapter="x"))
    assert received.ids("later") == echo_tokens(PROMPT, 5)
    adapted.cancel("leaves")
    assert received.end("leaves").finish is FinishReason.CANCELLED
    server.release()

    assert received.ids("loads") == echo_tokens(PROMPT, 5)
    assert server.changes == ["load tiny:x", "load tiny:y"]


def test_an_adapter_that_is_loaded_already_is_used(
    server: FakeServer, adapted: CompletionRelay, received: Received
) -> None:
    """A request can be cancelled while the server loads its adapter."""
    server.adapters["tiny:x"] = "/x"
    adapted.submit(request(adapter="x"))

    assert received.ids("a") == echo_tokens(PROMPT, 5)


def test_a_changed_adapter_is_loaded_for_new_requests_only(
    server: FakeServer, adapted: CompletionRelay, received: Received, tmp_path: Path
) -> None:
    """One that runs keeps the previous content, which is unloaded after it; a removed adapter is unloaded and
    refused."""
    folders = {name: adapter_folder(tmp_path / name) for name in ("new", "z")}

    async def waiting(server: FakeServer, body: dict[str, Any], response: web.StreamResponse) -> None:
        if body["model"] == "tiny:x":
            await server.go.wait()
        await echo(server, body, response)

    server.answer = waiting
    adapted.submit(request("y", adapter="y"))
    received.end("y")
    adapted.submit(request("old", adapter="x"))
    until(lambda: len(server.bodies) == 2, DEADLINE_S, "it runs")

    adapted.set_adapters({"x": folders["new"], "z": folders["z"]})

    assert server.adapters == {"tiny:x": "/x"}
    with pytest.raises(ValueError, match="no adapter 'y'"):
        adapted.submit(request(adapter="y"))
    adapted.submit(request("new", adapter="x"))
    assert received.ids("new") == echo_tokens(PROMPT, 5)
    server.release()
    assert received.ids("old") == echo_tokens(PROMPT, 5)
    until(lambda: server.adapters == {"tiny:x@1": folders["new"]}, DEADLINE_S, "the old content is unloaded")
    assert [body["model"] for body in server.bodies] == ["tiny:y", "tiny:x", "tiny:x@1"]


@pytest.mark.parametrize(("rank", "most"), [(32, 2), (8, 0)])
def test_a_server_that_cannot_load_new_adapters_keeps_its_own(
    server: FakeServer, rank: int, most: int, received: Received, tmp_path: Path
) -> None:
    """Their rank is above that of its start, or it loads adapters only at its start."""
    relay = CompletionRelay(
        known(server, adapters={"x": "/x"}, most_adapters=most, max_rank=16), ByteTokenizer(), received
    )
    try:
        with pytest.raises(EngineLoadError) as caught:
            relay.set_adapters({"y": adapter_folder(tmp_path / "y", rank)})
        assert caught.value.id == "adapter-unusable"
        server.adapters["tiny:x"] = "/x"
        relay.submit(request(adapter="x"))
        assert received.ids("a") == echo_tokens(PROMPT, 5)
    finally:
        relay.close()


def test_a_waiting_adapter_is_not_overtaken(server: FakeServer, adapted: CompletionRelay, received: Received) -> None:
    """Or the requests of loaded ones could keep it waiting forever."""
    first_ends = asyncio.Event()

    async def waiting(server: FakeServer, body: dict[str, Any], response: web.StreamResponse) -> None:
        await {"tiny:x": first_ends, "tiny:y": server.go}.get(body["model"], first_ends).wait()
        await echo(server, body, response)

    server.answer = waiting
    for adapter in "xy":
        adapted.submit(request(adapter, adapter=adapter))
    until(lambda: server.live == 2, DEADLINE_S, "both run")
    adapted.submit(request("z", adapter="z"))
    adapted.submit(request("later", adapter="x"))
    server.call(first_ends.set)  # while the request for y runs on
    received.end("later")
    server.release()

    assert [body["model"] for body in server.bodies[2:]] == ["tiny:z", "tiny:x"]


def test_an_adapter_that_cannot_be_loaded_fails_its_request(
    server: FakeServer, adapted: CompletionRelay, received: Received
) -> None:
    server.status = 500
    adapted.submit(request(adapter="x"))

    event = received.end("a")
    assert (event.finish, event.error) == (FinishReason.ERROR, "the server cannot load the adapter: no")
    assert not server.bodies


def test_an_unknown_adapter_is_refused(relay: CompletionRelay) -> None:
    with pytest.raises(ValueError, match="no adapter 'x'"):
        relay.submit(request(adapter="x"))
