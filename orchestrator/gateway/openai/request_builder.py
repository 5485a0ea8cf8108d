"""Builds the requests for replicas from a client's request; checks lengths and token ids before the queue."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import msgspec
import msgspec.structs

from orchestrator.gateway.anthropic.answers import TokenCount
from orchestrator.gateway.openai import errors
from orchestrator.gateway.openai.errors import invalid, too_many_tokens
from orchestrator.gateway.openai.protocol import (
    MAX_COUNT,
    SYSTEM_ROLES,
    Chat,
    ChatRequest,
    CompletionRequest,
    CutCalls,
    DetokenizeRequest,
    NamedTool,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from orchestrator.gateway.openai.template_variables import template_variables, thinking_budget
from orchestrator.gateway.reading.families import ReaderFactory, reading_of
from workers.messages.requests import AnswerConstraint, AnswerMarkers, GenerateRequest
from workers.text.tokenizer import (
    ChatTemplateError,
    NoChatTemplate,
    NoToolsInTemplate,
    PromptTokenizer,
    TemplateInput,
    TooManyTokens,
)

MAX_BEGINNING_TOKENS = 64  # of the beginning of an answer that the chat template writes, such as <think>
MAX_CONTINUED_TOKENS = 4096  # of an answer that the client has begun
MAX_TOKENIZED_TOKENS = 2**18  # of one answer; or the model's max_len, if that is more


def chat_prompt(request: Chat, tokenizer: PromptTokenizer, most: int | None = None) -> list[int]:
    """Returns the token ids of the chat, rendered by the model's template. With `tool_choice: none` the prompt has no
    tools. Raises ApiError 400, and TooManyTokens for more than ``most`` ids.
    """
    cut = CutCalls()
    messages = [message.for_template(position, cut) for position, message in enumerate(request.messages)]
    forbids = isinstance(request, ChatRequest) and request.calling == "none"
    tools = None if forbids else [tool.for_template() for tool in request.tools or ()]
    variables, effort, thinking = request.chat_template_kwargs, request.reasoning_effort, request.thinking
    if effort is not None or thinking is not None or request.thinking_token_budget is not None:
        variables = template_variables(request, tokenizer.chat_template(bool(tools)))
    try:
        chat = TemplateInput(
            messages,
            tools or None,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=bool(request.continue_final_message),
            template_kwargs=variables,
            add_special_tokens=isinstance(request, TokenizeChatRequest) and bool(request.add_special_tokens),
        )
        try:
            return tokenizer.apply_chat_template(chat, most)
        except ChatTemplateError:
            # 1. as sent  2. later system messages as text of users  3. also those at the beginning
            for kept in (1, 0):
                merged = with_few_system_messages(messages, kept)
                if merged != messages:
                    with contextlib.suppress(ChatTemplateError):
                        return tokenizer.apply_chat_template(msgspec.structs.replace(chat, messages=merged), most)
            raise
    except NoChatTemplate as error:
        raise errors.invalid(f"{request.model}: {error}", param="messages", code="no_chat_template") from None
    except NoToolsInTemplate as error:
        raise errors.invalid(f"{request.model}: {error}", param="tools", code="tools_not_supported") from None
    except (ChatTemplateError, ValueError) as error:
        raise errors.invalid(f"messages: {error}", param="messages", code="chat_template_failed") from None


def with_few_system_messages(messages: Sequence[dict[str, Any]], kept: int) -> list[dict[str, Any]]:
    """Returns the messages with at most ``kept`` system messages, at their beginning, for templates that refuse more.
    The text of the others is added to a user's message: to the next one if it follows at once, else to the last one
    before."""
    followed = []  # by a message of a user, after any system messages
    following = "user"
    for message in reversed(messages):
        following = following if message["role"] in SYSTEM_ROLES else message["role"]
        followed.append(following == "user")
    followed.reverse()
    few: list[dict[str, Any]] = []
    texts: dict[int, list[str]] = {}  # of the messages of users, by their places in ``few``; joined at the end
    waiting: list[str] = []  # texts for the next message of a user
    last: int | None = None  # the place of the last message of a user
    for position, message in enumerate(messages):
        if message["role"] in SYSTEM_ROLES and position >= kept:
            if last is None or (followed[position] and last != len(few) - 1):
                waiting.append(message["content"])
            else:
                texts[last].append(message["content"])
            continue
        if message["role"] == "user":
            last = len(few)
            texts[last], waiting = [*waiting, message["content"]], []
        few.append(dict(message))
    for place, parts in texts.items():
        few[place]["content"] = "\n\n".join(parts)
    return [*few, {"role": "user", "content": "\n\n".join(waiting)}] if waiting else few


def readers_for(
    request: ChatRequest, setting: str, tokenizer: PromptTokenizer, prompt: Sequence[int]
) -> ReaderFactory | None:
    """Returns the factory of readers, one for each choice; None for an answer that is only text.

    ``setting`` is the model's `response_template`. Called after ``chat_prompt``, which rejects tools that the template
    does not support; ``prompt`` is its result. A reader gets the text with special tokens, since some of them mark
    reasoning and calls. The tokens that end an answer are never part of the text. Raises ApiError 400 if calls are
    allowed but could not be read.
    """
    calling = request.calling
    reading = reading_of(setting, tokenizer, calling != "none")
    if calling == "none" and not reading.reasons:
        return None
    if calling == "auto" and not reading.calls:
        message = (
            f"{request.model}: the format of this model's tool calls is unknown; send tool_choice 'required' or a "
            "function's name, which work with any model, or set the model's response_template in the spec"
        )
        raise errors.invalid(message, param="tool_choice", code="tools_not_supported")
    if request.skip_special_tokens is False:  # the client wants them
        reading = replace(reading, dropped=None)
    if calling == "auto" or reading.reasons:
        request.skip_special_tokens = False
    continues = bool(request.continue_final_message)
    seen = MAX_CONTINUED_TOKENS if continues else MAX_BEGINNING_TOKENS if reading.reasons else 0
    tools = () if calling == "none" else request.tools or ()
    return ReaderFactory(
        reading,
        "named" if isinstance(calling, NamedTool) else calling,
        calling.function.name if isinstance(calling, NamedTool) else "",
        {tool.function.name: tool.properties() for tool in tools},
        tokenizer.decode(prompt[-seen:]) if seen else "",
        streamed=bool(request.stream),
        only_one=request.parallel_tool_calls is False,
        first_call=sum(len(message.tool_calls or ()) for message in request.messages),
    )


# The token ids of each prompt, the text of it to echo, and the factory of readers.
Prompts = tuple[list[list[int]], list[str], ReaderFactory | None]


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
    response_template: str,
    limits: RequestLimits | None = None,
) -> Prompts:
    """Renders and tokenizes the prompts of a request; ``response_template`` is the model's. Raises ApiError 400; with
    ``limits`` also for a prompt that is too long, which is then not tokenized to its end."""
    most = None if limits is None else limits.longest_prompt
    try:
        return _prompts_within(most, request, tokenizer, response_template)
    except TooManyTokens as error:
        assert limits is not None
        raise _too_long(request, error.count, limits, exact=error.exact) from None


def _prompts_within(
    most: int | None, request: ChatRequest | CompletionRequest, tokenizer: PromptTokenizer, response_template: str
) -> Prompts:
    """Tokenizes the prompts. Raises TooManyTokens for a prompt of more than ``most`` tokens."""
    if isinstance(request, ChatRequest):
        ids = chat_prompt(request, tokenizer, most)
        return [ids], [""], readers_for(request, response_template, tokenizer, ids)
    parts = request.prompts()
    try:
        prompts = [
            tokenizer.encode(part, most=most) if isinstance(part, str) else _ids_within(most, part) for part in parts
        ]
        return prompts, [_echo(tokenizer, part) if request.echo else "" for part in parts], None
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
    readers: ReaderFactory | None = None,
) -> list[GenerateRequest]:
    """Returns ``n`` requests for each prompt, in order, with the next ``ids``. ``default_tokens`` None: the rest of
    max_len. ``readers``: an answer that may have reasoning is read piece by piece, also if it is not streamed, and a
    constraint leaves room for reasoning and calls.

    Raises ApiError 400 with the numbers for a prompt that is empty, too long, or has ids outside the vocabulary.
    """
    options, seed, copies = _options(request, limits, readers), request.seed, request.n or 1
    if readers is not None and readers.reading.reasons:
        if isinstance(request, ChatRequest) and (budget := thinking_budget(request)) is not None:
            options["reasoning_limit"] = readers.reasoning_limit(budget)
    elif not request.stream:
        options["whole"] = True
    checks_ids = isinstance(request, CompletionRequest) and not isinstance(request.prompt, str)
    requests = []
    for prompt in prompts:
        room = _room(request, prompt, limits)
        if checks_ids:
            _check_ids(prompt, limits)
        most = min(default_tokens or room, room) if request.max_tokens is None else request.max_tokens
        for copy in range(copies):
            if seed is not None:  # one seed per choice, so that choices differ and can be reproduced
                options["seed"] = _wrapped(seed + copy)
            requests.append(GenerateRequest(id=next(ids), prompt_ids=prompt, max_tokens=most, **options))
    return requests


def _options(
    request: ChatRequest | CompletionRequest, limits: RequestLimits, readers: ReaderFactory | None
) -> dict[str, Any]:
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
    if (prompt_logprobs := request.prompt_logprobs_count()) is not None:
        options["prompt_logprobs"] = prompt_logprobs
    if not request.is_free and (guide := _guide(request, readers)) is not None:
        options["guide"] = guide
    return options


def _guide(request: ChatRequest | CompletionRequest, readers: ReaderFactory | None) -> AnswerConstraint | None:
    """Returns the answer's constraint. It begins after the reasoning, and allows calls instead if the request does."""
    if isinstance(request, CompletionRequest):
        return request.guide()
    markers = AnswerMarkers() if readers is None else readers.markers
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
    if 0 < length <= limits.longest_prompt and room >= (1 if request.max_tokens is None else request.max_tokens):
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
