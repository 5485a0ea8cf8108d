"""Builds the requests for replicas from a client's request; checks lengths and token ids before the queue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import msgspec

from orchestrator.gateway.anthropic.answers import TokenCount
from orchestrator.gateway.openai import errors
from orchestrator.gateway.openai.errors import invalid, too_many_tokens
from orchestrator.gateway.openai.protocol import (
    MAX_COUNT,
    Chat,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    NamedTool,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from orchestrator.gateway.openai.tool_parsers import FORMATS, Format, detect_format, make_parser
from orchestrator.gateway.reading.events import AnswerReader
from workers.messages.requests import AnswerConstraint, AnswerMarkers, GenerateRequest
from workers.text.tokenizer import (
    ChatTemplateError,
    NoChatTemplate,
    NoToolsInTemplate,
    PromptTokenizer,
    TemplateInput,
    TooManyTokens,
)

MAX_TOKENIZED_TOKENS = 2**18  # of one answer; or the model's max_len, if that is more


def chat_prompt(request: Chat, tokenizer: PromptTokenizer, most: int | None = None) -> list[int]:
    """Returns the token ids of the chat, rendered by the model's template. With `tool_choice: none` the prompt has no
    tools. Raises ApiError 400, and TooManyTokens for more than ``most`` ids.
    """
    messages = [message.for_template(position) for position, message in enumerate(request.messages)]
    forbids = isinstance(request, ChatRequest) and request.calling == "none"
    tools = None if forbids else [tool.for_template() for tool in request.tools or ()]
    try:
        chat = TemplateInput(
            messages,
            tools or None,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=bool(request.continue_final_message),
            template_kwargs=request.chat_template_kwargs,
            add_special_tokens=isinstance(request, TokenizeChatRequest) and bool(request.add_special_tokens),
        )
        return tokenizer.apply_chat_template(chat, most)
    except NoChatTemplate as error:
        raise errors.invalid(f"{request.model}: {error}", param="messages", code="no_chat_template") from None
    except NoToolsInTemplate as error:
        raise errors.invalid(f"{request.model}: {error}", param="tools", code="tools_not_supported") from None
    except (ChatTemplateError, ValueError) as error:
        raise errors.invalid(f"messages: {error}", param="messages", code="chat_template_failed") from None


def tool_parser_for(
    request: ChatRequest, setting: str, tokenizer: PromptTokenizer
) -> Callable[[], AnswerReader] | None:
    """Returns a function that makes a parser for each choice; None for an answer that is only text.

    ``setting`` is the model's `tool_parser`. Called after ``chat_prompt``, which rejects tools that the template does
    not support. Raises ApiError 400 if calls are allowed but could not be read.
    """
    calling = request.calling
    if calling == "none":
        return None
    format = format_of(setting, tokenizer)
    only_one = request.parallel_tool_calls is False
    streamed = bool(request.stream)
    if isinstance(calling, NamedTool):
        name = calling.function.name
        return lambda: make_parser(format, "named", streamed=streamed, name=name)
    if calling == "auto" and format is None:
        message = (
            f"{request.model}: the format of this model's tool calls is unknown; send tool_choice 'required' or a "
            "function's name, which work with any model, or set the model's tool_parser in the spec"
        )
        raise errors.invalid(message, param="tool_choice", code="tools_not_supported")
    return lambda: make_parser(format, calling, streamed=streamed, only_one=only_one)


def format_of(setting: str, tokenizer: PromptTokenizer) -> Format | None:
    """Returns the format of the model's calls by its `tool_parser`; `auto` detects it in the chat template."""
    if setting == "auto":
        return detect_format(tokenizer.chat_template(tools=True))
    return next((format for format in FORMATS if format == setting), None)


def markers_for(request: ChatRequest, setting: str, tokenizer: PromptTokenizer) -> AnswerMarkers:
    """Returns the texts with which a call may begin in place of a constrained answer; "{" for a call without one.

    ``setting`` is the model's `tool_parser`.
    """
    format = format_of(setting, tokenizer) if request.calling == "auto" else None
    return AnswerMarkers() if format is None else AnswerMarkers(FORMATS[format].markers)


# The token ids of each prompt, the text of it to echo, the factory of tool call parsers, and the answer's markers.
Prompts = tuple[list[list[int]], list[str], Callable[[], AnswerReader] | None, AnswerMarkers]


@dataclass(frozen=True)
class RequestLimits:
    """The limits of requests to one model, as its replicas were compiled."""

    max_len: int  # tokens of a slot: prompt + generated
    max_prompt: int  # tokens of the largest prefill bucket
    vocab_size: int | None  # None until a replica has reported it

    def within(self, max_prompt: int | None) -> RequestLimits:
        """Returns the limits with prompts of at most ``max_prompt`` tokens, as set for the gateway."""
        return self if max_prompt is None else replace(self, max_prompt=min(max_prompt, self.max_prompt))

    @cached_property
    def longest_prompt(self) -> int:
        """The longest prompt, in tokens."""
        return min(self.max_prompt, self.max_len)


