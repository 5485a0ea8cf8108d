"""Starts the requests that are encoded: tokenizes their inputs and puts them into the queue of their model."""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from orchestrator.fleet.route_table import ModelRoutes
from orchestrator.gateway.encoding.answers import AnswerHead, id_prefix, too_many_dimensions
from orchestrator.gateway.encoding.encoded_reply import EncodedReply
from orchestrator.gateway.encoding.inputs import encode_inputs
from orchestrator.gateway.encoding.protocol import KINDS_OF, EncodingBody
from orchestrator.gateway.generation import INLINE_BYTES, Generation
from orchestrator.gateway.http.exchange import Exchange
from orchestrator.gateway.openai import errors
from orchestrator.gateway.openai.reply import Note
from orchestrator.gateway.openai.request_builder import RequestLimits
from orchestrator.gateway.serving.model_queue import ModelQueue
from orchestrator.gateway.serving.scheduling_parameters import read_scheduling_parameters
from orchestrator.gateway.serving.tokenizers import Tokenizers
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.gateway.telemetry.gateway_metrics import GatewayMetrics
from workers.messages.encoder_protocol import EncodeInput
from workers.messages.requests import GenerateRequest
from workers.text.tokenizer import ByteTokenizer, PromptTokenizer


class Encoding:
    """The encoded requests of one gateway on their way into the queues. Used from one event loop."""

    def __init__(
        self,
        settings: GatewaySettings,
        gateway: str,
        tokenizers: Tokenizers,
        generation: Generation,
        metrics: GatewayMetrics,
    ) -> None:
        self._settings = settings
        self._tokenizers = tokenizers
        self._generation = generation
        self._metrics = metrics
        self._answer_ids = map(f"-{gateway}%x".__mod__, itertools.count())

    def start(self, exchange: Exchange, body: EncodingBody, queue: ModelQueue) -> Awaitable[None] | None:
        """Starts a request, at once or by the awaitable that it returns. Raises ApiError."""
        self._check(exchange, body, queue, queue.routes)
        tokenizer = self._tokenizers.loaded(queue.routes)
        if not isinstance(tokenizer, ByteTokenizer) or len(exchange.request.body) > INLINE_BYTES:
            return self._start_later(exchange, body, queue)
        self._submit(exchange, body, queue, encode_inputs(body, tokenizer, queue.routes, self._limits(queue)))
        return None

    async def _start_later(self, exchange: Exchange, body: EncodingBody, queue: ModelQueue) -> None:
        self._submit(exchange, body, queue, await self._inputs(exchange, body, queue))

    async def _inputs(self, exchange: Exchange, body: EncodingBody, queue: ModelQueue) -> list[EncodeInput]:
        """Tokenizes the inputs on a thread. Raises ApiError."""

        def work(tokenizer: PromptTokenizer, routes: ModelRoutes) -> Callable[[], list[EncodeInput]]:
            self._check(exchange, body, queue, routes)
            return partial(encode_inputs, body, tokenizer, routes, self._limits(queue))

        return await self._generation.tokenized(exchange, queue, work)

    def _limits(self, queue: ModelQueue) -> RequestLimits:
        return queue.links.limits.within(self._settings.max_prompt_tokens)

    def _check(self, exchange: Exchange, body: EncodingBody, queue: ModelQueue, routes: ModelRoutes) -> None:
        """Raises ApiError for a request that the model cannot answer."""
        if routes.kind not in KINDS_OF[type(body)]:
            raise errors.other_kind(queue.name, routes.kind, exchange.request.path)
        width = queue.links.width
        if width and (error := too_many_dimensions(body, width)) is not None:
            raise error

    def _submit(self, exchange: Exchange, body: EncodingBody, queue: ModelQueue, inputs: list[EncodeInput]) -> None:
        """Puts the request into the queue; its EncodedReply does the rest. Raises ApiError."""
        if exchange.ended:
            return  # the client disconnected
        tokens = sum(len(input.ids) for input in inputs)
        terms = read_scheduling_parameters(exchange.request.headers, exchange.key, body.priority, time.monotonic())
        self._generation.take(exchange, tokens, None)
        note = Note(queue.label(body.model), stream=False, prompt_tokens=tokens)
        head = AnswerHead(id_prefix(body) + next(self._answer_ids), int(time.time()), body.model)

        async def read_again() -> None:
            await self._renew(reply, queue)

        reply = EncodedReply(exchange, body, head, note, self._metrics, read_again)
        self._generation.trace(exchange, queue)
        request = GenerateRequest(id=next(self._generation.request_ids), prompt_ids=[], max_tokens=1, inputs=inputs)
        reply.ticket = queue.submit(request, reply, exchange.trace, terms, exchange.id)

    async def _renew(self, reply: EncodedReply, queue: ModelQueue) -> None:
        """Tokenizes a waiting request again. Raises ApiError."""
        inputs = await self._inputs(reply.exchange, reply.body, queue)
        if (ticket := reply.ticket) is not None and ticket.stream.link is None:
            ticket.renew(msgspec.structs.replace(ticket.request, inputs=inputs))
            reply.exchange.note.prompt_tokens = ticket.tokens
