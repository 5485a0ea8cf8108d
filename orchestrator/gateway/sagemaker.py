"""SageMaker's routes: `/invocations`, and those by which it loads and unloads models of a multi-model endpoint.

By AWS's pages "Use Your Own Inference Code with Hosting Services" and "Custom Containers Contract for Multi-Model
Endpoints".
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import parse_qs, unquote

import msgspec

from orchestrator.fleet.hosting import Hosting
from orchestrator.gateway.controller_client import ControllerAway, ControllerClient, ControllerFailed
from orchestrator.gateway.http.exchange import JSON, Exchange
from orchestrator.gateway.http.http_server import Handler
from orchestrator.gateway.http.json_nesting import checked
from orchestrator.gateway.lmi import INVOCATIONS, LINES, content_types, joined_lines
from orchestrator.gateway.openai import errors
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.served_models import ServedModels

ROUTES_BY_FIELD = {  # of the body -> the route that reads it
    "inputs": INVOCATIONS,
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/embeddings",
    "documents": "/v1/rerank",
}
TARGET = b"x-amzn-sagemaker-target-model"
ANSWER_MS = b"60000"  # SageMaker gives up after 60 s
LOAD_S = 360.0  # and a load after this
SLICE_S = 15.0  # of a wait for a load, in one call of the controller
AWAY_S = 0.5  # between two calls of a controller that does not answer
ROUTED_S = 10.0  # until the routes of a change have arrived
PAGE = 100  # models

Json = dict[str, msgspec.Raw]

log = logging.getLogger(__name__)


class LoadRequest(msgspec.Struct):
    """POST /models."""

    model_name: str
    url: str


class SageMaker:
    """SageMaker's side of one gateway. Used from its event loop."""

    def __init__(
        self,
        controller: ControllerClient,
        served: ServedModels,
        invoked: Callable[[Exchange], Awaitable[None] | None],
        *,
        limited: bool,
    ) -> None:
        """``invoked`` answers a request whose path is one of ``ROUTES_BY_FIELD``. ``limited``: SageMaker ends requests
        after a minute."""
        self._controller = controller
        self._served = served
        self._invoked = invoked
        self._limited = limited

    def route(self, path: str, method: str) -> tuple[str, Handler] | None:
        """Returns the methods and the handler of a path below /models; None for other paths."""
        parts = path.split("/")[1:]
        handlers: Mapping[str, Handler] = {}
        if parts == ["models"]:
            handlers = {"GET": self._list, "POST": self._load}
        elif parts[0] == "models" and len(parts) == 2 and parts[1]:
            handlers = {"GET": self._get, "DELETE": self._unload}
        elif parts[0] == "models" and len(parts) == 3 and parts[1] and parts[2] == "invoke":
            handlers = {"POST": self._invoke_model}
        if not handlers:
            return None
        if method in handlers:
            return method, handlers[method]
        return ", ".join(handlers), next(iter(handlers.values()))  # no method equals this one: it is refused

    # Inference

    def invoke(self, exchange: Exchange) -> Awaitable[None] | None:
        """Answers POST /invocations. The model is that of the body, else of the header, else the only one."""
        return self._invoke(exchange, None)

    def _invoke_model(self, exchange: Exchange) -> Awaitable[None] | None:
        return self._invoke(exchange, _name(exchange))

    def _invoke(self, exchange: Exchange, model: str | None) -> Awaitable[None] | None:
        request = exchange.request
        kinds = content_types(request.headers.get(b"content-type", JSON))
        if LINES in kinds:
            request.body, request.headers[b"content-type"] = joined_lines(request.body), JSON
        elif JSON not in kinds:
            raise errors.wrong_content_type(request.headers[b"content-type"].decode("latin-1"), LINES.decode())
        try:
            body = msgspec.json.decode(checked(request.body), type=Json)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise errors.invalid(f"The body: {error}") from None
        path = next((route for field, route in ROUTES_BY_FIELD.items() if field in body), None)
        if path is None:
            raise errors.invalid(f"The body has none of the fields {', '.join(ROUTES_BY_FIELD)}.")
        if model is not None or "model" not in body:
            body["model"] = msgspec.Raw(msgspec.json.encode(model or self._target(exchange)))
        request.path, request.body = path, msgspec.json.encode(body)
        if self._limited:
            request.headers.setdefault(b"x-deadline-ms", ANSWER_MS)
        return self._invoked(exchange)

    def _target(self, exchange: Exchange) -> str:
        """Returns the model of a request whose body names none. Raises ApiError."""
        header = exchange.request.headers.get(TARGET)
        if header is not None:
            return header.decode("latin-1")
        models = sorted({queue.name for queue in self._served.allowed(exchange.key).values()})
        if len(models) == 1:
            return models[0]
        listed = ", ".join(models) or "none"
        raise errors.invalid(f"The body names no model, and there are several or none: {listed}.", param="model")

    # Models

    async def _load(self, exchange: Exchange) -> None:
        try:
            request = msgspec.json.decode(checked(exchange.request.body), type=LoadRequest)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise errors.invalid(f"The body: {error}") from None
        hosting = await self._hosting(request)
        if hosting.status != 200:
            raise _refusal(hosting)
        await self._until(lambda: self._served.serves(request.model_name))
        exchange.respond(200, _json(_card(request.model_name, request.url)))

    async def _hosting(self, request: LoadRequest) -> Hosting:
        """Returns the controller's last word on a load. A controller that restarts meanwhile goes on with it."""
        deadline, again = time.monotonic() + LOAD_S, False
        while True:
            try:
                hosting = await self._controller.host_model(
                    request.model_name, request.url, again=again, wait_s=SLICE_S
                )
            except ControllerFailed as error:
                return _defect(error)
            except ControllerAway:
                hosting = Hosting(503, "the controller does not answer")
                await asyncio.sleep(AWAY_S)
            else:
                again = True
                if hosting.status != 202:
                    return hosting
            if time.monotonic() >= deadline:
                return Hosting(503, hosting.message)

    async def _unload(self, exchange: Exchange) -> None:
        name = _name(exchange)
        hosting = await self._answered(self._controller.unhost_model(name))
        if hosting.status != 200:
            raise _refusal(hosting)
        await self._until(lambda: not self._served.has(name))
        exchange.respond(200, b"{}")

    async def _get(self, exchange: Exchange) -> None:
        name = _name(exchange)
        models = dict(await self._answered(self._controller.hosted()))
        if name not in models:
            raise _refusal(Hosting(404, f"the model {name} is not loaded"))
        exchange.respond(200, _json(_card(name, models[name])))

    async def _list(self, exchange: Exchange) -> None:
        """The token of a page is the last name of the page before."""
        after = parse_qs(exchange.request.query).get("next_page_token", [""])[0]
        rest = sorted(row for row in await self._answered(self._controller.hosted()) if row[0] > after)
        answer: dict[str, Any] = {"models": [_card(*row) for row in rest[:PAGE]]}
        if len(rest) > PAGE:
            answer["nextPageToken"] = rest[PAGE - 1][0]
        exchange.respond(200, _json(answer))

    async def _answered(self, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except ControllerFailed as error:
            raise _refusal(_defect(error)) from None
        except ControllerAway:
            raise _refusal(Hosting(503, "the controller does not answer")) from None

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Returns when the routes say so, or after ``ROUTED_S``."""
        deadline = time.monotonic() + ROUTED_S
        while not condition() and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


_json = msgspec.json.encode


def _name(exchange: Exchange) -> str:
    return unquote(exchange.request.path.split("/")[2])


def _card(name: str, url: str) -> dict[str, str]:
    return {"modelName": name, "modelUrl": url}


def _defect(error: ControllerFailed) -> Hosting:
    log.error("the controller failed: %s", error)
    return Hosting(500, "the controller failed; the gateway's log has its exception")


def _refusal(hosting: Hosting) -> ApiError:
    """Returns the error for what the controller has answered."""
    what, broken = hosting.message, "service_unavailable"
    refused = ApiError(400, what, code="model_refused")
    known = (
        ApiError(404, what, code="model_not_found"),
        ApiError(409, what, code="model_loaded"),
        ApiError(500, what, code="model_failed", type="internal_error"),
        ApiError(503, what, code="controller_away", type=broken),
        ApiError(507, what, code="no_room", type=broken),
    )
    return next((error for error in known if error.status == hosting.status), refused)
