"""The requests that are encoded, with the bounds of their values, and their inputs by the layout of a folder."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from orchestrator.gateway.openai import errors
from orchestrator.gateway.openai.body_reader import decode, decoder_of, out_of_range
from orchestrator.gateway.openai.errors import invalid
from orchestrator.gateway.openai.protocol import (
    IDS_OR_TEXTS,
    MAX_COUNT,
    MAX_PROMPTS,
    DocumentText,
    Ignored,
    PositiveCount,
    Priority,
    SomeText,
    texts_or_ids,
)
from orchestrator.gateway.openai.request_builder import RequestLimits
from orchestrator.gateway.serving.tokenizers import layout_of
from orchestrator.messages.route_table import ModelRoutes
from placements.facts.encoders import Kind
from workers.engines.encoder_layout import EncoderLayout
from workers.messages.encoder_protocol import EncodeInput, EncoderKind
from workers.messages.engine_protocol import EngineLoadError
from workers.text.input_tokens import InputTexts
from workers.text.tokenizer import PromptTokenizer, TooManyTokens

Input = str | tuple[str, str] | list[int]  # a text, a pair of texts, or token ids
Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_PROMPTS)]
PROMPTS_OF_DOCUMENTS = ("document", "passage", "corpus")  # in this order, as in sentence-transformers


class EncodingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of all requests that are encoded."""

    model: str
    truncate: bool | None = None  # longer inputs are cut to the longest that the model encodes; default false
    # vLLM's: they are cut to so many tokens; -1: as ``truncate``
    truncate_prompt_tokens: (
        Annotated[int, Meta(ge=-1, le=MAX_COUNT, extra_json_schema={"not": {"const": 0}})] | None
    ) = None
    priority: Priority | None = None
    user: Ignored = None

    def check(self) -> None:
        """Raises ApiError for fields that do not fit together."""
        if self.truncate_prompt_tokens == 0:
            raise invalid("truncate_prompt_tokens: 0 leaves nothing of an input", param="truncate_prompt_tokens")
        if self.truncate is False and self.truncate_prompt_tokens is not None:
            raise invalid("truncate_prompt_tokens and truncate: false exclude each other", param="truncate")

    @property
    def cut(self) -> int | None:
        """Returns the tokens to which longer inputs are cut, 0 for the longest; None: they are rejected."""
        if self.truncate_prompt_tokens is not None:
            return max(0, self.truncate_prompt_tokens)
        return 0 if self.truncate else None


class EmbeddingRequest(EncodingFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings. An input is text (tokenized with its special tokens), token ids (taken as they are), or a
    list of either."""

    input: SomeText | Annotated[list[Any], Meta(min_length=1, extra_json_schema=IDS_OR_TEXTS)]
    dimensions: PositiveCount | None = None  # only the first numbers of each vector, scaled to length 1
    encoding_format: Literal["float", "base64"] | None = None
    prompt: str | None = None  # before each text
    prompt_name: str | None = None  # of a prompt in the model's folder
    input_type: Literal["query", "document", "passage"] | None = None  # selects a prompt of the model's folder, if any

    def check(self) -> None:
        super().check()
        given = [name for name in ("prompt", "prompt_name", "input_type") if getattr(self, name) is not None]
        if len(given) > 1:
            raise invalid(f"{given[0]} and {given[1]} exclude each other; send one of them", param=given[1])
        ids = next((position for position, value in enumerate(self.inputs()) if isinstance(value, list)), None)
        if given and ids is not None:
            raise invalid(f"{given[0]}: input {ids} has token ids, to which no prompt can be added", param=given[0])

    def inputs(self) -> list[Input]:
        """Returns the inputs one by one. Raises ApiError for an invalid one."""
        return list(texts_or_ids(self.input, "input"))

    @property
    def param(self) -> str:
        """The field with the inputs."""
        return "input"


class RerankRequest(EncodingFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/rerank, in Cohere's and Jina's shape."""

    query: SomeText
    documents: Annotated[list[str | DocumentText], Meta(min_length=1, max_length=MAX_PROMPTS)]
    top_n: PositiveCount | None = None  # results; default: one for each document
    return_documents: bool | None = None
    max_tokens_per_doc: PositiveCount | None = None  # Cohere's: each document is cut after so many tokens

    def texts(self) -> list[str]:
        """Returns the texts of the documents."""
        return [part if isinstance(part, str) else part.text for part in self.documents]

    def inputs(self) -> list[Input]:
        """Returns the query with each document."""
        return [(self.query, text) for text in self.texts()]

    @property
    def param(self) -> str:
        """The field with the inputs."""
        return "documents"


class ScoreRequest(EncodingFields, kw_only=True, forbid_unknown_fields=True):
    """POST /score, in vLLM's shape: one text with one or with several, or lists of the same length."""

    text_1: SomeText | Texts
    text_2: SomeText | Texts

    def check(self) -> None:
        super().check()
        first, second = self._lists()
        if len(first) not in (1, len(second)):
            message = f"text_1 has {len(first)} texts and text_2 {len(second)}; text_1 must have 1, or as many"
            raise invalid(message, param="text_1")

    def inputs(self) -> list[Input]:
        """Returns the pairs, which a reranker gets."""
        first, second = self._lists()
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))

    def texts(self) -> list[str]:
        """Returns all texts, which an embedding model gets: first those of ``text_1``."""
        first, second = self._lists()
        return [*first, *second]

    @property
    def param(self) -> str:
        """The field with the inputs."""
        return "text_2"

    def _lists(self) -> tuple[list[str], list[str]]:
        first, second = ([value] if isinstance(value, str) else value for value in (self.text_1, self.text_2))
        return first, second


