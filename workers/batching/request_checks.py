"""Checks of a request against the engine that would run it."""

from __future__ import annotations

from workers.batching.penalties import changes_choice
from workers.batching.sampling import check_device_sampling, check_sampling, is_greedy
from workers.messages.engine_protocol import EngineSpec
from workers.messages.requests import GenerateRequest, InvalidField


def check_request(request: GenerateRequest, spec: EngineSpec) -> None:
    """Raises ValueError for a request that an engine of ``spec`` can never run."""
    length = len(request.prompt_ids)
    if not length:
        raise ValueError("the prompt is empty")
    if request.max_tokens < 1:
        raise InvalidField("max_tokens", f"max_tokens must be at least 1, not {request.max_tokens}")
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= spec.vocab_size:
        raise ValueError(f"the prompt has ids outside the vocabulary of {spec.vocab_size}")
    if length > spec.prefill_buckets[-1]:
        raise ValueError(f"the prompt has {length} tokens, the limit is {spec.prefill_buckets[-1]}")
    if length + request.max_tokens > spec.max_len:
        raise ValueError(
            f"{length} prompt tokens and max_tokens {request.max_tokens} exceed the {spec.max_len} of a slot"
        )
    check_sampling(request, spec.vocab_size)
    if spec.returns == "tokens":
        if changes_choice(request) or request.logprobs is not None or request.guide is not None:
            raise ValueError(
                "this model's engine samples the tokens itself: logit_bias, penalties, no_repeat_ngram_size, "
                "logprobs and JSON schemas are not supported"
            )
        if spec.device_top_k:
            check_device_sampling(request, spec.device_top_k)
        elif spec.run_k and not is_greedy(request):
            raise InvalidField(
                "temperature",
                "this model's engine speculates on the device, which is greedy: "
                f"temperature must be 0, not {request.temperature:g}",
            )
