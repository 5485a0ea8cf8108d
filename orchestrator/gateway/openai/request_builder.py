"""Builds the requests for replicas from a client's request; checks lengths and token ids before the queue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

from orchestrator.gateway.openai import errors
from orchestrator.gateway.openai.chat import chat_prompt, tool_parser_for
from orchestrator.gateway.openai.protocol import MOST, ChatRequest, CompletionRequest
from orchestrator.gateway.openai.toolcalls.events import ToolParser
from workers.messages.requests import GenerateRequest
from workers.text.tokenizer import PromptTokenizer, TooManyTokens

# The token ids of each prompt, the text of it to echo, and the factory of tool call parsers.
Prompts = tuple[list[list[int]], list[str], Callable[[], ToolParser] | None]


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
        return [ids], [""], tool_parser_for(request, tool_parser, tokenizer)
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
) -> list[GenerateRequest]:
    """Returns ``n`` requests for each prompt, in order, with the next ``ids``. ``default_tokens`` None: the rest of
    max_len.

    Raises ApiError 400 with the numbers for a prompt that is empty, too long, or has ids outside the vocabulary.
    """
    options, seed, copies = _options(request, limits), request.seed, request.n or 1
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


def _options(request: ChatRequest | CompletionRequest, limits: RequestLimits) -> dict[str, Any]:
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
    if (guide := request.guide()) is not None:
        options["guide"] = guide
    if not request.stream:
        options["whole"] = True
    return options


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
    vocabulary = limits.vocab_size or MOST  # unknown: reject only ids that no model has
    if max(prompt) >= vocabulary or min(prompt) < 0:
        wrong = next(id for id in prompt if not 0 <= id < vocabulary)
        message = f"prompt: {wrong} is not a token id of this model (0 to {vocabulary - 1})"
        raise errors.invalid(message, param="prompt")


def _biases(request: ChatRequest | CompletionRequest, limits: RequestLimits) -> dict[int, float]:
    biases = {int(id): bias for id, bias in (request.logit_bias or {}).items()}
    for id in biases:
        if id >= (limits.vocab_size or MOST):
            message = f"logit_bias: {id} is not a token id of this model (0 to {(limits.vocab_size or MOST) - 1})"
            raise errors.invalid(message, param="logit_bias")
    return biases


def _wrapped(seed: int) -> int:
    """Wraps a seed to 64 bits, signed."""
    return (seed + 2**63) % 2**64 - 2**63