def prompts_of(
    request: ChatRequest | CompletionRequest,
    tokenizer: PromptTokenizer,
    tool_parser: str,
    limits: RequestLimits | None = None,
) -> Prompts:
    """Renders and tokenizes the prompts of a request; ``tool_parser`` is the model's. Raises ApiError 400; with
    ``limits`` also for a prompt that is too long, which is then not tokenized to its end."""
    most = None if limits is None else limits.longest_prompt
    try:
        return _prompts_within(most, request, tokenizer, tool_parser)
    except TooManyTokens as error:
        assert limits is not None
        raise _too_long(request, error.count, limits, exact=error.exact) from None


def _prompts_within(
    most: int | None, request: ChatRequest | CompletionRequest, tokenizer: PromptTokenizer, tool_parser: str
) -> Prompts:
    """Tokenizes the prompts. Raises TooManyTokens for a prompt of more than ``most`` tokens."""
    if isinstance(request, ChatRequest):
        ids = chat_prompt(request, tokenizer, most)
        parser = tool_parser_for(request, tool_parser, tokenizer)
        return [ids], [""], parser, markers_for(request, tool_parser, tokenizer)
    parts = request.prompts()
    try:
        prompts = [
            tokenizer.encode(part, most=most) if isinstance(part, str) else _ids_within(most, part) for part in parts
        ]
        return prompts, [_echo(tokenizer, part) if request.echo else "" for part in parts], None, AnswerMarkers()
    except (ValueError, OverflowError) as error:
        raise errors.invalid(f"prompt: {error}", param="prompt") from None


def _ids_within(most: int | None, ids: list[int]) -> list[int]:
    if most is not None and len(ids) > most:
        raise TooManyTokens(len(ids), exact=True)
    return ids


