"""Turns the texts of a request into the inputs of an encoder, by the layout of its folder."""

from __future__ import annotations

from orchestrator.fleet.route_table import ModelRoutes
from orchestrator.gateway.encoding.protocol import EmbeddingRequest, EncodingBody, RerankRequest, inputs_of, place_of
from orchestrator.gateway.openai import errors
from orchestrator.gateway.openai.errors import invalid
from orchestrator.gateway.openai.protocol import MOST
from orchestrator.gateway.openai.request_builder import RequestLimits
from orchestrator.gateway.serving.tokenizers import layout_of
from placements.facts.encoders import Kind
from workers.engines.encoder.layout import EncoderLayout
from workers.messages.encoder_protocol import EncodeInput
from workers.messages.engine_protocol import EngineLoadError
from workers.text.input_tokens import InputTexts
from workers.text.tokenizer import PromptTokenizer, TooManyTokens

PROMPTS_OF_DOCUMENTS = ("document", "passage", "corpus")  # in this order, as in sentence-transformers


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
    _check_ids(body, routes.kind, texts, inputs, limits.vocab_size or MOST)
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
            param, place = place_of(body, kind, number)
            raise invalid(f"{param}[{place}] has no tokens", param=param)
        if isinstance(given, list) and (max(given) >= vocabulary or min(given) < 0):
            wrong = next(id for id in given if not 0 <= id < vocabulary)
            message = f"{body.param}[{number}]: {wrong} is not a token id of this model (0 to {vocabulary - 1})"
            raise invalid(message, param=body.param)
