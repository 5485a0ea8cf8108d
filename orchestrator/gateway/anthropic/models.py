"""The list of models in the shape of Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from urllib.parse import parse_qs

from orchestrator.fleet.route_table import ModelRoutes
from orchestrator.gateway.anthropic.answer_types import ModelInfo, ModelPage
from orchestrator.gateway.openai.errors import invalid

MOST_MODELS = 1000  # of a page, as in Anthropic's API


def model_info(name: str, routes: ModelRoutes, created: int) -> ModelInfo:
    """Returns the model by one of its names. ``created`` in seconds since the epoch."""
    created_at = datetime.fromtimestamp(created, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return ModelInfo("model", name, name, created_at, "active", routes.max_len, routes.max_len)


def model_page(models: Mapping[str, ModelRoutes], query: str, created: int) -> ModelPage:
    """Returns the models that answer Messages, on the page that ``query`` selects. Raises ApiError 400."""
    names = [name for name, routes in models.items() if routes.kind == "generate" and not routes.forwards]
    parameters = {name: values[-1] for name, values in parse_qs(query).items()}
    limit = _limit(parameters.get("limit", str(MOST_MODELS)))
    if (before := parameters.get("before_id")) is not None:
        others = names[: _place(names, before, "before_id")]
        shown = others[-limit:]
    else:
        after = parameters.get("after_id")
        others = names if after is None else names[_place(names, after, "after_id") + 1 :]
        shown = others[:limit]
    cards = [model_info(name, models[name], created) for name in shown]
    first, last = (shown[0], shown[-1]) if shown else (None, None)
    return ModelPage(cards, first, last, len(others) > len(shown))


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= MOST_MODELS):
        raise invalid(f"limit: {text[:100]!r} is not a number from 1 to {MOST_MODELS}", param="limit")
    return int(text)


def _place(names: Sequence[str], name: str, param: str) -> int:
    if name not in names:
        raise invalid(f"{param}: there is no model {name[:100]!r}", param=param)
    return names.index(name)
