"""SageMaker's routes: `/invocations`, and those by which it loads and unloads models of a multi-model endpoint.

By AWS's pages "Use Your Own Inference Code with Hosting Services" and "Custom Containers Contract for Multi-Model
Endpoints".
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

import msgspec

from orchestrator.gateway.controller_client import ControllerAway, ControllerClient, ControllerFailed
from orchestrator.gateway.http.exchange import JSON, Exchange, decoded
from orchestrator.gateway.lmi import INVOCATIONS, LINES, content_types, joined_lines
from orchestrator.gateway.openai import errors
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.served_models import ServedModels
from orchestrator.messages.controller_replies import Hosting

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


class LoadedModel(msgspec.Struct, rename="camel"):
    """A model that SageMaker has loaded, and its folder."""

    model_name: str
    model_url: str


class LoadedModels(msgspec.Struct, rename="camel", omit_defaults=True):
    """A page; ``next_page_token`` if there are more."""

    models: list[LoadedModel]
    next_page_token: str | None = None


class SageMaker:
    """SageMaker's side of one gateway. Used from its event loop."""

    def __init__(
        self,
        controller: ControllerClient,
        served: ServedModels,
        invoked: Callable[[Exchange, str], Awaitable[None] | None],
        *,
        limited: bool,
    ) -> None:
        """``invoked`` answers a request as a route, one of ``ROUTES_BY_FIELD``, does. ``limited``: SageMaker ends
        requests after a minute."""
        self._controller = controller
        self._served = served
        self._invoked = invoked
        self._limited = limited

    # Inference

    def invoke(self, exchange: Exchange) -> Awaitable[None] | None:
        """Answers `/invocations`: the model is that of the path, else of the body, else of the header, else the only
        one."""
        model = exchange.parameters.get("model")
        request = exchange.request
        kinds = content_types(request.headers.get(b"content-type", JSON))
        if LINES in kinds:
            request.body, request.headers[b"content-type"] = joined_lines(request.body), JSON
        elif JSON not in kinds:
            raise errors.wrong_content_type(request.headers[b"content-type"].decode("latin-1"), LINES.decode())
        body = decoded(request.body, Json, "The body")
        path = next((route for field, route in ROUTES_BY_FIELD.items() if field in body), None)
        if path is None:
            raise errors.invalid(f"The body has none of the fields {', '.join(ROUTES_BY_FIELD)}.")
        if model is not None or "model" not in body:
            body["model"] = msgspec.Raw(msgspec.json.encode(model or self._target(exchange)))
        request.body = msgspec.json.encode(body)
        if self._limited:
            request.headers.setdefault(b"x-deadline-ms", ANSWER_MS)
        return self._invoked(exchange, path)

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

    async def load(self, exchange: Exchange) -> None:
        request = decoded(exchange.request.body, LoadRequest, "The body")
        hosting = await self._hosting(request)
        if hosting.status != 200:
            raise _refusal(hosting)
        await self._until(lambda: self._served.serves(request.model_name))
        exchange.respond(200, _json(LoadedModel(request.model_name, request.url)))

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

    async def unload(self, exchange: Exchange) -> None:
        name = exchange.parameters["model"]
        hosting = await self._answered(self._controller.unhost_model(name))
        if hosting.status != 200:
            raise _refusal(hosting)
        await self._until(lambda: not self._served.has(name))
        exchange.respond(200, b"{}")

    async def get(self, exchange: Exchange) -> None:
        name = exchange.parameters["model"]
        models = dict(await self._answered(self._controller.hosted()))
        if name not in models:
            raise _refusal(Hosting(404, f"the model {name} is not loaded"))
        exchange.respond(200, _json(LoadedModel(name, models[name])))

    async def list(self, exchange: Exchange) -> None:
        """The token of a page is the last name of the page before."""
        after = parse_qs(exchange.request.query).get("next_page_token", [""])[0]
        rest = sorted(row for row in await self._answered(self._controller.hosted()) if row[0] > after)
        token = rest[PAGE - 1][0] if len(rest) > PAGE else None
        exchange.respond(200, _json(LoadedModels([LoadedModel(*row) for row in rest[:PAGE]], token)))

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


def _defect(error: ControllerFailed) -> Hosting:
    log.error("the controller failed: %s", error)
    return Hosting(500, "the controller failed; the gateway's log has its exception")


def _refusal(hosting: Hosting) -> ApiError:
    """Returns the error for what the controller has answered."""
    message, broken = hosting.message, "service_unavailable"
    refused = ApiError(400, message, code="model_refused")
    known = (
        ApiError(404, message, code="model_not_found"),
        ApiError(409, message, code="model_loaded"),
        ApiError(500, message, code="model_failed", type="internal_error"),
        ApiError(503, message, code="controller_away", type=broken),
        ApiError(507, message, code="no_room", type=broken),
    )
    return next((error for error in known if error.status == hosting.status), refused)
