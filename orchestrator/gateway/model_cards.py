"""Lists the models of a gateway in OpenAI's shape, and in Anthropic's to its clients."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from urllib.parse import parse_qs

import msgspec

from orchestrator.gateway.anthropic.answers import ModelInfo, ModelPage
from orchestrator.gateway.http.exchange import Exchange, Request
from orchestrator.gateway.openai.answers import ModelCard, ModelList
from orchestrator.gateway.openai.errors import invalid
from orchestrator.gateway.served_models import ServedModels
from orchestrator.gateway.serving.model_queue import ModelQueue
from orchestrator.messages.route_table import ModelRoutes

_encode = msgspec.json.encode
MAX_PAGE_MODELS = 1000  # of a page, as in Anthropic's API


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

    def get(self, exchange: Exchange) -> None:
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


def model_info(name: str, routes: ModelRoutes, created: int) -> ModelInfo:
    """Returns the model by one of its names. ``created`` in seconds since the epoch."""
    created_at = datetime.fromtimestamp(created, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return ModelInfo("model", name, name, created_at, "active", routes.max_len, routes.max_len)


def model_page(models: Mapping[str, ModelRoutes], query: str, created: int) -> ModelPage:
    """Returns the models that answer Messages, on the page that ``query`` selects. Raises ApiError 400."""
    names = [name for name, routes in models.items() if routes.kind == "generate" and not routes.forwards]
    parameters = {name: values[-1] for name, values in parse_qs(query).items()}
    limit = _limit(parameters.get("limit", str(MAX_PAGE_MODELS)))
    if (before := parameters.get("before_id")) is not None:
        others = names[: _index(names, before, "before_id")]
        page = others[-limit:]
    else:
        after = parameters.get("after_id")
        others = names if after is None else names[_index(names, after, "after_id") + 1 :]
        page = others[:limit]
    cards = [model_info(name, models[name], created) for name in page]
    first, last = (page[0], page[-1]) if page else (None, None)
    return ModelPage(cards, first, last, len(others) > len(page))


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= MAX_PAGE_MODELS):
        raise invalid(f"limit: {text[:100]!r} is not a number from 1 to {MAX_PAGE_MODELS}", param="limit")
    return int(text)


def _index(names: Sequence[str], name: str, param: str) -> int:
    if name not in names:
        raise invalid(f"{param}: there is no model {name[:100]!r}", param=param)
    return names.index(name)
