"""From what a client asked to the requests that go into the queue: lengths and ids are checked here, before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from orchestrator.gateway import errors
from orchestrator.gateway.protocol import MOST, ChatRequest, CompletionRequest
from workers.requests import GenerateRequest


@dataclass(frozen=True)
class Limits:
    """What a model's replicas were compiled for."""

    max_len: int  # tokens of a slot: prompt + generated
    max_prompt: int  # tokens of the largest prefill bucket
    vocab_size: int | None  # None while no replica has told it

    def within(self, max_prompt: int | None) -> Limits:
        """No longer prompts than that, which the gateway's settings allow."""
        return self if max_prompt is None else replace(self, max_prompt=min(max_prompt, self.max_prompt))


def requests_for(
    asked: ChatRequest | CompletionRequest,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    default_tokens: int | None,
    ids: Iterator[str],
) -> list[GenerateRequest]:
    """``n`` requests for each prompt, in order; ``ids`` names them. ``default_tokens`` None: the rest of max_len.

    Raises ApiError 400 with the numbers for a prompt that is too long, empty, or holds ids that the model has not.
    """
    guide, biases = asked.guide(), _biases(asked, limits) if asked.logit_bias else {}
    logprobs, stops, seed, copies = asked.wanted_logprobs(), asked.stops(), asked.seed, asked.n or 1
    rooms = [_room(asked, prompt, limits) for prompt in prompts]
    return [
        GenerateRequest(
            id=next(ids),
            prompt_ids=prompt if type(prompt) is list else list(prompt),
            max_tokens=asked.max_tokens or min(default_tokens or room, room),
            min_tokens=asked.min_tokens or 0,
            temperature=1.0 if asked.temperature is None else asked.temperature,
            temperature_is_default=asked.temperature is None,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            top_k=max(0, asked.top_k or 0),  # vLLM's -1 means off, as 0 does
            min_p=asked.min_p or 0.0,
            repetition_penalty=1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
            presence_penalty=asked.presence_penalty or 0.0,
            frequency_penalty=asked.frequency_penalty or 0.0,
            no_repeat_ngram_size=asked.no_repeat_ngram_size or 0,
            logit_bias=biases,
            stop=stops,
            stop_token_ids=asked.stop_token_ids or [],
            ignore_eos=bool(asked.ignore_eos),
            skip_special_tokens=asked.skip_special_tokens is not False,
            logprobs=logprobs,
            guide=guide,
            whole=not asked.stream,
            # each of n choices has a seed of its own, so that they differ and all can be had again
            seed=None if seed is None else _wrapped(seed + copy),
        )
        for prompt, room in zip(prompts, rooms, strict=True)
        for copy in range(copies)
    ]


def _room(asked: ChatRequest | CompletionRequest, prompt: Sequence[int], limits: Limits) -> int:
    """Tokens that may follow the prompt."""
    param = "messages" if isinstance(asked, ChatRequest) else "prompt"
    if not prompt:
        raise errors.invalid("the prompt has no tokens", param=param)
    room = limits.max_len - len(prompt)
    longest = min(limits.max_prompt, limits.max_len)
    if len(prompt) > longest or room < 1 or (asked.max_tokens or 0) > room:
        raise errors.too_long(param, len(prompt), asked.max_tokens, limits.max_len, longest)
    vocabulary = limits.vocab_size or MOST  # while no replica has told it, only what no model has is refused
    if max(prompt) >= vocabulary or min(prompt) < 0:
        wrong = next(id for id in prompt if not 0 <= id < vocabulary)
        raise errors.invalid(f"{param}: {wrong} is no token id of this model (0 to {vocabulary - 1})", param=param)
    return room


def _biases(asked: ChatRequest | CompletionRequest, limits: Limits) -> dict[int, float]:
    biases = {int(id): bias for id, bias in (asked.logit_bias or {}).items()}
    for id in biases:
        if id >= (limits.vocab_size or MOST):
            what = f"logit_bias: {id} is no token id of this model (0 to {(limits.vocab_size or MOST) - 1})"
            raise errors.invalid(what, param="logit_bias")
    return biases


def _wrapped(seed: int) -> int:
    """Within 64 bits, as a seed must be."""
    return (seed + 2**63) % 2**64 - 2**63
