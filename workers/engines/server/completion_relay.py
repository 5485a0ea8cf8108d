"""Relays a replica's requests to its server, in the place of a batcher: tokens in, tokens out, or bodies as they are.

The server batches and samples. Of requests as tokens, detokenization, stop strings, lengths and usage stay here, as for
every other engine. The answer to a forwarded body is passed on, at most `WINDOW_BYTES` ahead of its gateway. One
connection carries one request at a time; closing it cancels the request in the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import aiohttp
import msgspec
import uvloop

from workers.batching.accepted_request import NOT_SCORED, AcceptedRequest, check_request
from workers.batching.encode_batcher import encoded_events
from workers.batching.step_loop import BatcherStats, refuse_when_closed
from workers.engines.server.adapters import LoadedAdapters, UnknownAdapter, change_adapter, largest_rank, served_name
from workers.engines.server.completion_stream import (
    BAD_GATEWAY,
    UNAVAILABLE,
    Piece,
    ServerError,
    StreamReader,
    completion_body,
    constraint_fields,
    embedding_body,
    error_message,
    read_embeddings,
)
from workers.engines.server.forwarded_answer import EventReader, ForwardedRequest, whole_answer
from workers.engines.server.server_metrics import ServerMetrics, TokenProgress
from workers.engines.server.server_process import CompletionServer
from workers.messages.encoder_protocol import EncodeInput
from workers.messages.engine_protocol import EngineLoadError, EngineSpec
from workers.messages.requests import (
    AnswerPart,
    FinishReason,
    GenerateRequest,
    InvalidField,
    TokenEvent,
    TokenLogprobs,
)
from workers.messages.status import ServerLoad
from workers.text.detokenizer import AnswerText
from workers.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

SCRAPE_S = 10.0  # between two readings of the server's metrics
SCRAPE = aiohttp.ClientTimeout(total=5.0)
TICK_S = 1.0  # between two calls of ``after_step``
ADAPTERS_S = 60.0  # to unload adapters
UNSERVED = (429, UNAVAILABLE)  # another attempt may succeed
NOT_FOUND = 404
OURS = (401, 403)  # not the client's fault: it has no credentials of the server
GONE = (ConnectionRefusedError, FileNotFoundError)  # errors of a connection to a server that listened before
WINDOW_BYTES = 2**18  # of one forwarded answer, sent and not yet read by its gateway
PART_BYTES = 2**16  # of one event, so that other answers come in between
LONGEST_ANSWER = 64 * 2**20  # bytes of one that is not streamed


@dataclass(eq=False)
class _Live:
    """A request in the server."""

    id: str
    adapter: str
    accepted: AcceptedRequest | None = None
    forwarded: ForwardedRequest | None = None
    inputs: Sequence[EncodeInput] = ()  # to be embedded
    watched: bool = False  # the server should send something: not while a whole answer is generated or the window full
    whole: bool = False  # the server generates an answer that comes in one piece
    unread: int = 0  # bytes of the window
    room: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    sent: bool = False  # it has a slot of the server
    begun: bool = False  # it has a token

    def event(self, finish: FinishReason, error: str | None = None) -> TokenEvent:
        return TokenEvent(id=self.id, finish=finish, error=error)


class CompletionRelay:
    """Has the methods of `batcher.Batcher` that a replica uses, with the same contract: each accepted request gets
    exactly one event with a finish, which is its last. Requests without a token are refused when the server fails, so
    that another replica can serve them."""

    def __init__(
        self,
        server: CompletionServer,
        tokenizer: Tokenizer | None,
        emit: Callable[[list[TokenEvent]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``emit`` is called on the relay's own thread, without any lock held. Without a ``tokenizer``, all requests
        must be forwarded ones."""
        self._server = server
        self._tokenizer = tokenizer
        self._emit = emit
        self._clock = clock
        self._loop = uvloop.new_event_loop()
        self._events: list[TokenEvent] = []  # of this turn of the loop
        self._changed = threading.Condition()  # guards all below
        self._live: dict[str, _Live] = {}
        self._draining = False
        self._closing = False
        self._failed: str | None = None
        self._progress_at: float | None = None  # the last byte from the server, or the first request since then
        self._token_progress = TokenProgress()
        self._steps = 0
        self._tokens = 0
        self._metrics: ServerMetrics | None = None
        self._load: ServerLoad | None = None
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(server.spec.slots)  # of the server: more would wait there, out of order
        self._adapters = LoadedAdapters(server.adapters, server.most_adapters, self._change_adapter)
        self._threads = (
            threading.Thread(target=self._watch_server, name="server-exit", daemon=True),
            threading.Thread(target=self._run_loop, name="server", daemon=True),
        )
        for thread in self._threads:
            thread.start()

    @property
    def spec(self) -> EngineSpec:
        """The server's limits."""
        return self._server.spec

    def submit(self, request: GenerateRequest) -> None:
        """Accept a request. Raises ValueError for one that the server cannot run, and ``BatcherClosed``."""
        if request.adapter and self._adapters.folder(request.adapter) is None:
            raise ValueError(_no_adapter(request.adapter))
        live = _Live(request.id, request.adapter)
        if self.spec.width or request.inputs:
            live.inputs = self._embeddable(request)
        elif request.forwarded is None:
            live.accepted = self._accepted(request)
        else:
            live.forwarded = ForwardedRequest(request.forwarded)
        with self._changed:
            refuse_when_closed(self._failed, self._closing, self._draining)
            if request.id in self._live:
                raise ValueError(f"request {request.id} is already running")
            self._live[request.id] = live
        self._call_soon(self._start, request.id)

    def _accepted(self, request: GenerateRequest) -> AcceptedRequest:
        if self._tokenizer is None:
            raise ValueError("this model's server gets requests in their own form only")
        check_request(request, self.spec)
        if request.prompt_logprobs is not None and not self.spec.scores_prompts:
            raise InvalidField("prompt_logprobs", NOT_SCORED)
        if request.no_repeat_ngram_size:
            raise ValueError("this model's engine does not support no_repeat_ngram_size")
        if request.guide is not None:
            constraint_fields(request.guide, self._server.version)  # raises InvalidField
        ending_ids = frozenset(request.stop_token_ids)
        if not request.ignore_eos:
            ending_ids |= self.spec.eos_token_ids
        stream = self._tokenizer.stream(request.prompt_ids, request.skip_special_tokens)
        return AcceptedRequest(request, AnswerText(stream, request.stop, request.min_tokens), None, ending_ids)

    def _embeddable(self, request: GenerateRequest) -> Sequence[EncodeInput]:
        """Returns the inputs. Raises ValueError for those that the server cannot embed."""
        if not request.inputs or not self.spec.width:
            raise ValueError(f"this model {'does not generate' if self.spec.width else 'gives no embeddings'}")
        if (longest := max(len(input.ids) for input in request.inputs)) > self.spec.max_len:
            raise ValueError(f"an input has {longest} tokens, the limit is {self.spec.max_len}")
        return request.inputs

    def taken(self, id: str, count: int) -> None:
        """Continue a forwarded answer after its gateway has read ``count`` bytes of it."""
        self._call_soon(self._taken, id, count)

    def cancel(self, id: str) -> None:
        """End a request with a CANCELLED event. Unknown ids are ignored."""
        self._call_soon(self._cancel, id)

    def drain(self, timeout_s: float = 0.0) -> bool:
        """Refuse new requests and wait up to ``timeout_s`` for the accepted ones. Returns whether all have ended."""
        with self._changed:
            self._draining = True
            return self._changed.wait_for(lambda: not (self._live or self._events), timeout_s)

    def close(self) -> None:
        """Stop the server, and end all requests with an ERROR event, after which ``run`` returns."""
        with self._changed:
            self._closing = True
        self._server.stop()
        watch, run = self._threads
        watch.join()
        self._call_soon(self._loop.stop)
        if threading.current_thread() is not run:  # else ``emit`` calls this, and the thread ends after it
            run.join()

    def set_adapters(self, folders: Mapping[str, str]) -> None:
        """Change the adapters. Requests that have begun keep theirs. Raises EngineLoadError if the server cannot load
        them while it runs."""
        if not self._server.most_adapters or largest_rank(folders) > self._server.max_rank:
            message = f"the server was started for adapters up to the rank {self._server.max_rank}"
            raise EngineLoadError("adapter-unusable", message, f"restart the replicas of {self._server.model}")
        asyncio.run_coroutine_threadsafe(self._adapters.replace(folders), self._loop).result(ADAPTERS_S)

    def warm_guides(self) -> None:
        """The server compiles schemas itself."""

    @property
    def stats(self) -> BatcherStats:
        with self._changed:
            sent = sum(live.sent for live in self._live.values())
            begun = sum(live.begun for live in self._live.values())
            return BatcherStats(
                slots=self.spec.slots,
                live=sent,
                waiting=len(self._live) - sent,
                prefilling=sent - begun,
                steps=self._steps,
                tokens=self._tokens,
                step_started_at=self._step_started_at,
                draining=self._draining,
                failed=self._failed,
                prefix_queries=0 if self._metrics is None else int(self._metrics.prefix_queries),
                prefix_hits=0 if self._metrics is None else int(self._metrics.prefix_hits),
                server=self._load,
            )

    def run(self, after_step: Callable[[], None] = lambda: None) -> None:
        """Returns after ``close``. Raises RuntimeError when the server ends, or a request shows that it has failed.

        ``after_step`` is called every second.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._failed is not None, TICK_S)
                if self._failed is not None:
                    if self._closing:
                        return
                    raise RuntimeError(self._failed)
            after_step()

    @property
    def _watched(self) -> bool:
        return any(live.watched for live in self._live.values())

    @property
    def _awaits_whole(self) -> bool:
        return any(live.whole for live in self._live.values())

    @property
    def _step_started_at(self) -> float | None:
        """Since when the server has shown no progress of a request, by its bytes or by its count of tokens."""
        stalled_s = self._token_progress.stalled_s if self._awaits_whole else 0.0
        since = [self._progress_at] if self._watched and self._progress_at is not None else []
        return min(since + [self._clock() - stalled_s] * (stalled_s > 0), default=None)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.create_task(self._scrape())
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._end_tasks())
        finally:
            self._loop.close()

    def _watch_server(self) -> None:
        code = self._server.wait()
        self._call_soon(self._fail, f"the server has ended with exit code {code}")

    def _call_soon(self, call: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # closed meanwhile: no request is left
            self._loop.call_soon_threadsafe(call, *arguments)

    # On the loop's thread

    def _start(self, id: str) -> None:
        live = self._live.get(id)
        if live is not None:
            live.task = self._loop.create_task(self._answer(live))

    def _taken(self, id: str, count: int) -> None:
        live = self._live.get(id)
        if live is not None:
            live.unread -= count
            live.room.set()

    def _cancel(self, id: str) -> None:
        live = self._live.get(id)
        if live is not None:
            self._end(live, live.event(FinishReason.CANCELLED))
            if live.task is not None:
                live.task.cancel()

    def _fail(self, reason: str) -> None:
        """End all requests. Those without a token may run on another replica."""
        with self._changed:
            if self._failed is not None:
                return
            self._failed = reason
        for live in list(self._live.values()):
            self._end(live, live.event(FinishReason.ERROR if live.begun else FinishReason.REFUSED, reason))
            if live.task is not None:
                live.task.cancel()
        with self._changed:
            self._changed.notify_all()

    async def _end_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _scrape(self) -> None:
        """Read the server's metrics again and again. A server without them reports nothing."""
        while self._failed is None:
            try:
                async with self._open_session().get(f"{self._server.address.url}/metrics", timeout=SCRAPE) as response:
                    if response.status == 200:
                        metrics = ServerMetrics.read((await _whole(response)).decode(errors="replace"))
                        with self._changed:
                            self._metrics, self._load = metrics, metrics.load(self._metrics)
                            self._token_progress.read(metrics.tokens, self._clock())
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError, ServerError) as error:
                log.debug("the server's metrics cannot be read: %s", error)
                with self._changed:
                    self._token_progress.fail(self._clock())
            await asyncio.sleep(SCRAPE_S)

    async def _answer(self, live: _Live) -> None:
        """Send the request, and emit its answer until it ends."""
        try:
            async with self._slots, self._adapters.using(live.adapter) if live.adapter else nullcontext("") as key:
                self._watch(live)
                await self._exchange(live, key)
        except UnknownAdapter:  # it was removed after the request was accepted
            self._end(live, self._failure(live, ServerError(_no_adapter(live.adapter), NOT_FOUND)))
        except ServerError as error:
            self._end(live, self._failure(live, error))
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, GONE):
                self._fail(f"the server does not listen any more: {error}")  # so that no request is retried here
            lost = ServerError(f"the connection to the server was lost: {error}", UNAVAILABLE)
            self._end(live, self._failure(live, lost))
        finally:  # after an unexpected error, too: the request must not wait for ever
            self._end(live, live.event(FinishReason.ERROR, "the server's answer cannot be read; see the replica's log"))

    async def _exchange(self, live: _Live, adapter: str) -> None:
        """``adapter``: its key in the server. Raises ServerError, and what aiohttp raises."""
        route, accepted, forwarded, server = "/v1/completions", live.accepted, live.forwarded, self._server
        model = served_name(server.model, adapter)
        if accepted is not None:
            fields = completion_body(accepted.request, model, accepted.ending_ids, server.version)
            body = msgspec.json.encode(fields)
        elif forwarded is not None:
            route, body = forwarded.route, forwarded.body_for(model)
        else:
            route, body = "/v1/embeddings", msgspec.json.encode(embedding_body(live.inputs, model))
        began_at = self._clock()
        async with self._open_session().post(
            f"{server.address.url}{route}",
            data=body,
            headers={"Content-Type": "application/json", "X-Request-Id": live.id},
        ) as response:
            if response.status != 200:
                raise ServerError(error_message(await _whole(response)), response.status)
            if accepted is not None:
                await self._relay(live, accepted, response)
            elif forwarded is not None:
                await self._forward(live, forwarded, response)
            else:
                self._embedded(live, read_embeddings(await _whole(response), len(live.inputs)), began_at)

    async def _change_adapter(self, key: str, folder: str | None) -> None:
        url, name = self._server.address.url, served_name(self._server.model, key)
        await change_adapter(self._open_session(), url, name, folder)

    async def _relay(self, live: _Live, accepted: AcceptedRequest, response: aiohttp.ClientResponse) -> None:
        """Emit the tokens of an answer."""
        assert self._tokenizer is not None
        request = accepted.request
        scored = request.prompt_ids if request.prompt_logprobs is not None else ()
        reader = StreamReader(self._tokenizer.token_bytes, scored)
        async for data in response.content.iter_any():
            for piece in reader.feed(data):
                self._advance(live, accepted, piece)
            if accepted.answer.stop:
                return  # by a stop string, which the server does not get
        if live.id in self._live:
            raise ServerError("the server ended its answer without a finish reason", UNAVAILABLE)

    def _embedded(self, live: _Live, data: bytes, began_at: float) -> None:
        """Emit the vectors. The duration of their batches is unknown: the server computes several requests together."""
        self._count(sum(len(input.ids) for input in live.inputs))
        took_s = self._clock() - began_at
        *parts, last = encoded_events(live.id, data, took_s, took_s)
        for part in parts:
            self._queue(part)
        self._end(live, last)

    async def _forward(self, live: _Live, request: ForwardedRequest, response: aiohttp.ClientResponse) -> None:
        """Emit the parts of an answer."""
        if not request.streams:
            body = await _whole(response)
            with self._changed:
                live.whole = False
            part, finish = whole_answer(request, body)
            await self._pass_on(live, part, finish)
            return
        if response.content_type != "text/event-stream":
            raise ServerError(f"the server answered a stream with {response.content_type}", BAD_GATEWAY)
        reader = EventReader(request)
        try:
            async for data in response.content.iter_any():
                self._count(0)
                if (next_part := reader.feed(data)) is not None:
                    await self._pass_on(live, next_part)
        except (aiohttp.ClientError, OSError):
            if not reader.complete:
                raise
        await self._pass_on(live, reader.end(), reader.finish)

    async def _pass_on(self, live: _Live, part: AnswerPart, finish: FinishReason | None = None) -> None:
        """Emit a part in small ones, as fast as its gateway reads, and after it the finish."""
        live.begun = True
        data = part.data
        for start in range(0, len(data), PART_BYTES):
            piece = data[start : start + PART_BYTES]
            if live.unread + len(piece) > WINDOW_BYTES:
                await self._wait_for_room(live, len(piece))
            live.unread += len(piece)
            self._queue(TokenEvent(id=live.id, part=AnswerPart(piece, part.tokens if start == 0 else 0)))
        self._count(max(0, part.tokens))
        if finish is not None:
            tokens = 0 if data else part.tokens
            event = TokenEvent(id=live.id, finish=finish, part=AnswerPart(b"", tokens, part.prompt_tokens))
            self._end(live, event)

    async def _wait_for_room(self, live: _Live, size: int) -> None:
        watched = live.watched
        with self._changed:
            live.watched = False
        while live.unread + size > WINDOW_BYTES:
            live.room.clear()
            await live.room.wait()
        if watched:
            self._watch(live)

    def _watch(self, live: _Live) -> None:
        """Expect progress of a request that the server has: bytes, or tokens of an answer that comes in one piece."""
        with self._changed:
            if not self._watched:
                self._progress_at = self._clock()
            if not self._awaits_whole:
                self._token_progress.begin(self._clock())
            live.sent, live.watched = True, live.forwarded is None or live.forwarded.streams
            live.whole = not live.watched

    def _count(self, tokens: int) -> None:
        """Record that the server makes progress."""
        with self._changed:
            self._progress_at = self._clock()
            self._steps += 1
            self._tokens += tokens

    def _failure(self, live: _Live, error: ServerError) -> TokenEvent:
        finish = FinishReason.ERROR
        if error.status in UNSERVED:
            finish = FinishReason.ERROR if live.begun else FinishReason.UNSERVED
        elif 400 <= error.status < 500 and error.status not in OURS:
            finish = FinishReason.INVALID
        status = AnswerPart(status=error.status) if live.forwarded is not None else None
        return TokenEvent(id=live.id, finish=finish, error=str(error), part=status)

    def _advance(self, live: _Live, accepted: AcceptedRequest, piece: Piece) -> None:
        """Emit the tokens of a piece, as far as the answer takes them."""
        if self._live.get(accepted.request.id) is not live:
            return  # ended; the rest is read so that the connection can be used again
        self._count(len(piece.token_ids))
        live.begun = live.begun or bool(piece.token_ids)
        if piece.prompt_logprobs:
            accepted.prompt_logprobs = _cut(piece.prompt_logprobs, accepted.request.prompt_logprobs)
            for part in accepted.take_prompt_logprobs():
                self._queue(part)
        event = accepted.advance_all(piece.token_ids) if piece.token_ids else TokenEvent(id=accepted.request.id)
        if piece.logprobs and (count := accepted.request.logprobs) is not None:
            own = piece.logprobs[: len(event.token_ids)]
            if accepted.request.prompt_logprobs is not None:
                own = _cut(own, count)
            event = msgspec.structs.replace(event, logprobs=own)
        if event.finish is None and piece.finish is not None:
            event = self._ended_by_server(accepted, event, piece.finish)
        if event.finish is not None:
            self._end(live, event)
        elif event.token_ids:
            self._queue(event)

    def _ended_by_server(self, accepted: AcceptedRequest, event: TokenEvent, finish: str) -> TokenEvent:
        """The server has ended the answer by a rule that is not known here, such as a length of its own."""
        if finish in (FinishReason.STOP.value, FinishReason.LENGTH.value):
            text = event.text + accepted.answer.finish()
            return msgspec.structs.replace(event, text=text, finish=FinishReason(finish), stop=accepted.answer.stop)
        return msgspec.structs.replace(event, finish=FinishReason.ERROR, error=f"the server ended it: {finish}")

    def _end(self, live: _Live, event: TokenEvent) -> None:
        with self._changed:
            if self._live.get(event.id) is not live:
                return
            del self._live[event.id]
        self._queue(event)

    def _queue(self, event: TokenEvent) -> None:
        """Emit the events of one turn of the loop together."""
        if not self._events:
            self._loop.call_soon(self._flush)
        self._events.append(event)

    def _flush(self) -> None:
        try:
            self._emit(self._events)
        finally:
            with self._changed:
                self._events = []  # not before: a drain ends when all are emitted
                if not self._live:
                    self._changed.notify_all()

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            path = self._server.address.path
            connector = aiohttp.UnixConnector(path, limit=0) if path else aiohttp.TCPConnector(limit=0)
            headers = {"Authorization": f"Bearer {self._server.key}"} if self._server.key else None
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False, headers=headers
            )
        return self._session


def _cut(items: list[TokenLogprobs], count: int | None) -> list[TokenLogprobs]:
    """Keeps ``count`` alternatives of each: the server returns the larger of the counts for prompt and answer."""
    return [msgspec.structs.replace(item, top=item.top[: count or 0]) for item in items]


def _no_adapter(name: str) -> str:
    return f"this replica has no adapter {name!r}"


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    """Returns the body. Raises ServerError for one that is too long."""
    body = bytearray()
    async for data in response.content.iter_any():
        body += data
        if len(body) > LONGEST_ANSWER:
            raise ServerError(f"the server's answer is over {LONGEST_ANSWER} bytes", BAD_GATEWAY)
    return bytes(body)
