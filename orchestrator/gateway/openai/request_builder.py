"""From what a client asked to the requests that go into the queue: lengths and ids are checked here, before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

from orchestrator.gateway.openai import errors
from orchestrator.gateway.openai.chat import chat_prompt, tool_parser_for
from orchestrator.gateway.openai.protocol import MOST, ChatRequest, CompletionRequest
from orchestrator.gateway.openai.toolcalls import ToolParser
from workers.messages.requests import GenerateRequest
from workers.text.tokenizer import PromptTokenizer, TooManyTokens

# Token ids of each prompt, what of it is echoed, and what reads the calls in an answer to it.
Prompts = tuple[list[list[int]], list[str], Callable[[], ToolParser] | None]


@dataclass(frozen=True)
class RequestLimits:
    """What a model's replicas were compiled for."""

    max_len: int  # tokens of a slot: prompt + generated
    max_prompt: int  # tokens of the largest prefill bucket
    vocab_size: int | None  # None while no replica has told it

    def within(self, max_prompt: int | None) -> RequestLimits:
        """No longer prompts than that, which the gateway's settings allow."""
        return self if max_prompt is None else replace(self, max_prompt=min(max_prompt, self.max_prompt))

    @cached_property
    def longest_prompt(self) -> int:
        """Tokens."""
        return min(self.max_prompt, self.max_len)


def prompts_of(
    asked: ChatRequest | CompletionRequest,
    tokenizer: PromptTokenizer,
    tool_parser: str,
    limits: RequestLimits | None = None,
) -> Prompts:
    """What was asked, rendered and tokenized; ``tool_parser`` is the model's. Raises ApiError 400; with ``limits`` also
    for a prompt that is too long, which is then not tokenized to its end."""
    most = None if limits is None else limits.longest_prompt
    try:
        return _prompts_within(most, asked, tokenizer, tool_parser)
    except TooManyTokens as error:
        assert limits is not None
        raise _too_long(asked, error.count, limits, exact=error.exact) from None


def _prompts_within(
    most: int | None, asked: ChatRequest | CompletionRequest, tokenizer: PromptTokenizer, tool_parser: str
) -> Prompts:
    """Raises TooManyTokens for a prompt of more than ``most``."""
    if isinstance(asked, ChatRequest):
        ids = chat_prompt(asked, tokenizer, most)
        return [ids], [""], tool_parser_for(asked, tool_parser, tokenizer)
    given = asked.prompts()
    try:
        prompts = [
            tokenizer.encode(part, most=most) if isinstance(part, str) else _ids_within(most, part) for part in given
        ]
        return prompts, [_echo(tokenizer, part) if asked.echo else "" for part in given], None
    except (ValueError, OverflowError) as error:
        raise errors.invalid(f"prompt: {error}", param="prompt") from None


def _ids_within(most: int | None, ids: list[int]) -> list[int]:
    if most is not None and len(ids) > most:
        raise TooManyTokens(len(ids), exact=True)
    return ids


def _echo(tokenizer: PromptTokenizer, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else tokenizer.text(prompt)


def requests_for(
    asked: ChatRequest | CompletionRequest,
    prompts: Sequence[list[int]],
    limits: RequestLimits,
    default_tokens: int | None,
    ids: Iterator[str],
) -> list[GenerateRequest]:
    """``n`` requests for each prompt, in order; ``ids`` names them. ``default_tokens`` None: the rest of max_len.

    Raises ApiError 400 with the numbers for a prompt that is too long, empty, or holds ids that the model has not.
    """
    how, seed, copies = _how(asked, limits), asked.seed, asked.n or 1
    checks_ids = isinstance(asked, CompletionRequest) and not isinstance(asked.prompt, str)
    requests = []
    for prompt in prompts:
        room = _room(asked, prompt, limits)
        if checks_ids:
            _check_ids(prompt, limits)
        most = asked.max_tokens or min(default_tokens or room, room)
        for copy in range(copies):
            if seed is not None:  # each of n choices has one of its own, so that they differ and all can be had again
                how["seed"] = _wrapped(seed + copy)
            requests.append(GenerateRequest(id=next(ids), prompt_ids=prompt, max_tokens=most, **how))
    return requests


def _how(asked: ChatRequest | CompletionRequest, limits: RequestLimits) -> dict[str, Any]:
    """The fields of the requests that differ from their defaults: to set them all would cost more than all the rest."""
    how: dict[str, Any] = {}
    if asked.temperature is None:
        how["temperature_is_default"] = True
    else:
        how["temperature"] = asked.temperature
    values = _same_fields(asked)
    if values != _ALL_UNSET:
        how.update((name, value) for name, value in zip(_SAME, values, strict=True) if value is not None)
    if asked.top_k is not None:
        how["top_k"] = max(0, asked.top_k)  # vLLM's -1 means off, as 0 does
    if asked.logit_bias:
        how["logit_bias"] = _biases(asked, limits)
    if asked.stop is not None:
        how["stop"] = asked.stops()
    if (logprobs := asked.wanted_logprobs()) is not None:
        how["logprobs"] = logprobs
    if (guide := asked.guide()) is not None:
        how["guide"] = guide
    if not asked.stream:
        how["whole"] = True
    return how


_SAME = (  # here and there; None is the default
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


def _room(asked: ChatRequest | CompletionRequest, prompt: Sequence[int], limits: RequestLimits) -> int:
    """Tokens that may follow the prompt."""
    length = len(prompt)
    room = limits.max_len - length
    if 0 < length <= limits.longest_prompt and room >= (asked.max_tokens or 1):
        return room
    if not prompt:
        raise errors.invalid("the prompt has no tokens", param=_param(asked))
    raise _too_long(asked, length, limits)


def _too_long(
    asked: ChatRequest | CompletionRequest, count: int, limits: RequestLimits, *, exact: bool = True
) -> errors.ApiError:
    return errors.too_long(_param(asked), count, asked.max_tokens, limits.max_len, limits.longest_prompt, exact=exact)


def _param(asked: ChatRequest | CompletionRequest) -> str:
    return "messages" if isinstance(asked, ChatRequest) else "prompt"


def _check_ids(prompt: Sequence[int], limits: RequestLimits) -> None:
    """Of a prompt that the client has tokenized; ours come from the model's own vocabulary."""
    vocabulary = limits.vocab_size or MOST  # while no replica has told it, only what no model has is refused
    if max(prompt) >= vocabulary or min(prompt) < 0:
        wrong = next(id for id in prompt if not 0 <= id < vocabulary)
        raise errors.invalid(f"prompt: {wrong} is no token id of this model (0 to {vocabulary - 1})", param="prompt")


def _biases(asked: ChatRequest | CompletionRequest, limits: RequestLimits) -> dict[int, float]:
    biases = {int(id): bias for id, bias in (asked.logit_bias or {}).items()}
    for id in biases:
        if id >= (limits.vocab_size or MOST):
            what = f"logit_bias: {id} is no token id of this model (0 to {(limits.vocab_size or MOST) - 1})"
            raise errors.invalid(what, param="logit_bias")
    return biases


def _wrapped(seed: int) -> int:
    """Within 64 bits, as a seed must be."""
    return (seed + 2**63) % 2**64 - 2**63