def _echo(tokenizer: PromptTokenizer, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else tokenizer.text(prompt)


def requests_for(
    request: ChatRequest | CompletionRequest,
    prompts: Sequence[list[int]],
    limits: RequestLimits,
    default_tokens: int | None,
    ids: Iterator[str],
    markers: AnswerMarkers = AnswerMarkers(),  # noqa: B008 (it is frozen)
) -> list[GenerateRequest]:
    """Returns ``n`` requests for each prompt, in order, with the next ``ids``. ``default_tokens`` None: the rest of
    max_len. ``markers`` are those of the model's answers; a constraint leaves room for what they begin.

    Raises ApiError 400 with the numbers for a prompt that is empty, too long, or has ids outside the vocabulary.
    """
    options, seed, copies = _options(request, limits, markers), request.seed, request.n or 1
    checks_ids = isinstance(request, CompletionRequest) and not isinstance(request.prompt, str)
    requests = []
    for prompt in prompts:
        room = _room(request, prompt, limits)
        if checks_ids:
            _check_ids(prompt, limits)
        most = request.max_tokens or min(default_tokens or room, room)
        for copy in range(copies):
            if seed is not None:  # one seed per choice, so that choices differ and can be reproduced
                options["seed"] = _wrapped(seed + copy)
            requests.append(GenerateRequest(id=next(ids), prompt_ids=prompt, max_tokens=most, **options))
    return requests


def _options(request: ChatRequest | CompletionRequest, limits: RequestLimits, markers: AnswerMarkers) -> dict[str, Any]:
    """Returns the fields that differ from their defaults: setting all of them would cost more than the rest."""
    options: dict[str, Any] = {}
    if request.temperature is None:
        options["temperature_is_default"] = True
    else:
        options["temperature"] = request.temperature
    values = _same_fields(request)
    if values != _ALL_UNSET:
        options.update((name, value) for name, value in zip(_SAME, values, strict=True) if value is not None)
    if request.top_k is not None:
        options["top_k"] = max(0, request.top_k)  # vLLM's -1 means off, as 0 does
    if request.logit_bias:
        options["logit_bias"] = _biases(request, limits)
    if request.stop is not None:
        options["stop"] = request.stops()
    if (logprobs := request.logprobs_count()) is not None:
        options["logprobs"] = logprobs
    if not request.is_free and (guide := _guide(request, markers)) is not None:
        options["guide"] = guide
    if not request.stream:
        options["whole"] = True
    return options


def _guide(request: ChatRequest | CompletionRequest, markers: AnswerMarkers) -> AnswerConstraint | None:
    """Returns the answer's constraint, after the reasoning, with calls in its place where they are allowed."""
    if isinstance(request, CompletionRequest):
        return request.guide()
    guide = request.guide(bare_calls="{" in markers.calls)
    if guide is None or markers == AnswerMarkers():
        return guide
    calls = tuple(text for text in markers.calls if text != "{") if request.calling == "auto" else ()
    return msgspec.structs.replace(guide, markers=msgspec.structs.replace(markers, calls=calls))


_SAME = (  # fields of the same name in both types; None is the default
    "min_tokens",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "no_repeat_ngram_size",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
)
_same_fields = attrgetter(*_SAME)
_ALL_UNSET = (None,) * len(_SAME)


def _room(request: ChatRequest | CompletionRequest, prompt: Sequence[int], limits: RequestLimits) -> int:
    """Returns how many tokens may follow the prompt. Raises ApiError 400."""
    length = len(prompt)
    room = limits.max_len - length
    if 0 < length <= limits.longest_prompt and room >= (request.max_tokens or 1):
        return room
    if not prompt:
        raise errors.invalid("the prompt has no tokens", param=_param(request))
    raise _too_long(request, length, limits)


def _too_long(
    request: ChatRequest | CompletionRequest, count: int, limits: RequestLimits, *, exact: bool = True
) -> errors.ApiError:
    return errors.too_long(
        _param(request), count, request.max_tokens, limits.max_len, limits.longest_prompt, exact=exact
    )


def _param(request: ChatRequest | CompletionRequest) -> str:
    return "messages" if isinstance(request, ChatRequest) else "prompt"


def _check_ids(prompt: Sequence[int], limits: RequestLimits) -> None:
    """Checks a prompt of token ids from the client; the tokenizer's own need no check. Raises ApiError 400."""
    vocabulary = limits.vocab_size or MAX_COUNT  # unknown: reject only ids that no model has
    if max(prompt) >= vocabulary or min(prompt) < 0:
        wrong = next(id for id in prompt if not 0 <= id < vocabulary)
        message = f"prompt: {wrong} is not a token id of this model (0 to {vocabulary - 1})"
        raise errors.invalid(message, param="prompt")


def _biases(request: ChatRequest | CompletionRequest, limits: RequestLimits) -> dict[int, float]:
    biases = {int(id): bias for id, bias in (request.logit_bias or {}).items()}
    for id in biases:
        if id >= (limits.vocab_size or MAX_COUNT):
            message = f"logit_bias: {id} is not a token id of this model (0 to {(limits.vocab_size or MAX_COUNT) - 1})"
            raise errors.invalid(message, param="logit_bias")
    return biases


def _wrapped(seed: int) -> int:
    """Wraps a seed to 64 bits, signed."""
    return (seed + 2**63) % 2**64 - 2**63


class Tokenized(msgspec.Struct, frozen=True):
    """The answer of /tokenize. ``token_strs`` are the tokens as in the vocabulary, if requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct, frozen=True):
    """The answer of /detokenize: the text of the tokens, including special tokens."""

    prompt: str


def write_tokenized(
    request: TokenizeTextRequest | TokenizeChatRequest, tokenizer: PromptTokenizer, max_len: int
) -> tuple[bytes, int]:
    """Returns the answer and how many tokens it cost. Raises ApiError 400."""
    answer = tokenized(request, tokenizer, max_len)
    return msgspec.json.encode(answer), answer.count


def write_count(request: TokenizeChatRequest, tokenizer: PromptTokenizer, max_len: int) -> tuple[bytes, int]:
    """Does what ``write_tokenized`` does, in the shape of the Messages API."""
    count = tokenized(request, tokenizer, max_len).count
    return msgspec.json.encode(TokenCount(count)), count


def write_detokenized(request: DetokenizeRequest, tokenizer: PromptTokenizer, max_len: int) -> tuple[bytes, int]:
    """Decodes token ids; returns the answer and how many tokens it cost. Raises ApiError 400 for too many ids, and for
    ids outside the vocabulary."""
    if len(request.tokens) > (most := max(max_len, MAX_TOKENIZED_TOKENS)):
        raise too_many_tokens("tokens", len(request.tokens), most)
    highest = tokenizer.vocab_size - 1
    if (id := max(request.tokens, default=0)) > highest:
        raise invalid(f"tokens: {id} is not a token id of this model (0 to {highest})", param="tokens")
    return msgspec.json.encode(Detokenized(tokenizer.decode(request.tokens))), len(request.tokens)


def tokenized(
    request: TokenizeTextRequest | TokenizeChatRequest, tokenizer: PromptTokenizer, max_len: int
) -> Tokenized:
    """Tokenizes a text or a chat. Raises ApiError 400."""
    most = max(max_len, MAX_TOKENIZED_TOKENS)
    try:
        if isinstance(request, TokenizeChatRequest):
            ids = chat_prompt(request, tokenizer, most)
        else:
            ids = tokenizer.encode(
                request.prompt, add_special_tokens=request.add_special_tokens is not False, most=most
            )
    except TooManyTokens as error:
        param = "messages" if isinstance(request, TokenizeChatRequest) else "prompt"
        raise too_many_tokens(param, error.count, most) from None
    except ValueError as error:
        raise invalid(f"prompt: {error}", param="prompt") from None
    return Tokenized(len(ids), max_len, ids, tokenizer.tokens(ids) if request.return_token_strs else None)
