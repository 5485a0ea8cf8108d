"""Explains values outside the bounds of a request's field, which msgspec reports without the value."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from msgspec.inspect import DictType, FloatType, IntType, ListType, StructType, UnionType, type_info

from orchestrator.gateway.anthropic.protocol import MessagesRequest
from orchestrator.gateway.encoding.protocol import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from orchestrator.gateway.openai.protocol import (
    LONGEST_ID,
    MAX_ENTRIES,
    MAX_PROMPTS,
    MAX_STOPS,
    MAX_TOOLS,
    ChatRequest,
    CompletionRequest,
)
from orchestrator.gateway.responses.protocol import ResponsesRequest

_REQUESTS = (
    MessagesRequest,
    ResponsesRequest,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    ClassifyRequest,
)
LONGEST_VALUE = 100  # bytes or characters of a wrong value that an error quotes


def out_of_bounds(name: str, value: Any) -> str | None:
    """Returns the message for a field outside its bounds; None if ``value`` is inside, as the last of a repeated field
    may be."""
    values = value if isinstance(value, list | dict) else [value]
    match name:
        case "prompt" | "input" | "query" | "documents" | "text_1" | "text_2" if not value:
            return f"{name} is empty"
        case "documents" | "text_1" | "text_2" | "input" if len(values) > MAX_PROMPTS:
            return f"{name}: {len(values)} texts exceed the limit of {MAX_PROMPTS}"
        case "messages" if not value:
            return "messages: at least one message is required"
        case "tools" if len(values) > MAX_TOOLS:
            return f"tools: {len(values)} tools exceed the limit of {MAX_TOOLS}"
        case "stop" if len(values) > MAX_STOPS:
            return f"stop: {len(values)} strings exceed the limit of {MAX_STOPS}"
        case "stop" if "" in values:
            return "stop: an empty string is not allowed"
        case "stop_token_ids" | "logit_bias" if len(values) > MAX_ENTRIES:
            return f"{name}: {len(values)} exceeds the limit of {MAX_ENTRIES}"
    for id, part in values.items() if isinstance(values, dict) else enumerate(values):
        if isinstance(id, str) and not (id.isascii() and id.isdecimal() and len(id) <= LONGEST_ID):
            return f"logit_bias: {id[:LONGEST_VALUE]!r} is not a token id"
        message = _outside(f"logit_bias of {id}" if isinstance(id, str) else name, part, _numbers().get(name))
        if message is not None:
            return message
    return None


def out_of_range(name: str, value: float, lowest: float, highest: float, *, above: bool = False) -> str:
    """Returns the message for a number outside ``lowest`` to ``highest``; ``above``: ``lowest`` itself is outside."""
    bounds = f"{'above' if above else 'at least'} {lowest} and at most {highest}"
    return f"{name}: {str(value)[:LONGEST_VALUE]} is out of range; it must be {bounds}"


def _outside(name: str, value: Any, number: IntType | FloatType | None) -> str | None:
    """Returns the message for a value outside the bounds of a number; None if it is inside, or not a number."""
    if number is None or number.le is None or not isinstance(value, int | float):
        return None
    lowest, above = (number.ge, False) if number.ge is not None else (number.gt, True)
    if lowest is None or lowest < value <= number.le or (value == lowest and not above):
        return None
    if name == "seed":
        return f"seed: {str(value)[:LONGEST_VALUE]} does not fit in 64 bits"
    return out_of_range(name, value, lowest, number.le, above=above)


@cache
def _numbers() -> Mapping[str, IntType | FloatType]:
    """Returns the number that each field takes, with its bounds; for a list or an object, the number in it."""
    numbers = {}
    for request in map(type_info, _REQUESTS):
        assert isinstance(request, StructType)
        for field in request.fields:
            for kind in field.type.types if isinstance(field.type, UnionType) else (field.type,):
                part = kind.item_type if isinstance(kind, ListType) else kind
                part = part.value_type if isinstance(part, DictType) else part
                if isinstance(part, IntType | FloatType):
                    numbers[field.name] = part
    return numbers
