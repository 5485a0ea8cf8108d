"""The HTTP side of a fleet: OpenAI's routes and the probes, as one ASGI application."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from orchestrator.gateway import errors, protocol
from orchestrator.gateway.errors import ApiError
from orchestrator.gateway.queue import ModelQueue
from orchestrator.gateway.ticket import Ticket
from orchestrator.gateway.tokenizers import TokenizerShelf
from orchestrator.routes import RouteTable
from workers.requests import FinishReason, GenerateRequest, TokenEvent
from workers.tokenizer import ChatTemplateError, NoChatTemplate

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 * 2**20
CONTROLLER_SILENT_S = 10.0  # the controller answers a long poll every few seconds
T = TypeVar("T")


class Controller(Protocol):
    """What the gateway asks of the controller."""

    async def routes(self, seen: int, timeout_s: float) -> tuple[int, RouteTable]: ...
    def wake(self, model: str) -> Coroutine[Any, Any, None]: ...


class ClientGone(Exception):
    """Nobody reads the answer any more."""


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
                Route("/v1/chat/completions", _Endpoint(self.chat), methods=["POST"]),
                Route("/v1/completions", _Endpoint(self.complete), methods=["POST"]),
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
        self._table = table
        for routes in table.models:
            queue = self.queues.get(routes.name)
            if queue is None:
                queue = ModelQueue(routes, gateway=self._id, token=table.token, wake=self._wake)
                self.queues[routes.name] = queue
                self._tokenizers.fetch(routes.engine, routes.source)
            queue.update(routes)
            if table.stopping:
                queue.close()
        for name in self.queues.keys() - {routes.name for routes in table.models}:
            self.queues.pop(name).close()

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
        request = protocol.read_chat(body)
        queue = self._queue(request.model)
        tokenizer = await self._tokenizers.get(queue.routes.engine, queue.routes.source)
        messages = [{"role": message.role, "content": message.text()} for message in request.messages]
        try:
            ids = await asyncio.to_thread(tokenizer.apply_chat_template, messages)
        except NoChatTemplate as error:
            raise errors.invalid(f"{queue.name}: {error}", param="messages", code="no_chat_template") from None
        except (ChatTemplateError, ValueError) as error:
            raise errors.invalid(f"messages: {error}", param="messages", code="chat_template_failed") from None
        await self._answer(request, queue, ids, None, receive, send, chat=True)

    async def complete(self, body: bytes, receive: Receive, send: Send) -> None:
        request = protocol.read_completion(body)
        queue = self._queue(request.model)
        tokenizer = await self._tokenizers.get(queue.routes.engine, queue.routes.source)
        prompt = protocol.one_prompt(request.prompt)
        if isinstance(prompt, str):
            try:
                ids = await asyncio.to_thread(tokenizer.encode, prompt)
            except ValueError as error:
                raise errors.invalid(f"prompt: {error}", param="prompt") from None
        else:
            ids = prompt
        await self._answer(request, queue, ids, protocol.DEFAULT_COMPLETION_TOKENS, receive, send, chat=False)

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
        asked: protocol.SamplingFields,
        queue: ModelQueue,
        ids: list[int],
        default_tokens: int | None,
        receive: Receive,
        send: Send,
        *,
        chat: bool,
    ) -> None:
        """Queue the request and write its answer. ``default_tokens`` None means the rest of the model's length."""
        id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        request = _generate_request(f"{self._id}-{next(self._numbers)}", asked, queue, ids, default_tokens)
        answer = protocol.Answer(
            id=id,
            model=queue.name,
            created=int(time.time()),
            chat=chat,
            prompt_ids=ids,
            with_ids=bool(asked.return_token_ids),
        )
        ticket = queue.submit(request)
        try:
            if asked.stream:
                usage = asked.stream_options is not None and asked.stream_options.include_usage
                await _unless_gone(receive, _stream(ticket, queue.name, answer, send, include_usage=usage))
            else:
                events = await _unless_gone(receive, ticket.take_all())
                _raise_if_failed(events, queue.name)
                await _respond(send, 200, answer.whole(events))
        except ClientGone:
            log.info("%s: its client is gone", id)
        finally:
            ticket.leave()


async def _stream(ticket: Ticket, model: str, answer: protocol.Answer, send: Send, *, include_usage: bool) -> None:
    events = await ticket.take()  # an error before the first token is an ordinary answer with its own status
    _raise_if_failed(events, model)
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    chunk = answer.opening()
    try:
        while True:
            chunk += answer.events(events)
            if events[-1].finish is not None:
                break
            if chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            chunk = b""
            events = await ticket.take()
            _raise_if_failed(events, model)
        chunk += answer.closing(include_usage=include_usage)
    except ApiError as error:
        chunk += protocol.error_event(error)
    await send({"type": "http.response.body", "body": chunk, "more_body": False})


def _raise_if_failed(events: list[TokenEvent], model: str) -> None:
    if events[-1].finish is FinishReason.ERROR:
        raise errors.engine_failed(model, events[-1].error or "no cause was given")


def _generate_request(
    id: str, asked: protocol.SamplingFields, queue: ModelQueue, ids: list[int], default_tokens: int | None
) -> GenerateRequest:
    """Check the lengths before the queue. Raises ApiError 400 with the numbers."""
    max_len = queue.routes.max_len
    param = "messages" if isinstance(asked, protocol.ChatRequest) else "prompt"
    longest = min(queue.longest_prompt or max_len, max_len)
    if not ids:
        raise errors.invalid("the prompt has no tokens", param=param)
    if len(ids) > longest or len(ids) >= max_len:
        raise errors.too_long(param, len(ids), asked.max_tokens, max_len, longest)
    rest = max_len - len(ids)
    if asked.max_tokens is not None and asked.max_tokens > rest:
        raise errors.too_long(param, len(ids), asked.max_tokens, max_len, longest)
    vocabulary = queue.vocab_size
    if vocabulary is not None and (max(ids) >= vocabulary or min(ids) < 0):
        wrong = next(id for id in ids if not 0 <= id < vocabulary)
        raise errors.invalid(f"prompt: {wrong} is no token id of this model (0 to {vocabulary - 1})", param="prompt")
    return GenerateRequest(
        id=id,
        prompt_ids=ids,
        max_tokens=asked.max_tokens or min(default_tokens or rest, rest),
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        stop=asked.stops(),
        stop_token_ids=asked.stop_token_ids or [],
        seed=asked.seed,
        ignore_eos=bool(asked.ignore_eos),
        skip_special_tokens=asked.skip_special_tokens is not False,
    )


class _Endpoint:
    """An ASGI endpoint that reads a JSON body within the limit and writes its own answer."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self._limit: int = handler.__self__._max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await _read_body(receive, self._limit)
            await self._handler(body, receive, send)
        except ApiError as error:
            await _respond(send, error.status, msgspec.json.encode(error.body()), error.headers())
        except ClientGone:
            return


async def _read_body(receive: Receive, limit: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > limit:
            raise errors.body_too_large(limit)
        if not message.get("more_body"):
            return bytes(body)


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled as soon as the client hangs up. Raises ClientGone then."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _respond(send: Send, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    fields = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    raw = [(name.lower().encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


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
