"""The types of the answers in the shapes of OpenAI, vLLM and Cohere. The gateway writes answers by hand; a test reads
them as these types."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from orchestrator.gateway.openai.protocol import DocumentText


class CalledFunction(msgspec.Struct):
    """``arguments`` is the text of a JSON object."""

    name: str
    arguments: str


class AnsweredCall(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(msgspec.Struct):
    """``content`` is null if the answer is only calls."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[AnsweredCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | UnsetType = UNSET


class TextChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatCompletion(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextCompletion(msgspec.Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class EncodedUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct):
    """``embedding`` is the numbers, or base64 of them as float32 in little endian."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EncodedUsage


class RankedDocument(msgspec.Struct):
    """``index`` is the document's place in the request."""

    index: int
    relevance_score: float
    document: DocumentText | UnsetType = UNSET


class Ranking(msgspec.Struct):
    """``results`` are sorted by score, highest first."""

    id: str
    model: str
    usage: EncodedUsage
    results: list[RankedDocument]


class Score(msgspec.Struct):
    index: int
    object: Literal["score"]
    score: float


class ScoreList(msgspec.Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: EncodedUsage


class Classification(msgspec.Struct):
    """``label`` is the most probable one, null if the checkpoint names none; ``probs`` are in the labels' order."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassificationList(msgspec.Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classification]
    usage: EncodedUsage


class ModelCard(msgspec.Struct):
    """``root`` is the model's name in the spec; ``parent`` is the same for an alias, else null."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    kind: str


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[ModelCard]


class VersionAnswer(msgspec.Struct):
    version: str


class ErrorDetails(msgspec.Struct):
    """``code`` is listed in docs/errors.md; null for a wrong value of the field ``param``."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """Every answer with a status of 400 or above, except those of the probes."""

    error: ErrorDetails
