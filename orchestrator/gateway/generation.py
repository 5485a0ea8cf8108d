"""Starts the requests that generate text: tokenizes their prompts and puts them into the queue of their model."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec
import msgspec.structs

from orchestrator.gateway.anthropic.requests import MessagesChat
from orchestrator.gateway.http.exchange import Exchange
from orchestrator.gateway.key_limits import KeyLimits
from orchestrator.gateway.lmi import LmiCompletion
from orchestrator.gateway.openai import body_reader, errors
from orchestrator.gateway.openai.answers import AnswerWriter, Choice, ForwardedAnswer
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.openai.protocol import (
    SYSTEM_ROLES,
    Chat,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    ForwardedFields,
)
from orchestrator.gateway.openai.reply import ClientReply, Note, Reply
from orchestrator.gateway.openai.request_builder import Prompts, prompts_of, requests_for
from orchestrator.gateway.serving.model_queue import ModelQueue
from orchestrator.gateway.serving.ticket import BYTES_OF_TOKEN as BYTES_OF_FORWARDED
from orchestrator.gateway.serving.ticket import read_scheduling_parameters
from orchestrator.gateway.serving.tokenizers import Tokenizers, TokenizerThreads
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.gateway.telemetry.gateway_metrics import GatewayMetrics
from orchestrator.gateway.telemetry.request_spans import RequestTracing
from orchestrator.messages.route_table import ModelRoutes
from workers.messages.requests import Forwarded, GenerateRequest
from workers.text.tokenizer import ByteTokenizer, PromptTokenizer
from workers.text.tokenizer_pool import TokenizerBusy, TokenizerFault

log = logging.getLogger(__name__)
GenerationBody = ChatRequest | CompletionRequest

INLINE_BYTES = 2048  # the byte tokenizer runs inline up to this body size: a thread would cost more
BYTES_OF_TOKEN = 4  # estimate by which a key is charged before tokenizing
T = TypeVar("T")
_NULL = b"null"
RELAXED_HEADER = b"x-corewright-schema-relaxed"  # the keywords of schemas that do not constrain the answer


class Generation:
    """The requests of one gateway on their way into the queues. Used from one event loop."""

    def __init__(
        self,
        settings: GatewaySettings,
        gateway: str,
        tokenizers: Tokenizers,
        limits: KeyLimits,
        metrics: GatewayMetrics,
    ) -> None:
        self._settings = settings
        self._tokenizers = tokenizers
        self._threads = TokenizerThreads()
        self._limits = limits
        self._metrics = metrics
        self._tracing = RequestTracing.from_environment(gateway)
        self.request_ids = map(f"{gateway}-%d".__mod__, itertools.count())
        self._answer_ids = map(f"-{gateway}%x".__mod__, itertools.count())
        self._renewals: set[asyncio.Task[None]] = set()

    def start(self, exchange: Exchange, body: GenerationBody, queue: ModelQueue) -> Awaitable[None] | None:
        """Starts a request, at once or by the awaitable that it returns. Raises ApiError."""
        routes = queue.routes
        if routes.kind != "generate":
            raise errors.other_kind(queue.name, routes.kind, exchange.request.path)
        count = body.prompt_count * (body.n or 1)
        if count > 1 and count > (room := routes.max_queue + queue.links.slots):  # before that many requests are made
            raise errors.too_many_choices(count, room)
        apply_to(body, routes.defaults(body.model))
        tokenizer = self._tokenizers.loaded(routes)
        if not isinstance(tokenizer, ByteTokenizer) or len(exchange.request.body) > INLINE_BYTES:
            return self._start_later(exchange, body, queue)
        self._start(exchange, body, queue, prompts_of(body, tokenizer, routes.response_template))
        return None

    def forward(self, exchange: Exchange, body: ForwardedFields, queue: ModelQueue) -> None:
        """Puts a request into the queue of a model whose server gets the client's own body. Raises ApiError."""
        path, size = exchange.request.path, len(exchange.request.body)
        most = body.max_completion_tokens or body.max_tokens
        terms = read_scheduling_parameters(exchange.request.headers, exchange.key, body.priority, time.monotonic())
        prompt = size // BYTES_OF_FORWARDED
        expected = 0 if not exchange.route.streams else (body.n or 1) * (most or int(queue.mean_answer))
        self.take(exchange, prompt + expected, prompt if most is None else None)
        answer = ForwardedAnswer(choices=(), prompt_tokens=prompt)
        note = Note(queue.names.label(body.model), bool(body.stream), prompt_tokens=prompt)
        reply = Reply(exchange, queue, note, self._metrics, self._renew, answer, False, self._settings.keep_alive_s)
        self.trace(exchange, queue)
        request = GenerateRequest(
            id=next(self.request_ids),
            prompt_ids=[],
            max_tokens=most or queue.routes.max_len,
            adapter=queue.names.adapter(body.model),
            forwarded=Forwarded(path, exchange.request.body),
        )
        try:
            reply.add(queue.submit(request, reply, exchange.trace, terms, exchange.id), Choice(0, []))
        except BaseException:
            reply.leave()
            raise

    async def on_thread(self, exchange: Exchange, queue: ModelQueue, work: Callable[[], T]) -> T:
        """Returns what ``work`` does, which tokenizes the exchange's body. A key with limits is charged beforehand by
        the length of the body, and the charge stays if ``work`` rejects the body. Raises ApiError."""
        key, size = exchange.key, len(exchange.request.body)
        charged = key if exchange.route.charged and exchange.grant is None and key is not None and key.limited else None
        try:
            if charged is not None:
                exchange.grant = self._limits.take(charged, size // BYTES_OF_TOKEN, time.monotonic(), least=0)
                exchange.grant.least = exchange.grant.reserved
            return await self._threads.run("" if key is None else key.id, size, work, queue.name)
        except TokenizerFault as fault:
            log.warning("the tokenizer of %s failed, request %s: %s", queue.name, exchange.id, fault)
            raise errors.tokenizer_failed(queue.name, fault) from None
        except TokenizerBusy as busy:
            raise errors.tokenizer_busy(queue.name, busy) from None
        except ApiError:
            if charged is not None:
                exchange.add_headers(self._limits.headers(charged, time.monotonic()))
            raise

    async def tokenize(
        self, exchange: Exchange, queue: ModelQueue, work: Callable[[PromptTokenizer], tuple[bytes, int]]
    ) -> None:
        """Answers with the JSON that ``work`` returns, and charges its tokens to the key. Raises ApiError."""
        tokenizer = await self._tokenizers.get(queue.routes)
        body, tokens = await self.on_thread(exchange, queue, lambda: work(tokenizer))
        if exchange.grant is not None:
            exchange.grant.least = tokens
            exchange.add_headers(self._limits.headers(exchange.key, time.monotonic()))
        exchange.respond(200, body)

    def read_again(self, queue: ModelQueue) -> None:
        """Starts to render and tokenize again the waiting requests that were read for earlier routes."""
        task = asyncio.get_running_loop().create_task(self._renew_all(queue))
        self._renewals.add(task)
        task.add_done_callback(self._renewals.discard)

    async def stop(self) -> None:
        """Stops the threads and exports the remaining spans."""
        self._threads.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    async def _start_later(self, exchange: Exchange, body: GenerationBody, queue: ModelQueue) -> None:
        self._start(exchange, body, queue, await self._prompts(exchange, queue, body))

    async def _prompts(self, exchange: Exchange, queue: ModelQueue, body: GenerationBody) -> Prompts:
        """Renders and tokenizes the prompts of a request. Raises ApiError."""

        def work(tokenizer: PromptTokenizer, routes: ModelRoutes) -> Callable[[], Prompts]:
            limits = queue.links.limits.within(self._settings.max_prompt_tokens)
            return functools.partial(prompts_of, body, tokenizer, routes.response_template, limits)

        return await self.tokenized(exchange, queue, work)

    async def tokenized(
        self,
        exchange: Exchange,
        queue: ModelQueue,
        work_for: Callable[[PromptTokenizer, ModelRoutes], Callable[[], T]],
    ) -> T:
        """Returns what the work for a tokenizer does on a thread, once the tokenizer is loaded. While an update holds
        requests, a failed load is retried at each change of the routes: a rollback changes the tokenizer. Raises
        ApiError."""
        until = time.monotonic() + queue.routes.hold_s
        while True:
            routes = queue.routes
            try:
                tokenizer = await self._tokenizers.get(routes)
            except ApiError:
                if not await queue.other_routes(routes, until - time.monotonic()):
                    raise
                continue
            result = await self.on_thread(exchange, queue, work_for(tokenizer, routes))
            if queue.routes.reading == routes.reading:
                return result

    def _requests(
        self, queue: ModelQueue, body: GenerationBody, prompts: Prompts, ids: Iterator[str]
    ) -> list[GenerateRequest]:
        """Returns the requests for the replicas. Raises ApiError 400."""
        limits = queue.links.limits.within(self._settings.max_prompt_tokens)
        most = default_tokens(body, queue.routes.defaults(body.model))
        requests = requests_for(body, prompts[0], limits, most, ids, prompts[2])
        if requests[0].prompt_logprobs is not None and not queue.routes.scores_prompts:
            field = "echo" if body.prompt_logprobs is None else "prompt_logprobs"
            raise errors.prompts_not_scored(body.model, queue.routes.engine, field)
        adapter = queue.names.adapter(body.model)
        return [msgspec.structs.replace(request, adapter=adapter) for request in requests] if adapter else requests

    def _start(self, exchange: Exchange, body: GenerationBody, queue: ModelQueue, tokenized_prompts: Prompts) -> None:
        """Puts the request's choices into the queue; its Reply does the rest. Raises ApiError."""
        if exchange.ended:
            return  # the client disconnected
        prompts, echoes, new_reader = tokenized_prompts
        copies = body.n or 1
        requests = self._requests(queue, body, tokenized_prompts, self.request_ids)
        guide = requests[0].guide
        if guide is not None and guide.relaxed:
            exchange.add_headers(((RELAXED_HEADER, guide.relaxed.encode()),))
        terms = read_scheduling_parameters(exchange.request.headers, exchange.key, body.priority, time.monotonic())
        self._charge(exchange, body, requests, queue)
        choices = [Choice(i, prompts[i // copies], echoes[i // copies]) for i in range(len(requests))]
        answer: AnswerWriter = exchange.route.writes(exchange, body, choices, next(self._answer_ids))
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        label = queue.names.label(body.model)
        guided_by = None if guide is None else body.guided_by
        note = Note(label, bool(body.stream), prompt_tokens=answer.prompt_tokens, guided_by=guided_by)
        wait_s, keeps_text = self._settings.keep_alive_s, self._settings.log_prompts
        reply = Reply(exchange, queue, note, self._metrics, self._renew, answer, usage, wait_s, keeps_text)
        self.trace(exchange, queue)
        trace = exchange.trace
        try:
            for request, choice in zip(requests, choices, strict=True):
                if new_reader is not None:
                    choice.new_reader, choice.reader = new_reader, new_reader()
                reply.add(queue.submit(request, reply, trace, terms, exchange.id), choice)
                trace = None  # only the first of several choices is traced
        except BaseException:
            reply.leave()
            raise

    def _charge(
        self, exchange: Exchange, body: GenerationBody, requests: Sequence[GenerateRequest], queue: ModelQueue
    ) -> None:
        """Reserves what the request may use from the limits of its key. Raises ApiError 429."""
        key = exchange.key
        if key is None or not key.limited:
            return
        expected = queue.mean_answer if body.max_tokens is None else math.inf
        tokens = sum(len(request.prompt_ids) + int(min(request.max_tokens, expected)) for request in requests)
        least = sum(len(request.prompt_ids) for request in requests) if body.max_tokens is None else None
        self.take(exchange, tokens, least)

    def trace(self, exchange: Exchange, queue: ModelQueue) -> None:
        """Starts the trace of a request, if it is sampled."""
        if self._tracing is not None:
            exchange.trace = self._tracing.start(
                exchange.request.headers, queue.name, exchange.route.operation, exchange.id
            )

    def take(self, exchange: Exchange, tokens: int, least: int | None) -> None:
        """Reserves tokens from the limits of the request's key, if its route is charged. Raises ApiError 429."""
        key, now = exchange.key, time.monotonic()
        if key is None or not key.limited or not exchange.route.charged:
            return
        if exchange.grant is not None:  # the reservation for tokenizing
            exchange.grant.least = 0
            exchange.grant.settle(0, now)
        try:
            exchange.grant = self._limits.take(key, tokens, now, least=least)
        finally:
            exchange.add_headers(self._limits.headers(key, now))

    async def _renew_all(self, queue: ModelQueue) -> None:
        """Renders and tokenizes again the waiting requests that were read for earlier routes."""
        while replies := dict.fromkeys(cast(ClientReply, ticket.sink) for ticket in queue.outdated()):
            for reply in replies:
                try:
                    await reply.read_again(queue, reply)
                except ApiError as error:
                    reply.fail(error)
                except Exception:  # one reply must not keep the others waiting
                    log.exception("cannot tokenize again for %s, request %s", queue.name, reply.exchange.id)
                    reply.fail(errors.internal_error())
        queue.pump()

    async def _renew(self, queue: ModelQueue, reply: Reply) -> None:
        """Renews the requests of one reply. Raises ApiError."""
        if queue.routes.kind != "generate":
            raise errors.other_kind(queue.name, queue.routes.kind, reply.exchange.request.path)
        if queue.routes.forwards or any(ticket.request.forwarded is not None for ticket in reply.tickets):
            raise errors.model_unavailable(queue.name, "updated", "its engine has changed")
        request = reply.exchange.request
        body, _ = await asyncio.to_thread(body_reader.read, reply.exchange.route.reads, request.body)
        apply_to(body, queue.routes.defaults(body.model))
        prompts = await self._prompts(reply.exchange, queue, body)
        if not reply.exchange.ended:
            ids = (ticket.id for ticket in reply.tickets)
            reply.renew(prompts, self._requests(queue, body, prompts, ids))


Defaults = Mapping[str, Any]
SYSTEM, MAX_TOKENS = "system", "max_tokens"
_OF_THE_PROMPT = frozenset({SYSTEM, "chat_template_kwargs", "reasoning_effort"})


def apply_to_prompt(body: Chat, defaults: Defaults) -> None:
    """Sets the fields of a chat's prompt that it does not have. A chat with a system message keeps it as it is."""
    if _adds_system(body.messages, defaults):
        body.messages = [ChatMessage("system", defaults[SYSTEM]), *body.messages]
    if body.chat_template_kwargs is None:
        body.chat_template_kwargs = defaults.get("chat_template_kwargs")
    if body.reasoning_effort is None:
        body.reasoning_effort = defaults.get("reasoning_effort")


def apply_to(body: ChatRequest | CompletionRequest, defaults: Defaults) -> None:
    """Sets the fields that the request does not have, except the most tokens of its answer."""
    if not defaults:
        return
    if isinstance(body, ChatRequest):
        apply_to_prompt(body, defaults)
    for field, value in defaults.items():
        if field not in _OF_THE_PROMPT and field != MAX_TOKENS and getattr(body, field) is None:
            setattr(body, field, value)
    if isinstance(body, LmiCompletion) and body.leaves_temperature:
        body.temperature = defaults.get("temperature", body.temperature)


def default_tokens(body: ChatRequest | CompletionRequest, defaults: Defaults) -> int | None:
    """Returns the most tokens of an answer whose request has no `max_tokens`, as far as the model has room for them;
    None for no other limit. Messages always have their own."""
    own = body.default_tokens
    return own if isinstance(body, MessagesChat) else defaults.get(MAX_TOKENS, own)


def with_defaults(body: bytes, defaults: Defaults) -> bytes:
    """Returns the body of a chat that is forwarded, with the fields that it does not have."""
    if not defaults:
        return body
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    chat = msgspec.json.decode(body, type=_Forwarded)
    if _adds_system(chat.messages, defaults):
        system = {"role": "system", "content": defaults[SYSTEM]}
        messages = msgspec.json.decode(fields["messages"], type=list[msgspec.Raw])
        fields["messages"] = msgspec.Raw(msgspec.json.encode([system, *messages]))
    for field, value in defaults.items():
        sent = ("max_tokens", "max_completion_tokens") if field == MAX_TOKENS else (field,)
        if field != SYSTEM and all(bytes(fields.get(name, _NULL)) == _NULL for name in sent):
            fields[field] = msgspec.Raw(msgspec.json.encode(value))
    return msgspec.json.encode(fields)


class _Sent(msgspec.Struct):
    role: str


def _adds_system(messages: Sequence[ChatMessage | _Sent], defaults: Defaults) -> bool:
    return SYSTEM in defaults and not any(message.role in SYSTEM_ROLES for message in messages)


class _Forwarded(msgspec.Struct):
    """The fields of a forwarded chat that are read here."""

    messages: list[_Sent]
