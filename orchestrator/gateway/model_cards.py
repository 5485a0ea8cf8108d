"""Lists the models of a gateway in OpenAI's shape, and in Anthropic's to its clients."""

from __future__ import annotations

import time

import msgspec

from orchestrator.gateway.anthropic.models import model_info, model_page
from orchestrator.gateway.http.exchange import Exchange, Request
from orchestrator.gateway.openai.answer_types import ModelCard, ModelList
from orchestrator.gateway.served_models import ServedModels
from orchestrator.gateway.serving.model_queue import ModelQueue

_encode = msgspec.json.encode


def is_anthropics(request: Request) -> bool:
    """Returns whether the request is of a client of Anthropic's API, which has this header in every request."""
    return b"anthropic-version" in request.headers


class ModelCards:
    """The routes below `/v1/models` of one gateway. Used from its event loop."""

    def __init__(self, served: ServedModels) -> None:
        self._served = served
        self._created = int(time.time())

    def list(self, exchange: Exchange) -> None:
        """Answers with the models that the request's key allows."""
        queues, request = self._served.allowed(exchange.key), exchange.request
        if is_anthropics(request):
            routes = {name: queue.routes for name, queue in queues.items()}
            exchange.respond(200, _encode(model_page(routes, request.query, self._created)))
            return
        exchange.respond(200, _encode(ModelList("list", [self._card(name, queue) for name, queue in queues.items()])))

    def one(self, exchange: Exchange) -> None:
        """Answers with the model that the path names. Raises ApiError."""
        request, name = exchange.request, exchange.parameters["model"]
        queue = self._served.queue(exchange.key, name)
        if is_anthropics(request):
            exchange.respond(200, _encode(model_info(name, queue.routes, self._created)))
            return
        exchange.respond(200, _encode(self._card(name, queue)))

    def _card(self, name: str, queue: ModelQueue) -> ModelCard:
        parent = None if name == queue.name else queue.name
        routes = queue.routes
        return ModelCard(name, "model", self._created, "corewright", queue.name, parent, routes.max_len, routes.kind)
