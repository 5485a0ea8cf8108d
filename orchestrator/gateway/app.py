"""The HTTP side of a fleet: OpenAI's routes and the probes, as one ASGI application."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Coroutine
from typing import Any, Protocol

import msgspec
import msgspec.structs
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Send

from orchestrator.gateway import errors, protocol
from orchestrator.gateway.answers import Answer, Choice
from orchestrator.gateway.asgi import ClientGone, JsonEndpoint, respond, unless_gone
from orchestrator.gateway.errors import ApiError
from orchestrator.gateway.generation import requests_for
from orchestrator.gateway.queue import ModelQueue
from orchestrator.gateway.streaming import raise_if_failed, write_stream
from orchestrator.gateway.ticket import Ticket
from orchestrator.gateway.tokenizers import TokenizerShelf
from orchestrator.routes import RouteTable
from workers.requests import TokenEvent
from workers.tokenizer import ChatTemplateError, NoChatTemplate, Tokenizer

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 * 2**20
CONTROLLER_SILENT_S = 10.0  # the controller answers a long poll every few seconds


class Controller(Protocol):
    """What the gateway asks of the controller."""

    async def routes(self, seen: int, timeout_s: float) -> tuple[int, RouteTable]: ...
    def wake(self, model: str) -> Coroutine[Any, Any, None]: ...


class Gateway:
    """State of one gateway: a queue for each model, kept true by the controller's route table. One event loop."""

    def __init__(self, controller: Controller, *, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._controller = controller
        self._max_body_bytes = max_body_bytes
        self._id = uuid.uuid4().hex[:8]
        self._created = int(time.time())
        self._numbers = itertools.count()
        self.queues: dict[str, ModelQueue] = {}
        self._tokenizers = TokenizerShelf()
        self._table: RouteTable | None = None
        self._heard_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", JsonEndpoint(self.chat, self._max_body_bytes), methods=["POST"]),
                Route("/v1/completions", JsonEndpoint(self.complete, self._max_body_bytes), methods=["POST"]),
                Route("/v1/models", self.models, methods=["GET"]),
                Route("/v1/models/{model:path}", self.model, methods=["GET"]),
                Route("/livez", self.livez, methods=["GET"]),
                Route("/readyz", self.readyz, methods=["GET"]),
                Route("/health", self.readyz, methods=["GET"]),
            ],
            exception_handlers={HTTPException: _http_error, ApiError: _api_error, Exception: _our_error},
        )

    # Keeping up with the controller

    async def follow(self) -> None:
        """Take over each new route table, for as long as the gateway lives. While the controller is away the last
        table stays in force."""
        seen = 0
        while True:
            try:
                version, table = await self._controller.routes(seen, CONTROLLER_SILENT_S / 3)
            except Exception as error:  # noqa: BLE001 - whatever Ray raises while the controller starts again
                log.warning("the controller does not answer: %s", error)
                await asyncio.sleep(0.2)
                seen = 0
                continue
            self._heard_at = time.monotonic()
            if version != seen:
                seen = version
                self._update(table)

    def _update(self, table: RouteTable) -> None:
        if self._table is not None and self._table.ready and not table.ready:
            table = msgspec.structs.replace(table, ready=True)  # a controller that was started again has forgotten it
        self._table = table
        for routes in table.models:
            queue = self.queues.get(routes.name)
            if queue is None:
                queue = ModelQueue(routes, gateway=self._id, token=table.token, wake=self._wake)
                self.queues[routes.name] = queue
            if queue.routes is routes or queue.routes.tokenizer != routes.tokenizer:
                self._tokenizers.fetch(routes.engine, routes.source, routes.tokenizer)
            queue.update(routes)
            if table.stopping:
                queue.close()
        for name in self.queues.keys() - {routes.name for routes in table.models}:
            self.queues.pop(name).close()
        self._tokenizers.keep({(routes.engine == "echo", routes.source, routes.tokenizer) for routes in table.models})

    def _wake(self, model: str) -> None:
        task = asyncio.get_running_loop().create_task(self._controller.wake(model))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Routes

    async def livez(self, _: Request) -> Response:
        return Response("ok\n", media_type="text/plain")

    async def readyz(self, _: Request) -> Response:
        if self._table is None or time.monotonic() - self._heard_at > CONTROLLER_SILENT_S:
            return Response("the controller does not answer\n", 503, media_type="text/plain")
        if self._table.stopping:
            return Response("the fleet is stopping\n", 503, media_type="text/plain")
        if not self._table.ready:
            late = [f"{model.name}: {model.state.value}" for model in self._table.models if not model.replicas]
            return Response("\n".join(["not ready", *late, ""]), 503, media_type="text/plain")
        return Response("ok\n", media_type="text/plain")

    async def models(self, _: Request) -> Response:
        return _json({"object": "list", "data": [self._card(queue) for queue in self.queues.values()]})

    async def model(self, request: Request) -> Response:
        return _json(self._card(self._queue(request.path_params["model"])))

    def _card(self, queue: ModelQueue) -> dict[str, Any]:
        return {
            "id": queue.name,
            "object": "model",
            "created": self._created,
            "owned_by": "corewright",
            "max_model_len": queue.routes.max_len,
        }

    async def chat(self, body: bytes, receive: Receive, send: Send) -> None:
        asked = protocol.read_chat(body)
        queue = self._queue(asked.model)
        key = queue.routes.tokenizer
        tokenizer = await self._tokenizers.get(queue.routes.engine, queue.routes.source, key)
        messages = [{"role": message.role, "content": message.text()} for message in asked.messages]
        try:
            prompt = await asyncio.to_thread(tokenizer.apply_chat_template, messages)
        except NoChatTemplate as error:
            raise errors.invalid(f"{queue.name}: {error}", param="messages", code="no_chat_template") from None
        except (ChatTemplateError, ValueError) as error:
            raise errors.invalid(f"messages: {error}", param="messages", code="chat_template_failed") from None
        await self._answer(asked, queue, key, [prompt], [""], None, receive, send)

    async def complete(self, body: bytes, receive: Receive, send: Send) -> None:
        asked = protocol.read_completion(body)
        given = asked.prompts()
        queue = self._queue(asked.model)
        key = queue.routes.tokenizer
        tokenizer = await self._tokenizers.get(queue.routes.engine, queue.routes.source, key)
        try:
            prompts = await asyncio.to_thread(_tokenized, tokenizer, given)
        except ValueError as error:
            raise errors.invalid(f"prompt: {error}", param="prompt") from None
        echoes = [_echo(tokenizer, part) for part in given] if asked.echo else [""] * len(prompts)
        await self._answer(asked, queue, key, prompts, echoes, protocol.DEFAULT_COMPLETION_TOKENS, receive, send)

    def _queue(self, model: str) -> ModelQueue:
        if self._table is None:
            raise errors.model_unavailable(model, "loading", "the gateway has just started")
        if model not in self.queues:
            raise errors.model_not_found(model, list(self.queues))
        if self._table.stopping:
            raise errors.model_unavailable(model, "stopping", None)
        return self.queues[model]

    async def _answer(
        self,
        asked: protocol.ChatRequest | protocol.CompletionRequest,
        queue: ModelQueue,
        tokenizer: str,
        prompts: list[list[int]],
        echoes: list[str],
        default_tokens: int | None,
        receive: Receive,
        send: Send,
    ) -> None:
        """Queue the request's choices and write its answer."""
        chat = isinstance(asked, protocol.ChatRequest)
        id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        names = (f"{self._id}-{number}" for number in self._numbers)
        requests = requests_for(asked, prompts, queue.limits, default_tokens, names)
        copies = asked.n or 1
        choices = [Choice(i, prompts[i // copies], echoes[i // copies]) for i in range(len(requests))]
        answer = Answer(
            id=id,
            model=queue.name,
            created=int(time.time()),
            chat=chat,
            choices=choices,
            with_ids=bool(asked.return_token_ids),
        )
        tickets: list[Ticket] = []
        try:
            tickets.extend(queue.submit(request, tokenizer) for request in requests)  # those before a refusal are kept
            if asked.stream:
                usage = asked.stream_options is not None and asked.stream_options.include_usage
                writing = write_stream(list(zip(choices, tickets, strict=True)), queue.name, answer, send, usage)
                await unless_gone(receive, writing)
            else:
                events = await unless_gone(receive, _take_all(tickets, queue.name))
                await respond(send, 200, answer.whole(list(zip(choices, events, strict=True))))
        except ClientGone:
            log.info("%s: its client is gone", id)
        finally:
            for ticket in tickets:
                ticket.leave()


async def _take_all(tickets: list[Ticket], model: str) -> list[list[TokenEvent]]:
    found = [await ticket.take_all() for ticket in tickets]
    for events in found:
        raise_if_failed(events, model)
    return found


def _tokenized(tokenizer: Tokenizer, prompts: list[str | list[int]]) -> list[list[int]]:
    return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def _echo(tokenizer: Tokenizer, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    stream = tokenizer.stream([])
    return "".join([*(stream.push(id) for id in prompt), stream.flush()])


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _json(error.body(), error.status, error.headers())


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        found = errors.ApiError(404, f"There is no route {request.url.path}.", code="route_not_found")
    elif error.status_code == 405:
        found = errors.ApiError(405, f"{request.method} is not for {request.url.path}.", code="method_not_allowed")
    else:
        found = errors.ApiError(error.status_code, error.detail)
    return _json(found.body(), found.status, dict(error.headers or {}))


async def _our_error(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    found = errors.ApiError(500, "The gateway failed; its log says how.", type="internal_error", code="internal_error")
    return _json(found.body(), 500)