class ClassifyRequest(EncodingFields, kw_only=True, forbid_unknown_fields=True):
    """POST /classify, in vLLM's shape."""

    input: SomeText | Texts

    def inputs(self) -> list[Input]:
        """Returns the texts."""
        return [self.input] if isinstance(self.input, str) else list(self.input)

    @property
    def param(self) -> str:
        """The field with the inputs."""
        return "input"


EncodingBody = EmbeddingRequest | RerankRequest | ScoreRequest | ClassifyRequest
KINDS_OF: dict[type[EncodingBody], tuple[EncoderKind, ...]] = {
    EmbeddingRequest: ("embedding",),
    RerankRequest: ("rerank",),
    ScoreRequest: ("rerank", "embedding"),
    ClassifyRequest: ("classification",),
}


_decoders = {kind: decoder_of(kind) for kind in KINDS_OF}


def read_encoding(body: bytes, kind: type[EncodingBody]) -> EncodingBody:
    """Decodes and checks a body. Raises ApiError 400 that names the wrong parameter."""
    request: EncodingBody = decode(_decoders[kind], body)
    request.check()
    if (count := len(request.inputs())) > MAX_PROMPTS:
        raise invalid(out_of_range("the number of inputs", count, 1, MAX_PROMPTS), param=request.param)
    return request


def inputs_of(body: EncodingBody, kind: Kind) -> list[Input]:
    """Returns the inputs that a model of the kind gets. Raises ApiError for an invalid one."""
    return list(body.texts()) if isinstance(body, ScoreRequest) and kind == "embedding" else body.inputs()


def place_of(body: EncodingBody, kind: Kind, position: int) -> tuple[str, int]:
    """Returns the field of an input of ``inputs_of``, and its place there."""
    if not isinstance(body, ScoreRequest) or kind != "embedding":
        return body.param, position
    first = len(body.texts()) - len(body.inputs())
    return ("text_1", position) if position < first else ("text_2", position - first)


def encode_inputs(
    body: EncodingBody, tokenizer: PromptTokenizer, routes: ModelRoutes, limits: RequestLimits
) -> list[EncodeInput]:
    """Returns the tokenized inputs of a request. Blocks. Raises ApiError."""
    try:
        layout = layout_of(routes)
    except EngineLoadError as error:
        raise errors.tokenizer_unavailable(error) from error
    texts = input_texts(body, routes.kind, layout, limits.longest_prompt)
    try:
        inputs = tokenizer.encode_inputs(texts)
    except TooManyTokens as error:
        where = place_of(body, routes.kind, error.place)
        raise errors.input_too_long(*where, error.count, error.limit, exact=error.exact) from None
    except (ValueError, OverflowError) as error:
        raise invalid(f"{body.param}: {error}", param=body.param) from None
    _check_ids(body, routes.kind, texts, inputs, limits.vocab_size or MAX_COUNT)
    return inputs


def input_texts(body: EncodingBody, kind: Kind, layout: EncoderLayout | None, longest: int) -> InputTexts:
    """Returns the texts with what the layout says of them; ``longest`` is the model's limit of tokens. Raises ApiError
    400 for a prompt that the folder does not have, and a cut above the limit."""
    max_length = longest if layout is None else layout.max_length
    limit = min(longest, max_length or longest)
    if body.cut is not None and body.cut > limit:
        message = f"truncate_prompt_tokens: {body.cut} is above the limit of this model, {limit} tokens"
        raise invalid(message, param="truncate_prompt_tokens")
    prompt = prompt_of(body, layout) if kind == "embedding" else ""
    pools_prompt = layout is None or layout.pools_prompt
    per_document = body.max_tokens_per_doc if isinstance(body, RerankRequest) else None
    return InputTexts(inputs_of(body, kind), longest, max_length, body.cut, prompt, pools_prompt, per_document)


def prompt_of(body: EncodingBody, layout: EncoderLayout | None) -> str:
    """Returns the text before each text, chosen as in sentence-transformers. Raises ApiError 400.

    1. the request's own prompt, or the prompt that it names
    2. the folder's prompt for the type of the inputs, if it has one
    3. the folder's default prompt, if it has one
    """
    prompts = (None if layout is None else layout.prompts) or {}
    default = None if layout is None else layout.default_prompt
    if not isinstance(body, EmbeddingRequest):
        return "" if default is None else prompts.get(default, "")  # 3
    if body.prompt is not None:  # 1
        return body.prompt
    if body.prompt_name is not None:
        if body.prompt_name not in prompts:
            known = ", ".join(sorted(prompts)) or "none"
            message = f"prompt_name: {body.prompt_name!r} is not a prompt of this model; it has {known}"
            raise invalid(message, param="prompt_name")
        return prompts[body.prompt_name]
    names = ("query",) if body.input_type == "query" else PROMPTS_OF_DOCUMENTS if body.input_type else ()
    for name in names:  # 2
        if name in prompts:
            return prompts[name]
    return "" if default is None else prompts.get(default, "")  # 3


def _check_ids(body: EncodingBody, kind: Kind, texts: InputTexts, inputs: list[EncodeInput], vocabulary: int) -> None:
    """Raises ApiError 400 for an input without tokens, and for the client's ids outside the vocabulary."""
    for number, (given, input) in enumerate(zip(texts.inputs, inputs, strict=True)):
        if not input.ids:
            param, position = place_of(body, kind, number)
            raise invalid(f"{param}[{position}] has no tokens", param=param)
        if isinstance(given, list) and (max(given) >= vocabulary or min(given) < 0):
            wrong = next(id for id in given if not 0 <= id < vocabulary)
            message = f"{body.param}[{number}]: {wrong} is not a token id of this model (0 to {vocabulary - 1})"
            raise invalid(message, param=body.param)
