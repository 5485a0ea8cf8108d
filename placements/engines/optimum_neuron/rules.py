"""The rules of the engine ``optimum-neuron``."""

from __future__ import annotations

from collections.abc import Iterator

from placements.rules.case import Case, EngineRules
from placements.rules.unused_settings import unused
from placements.spec.problems import Problem


def nothing_is_quantized(case: Case) -> Iterator[Problem]:
    """The package quantizes neither weights nor the KV cache."""
    if case.model.quantize or case.model.quantize_kv:
        other = case.engines_of("nxd-inference")
        hint = f"remove {{field}}, or use {other}" if other else "remove {field}"
        here, fields = f" on the engine {case.engine}", ("quantize", "quantize_kv")
        yield from unused(case, here, *fields, hint=hint, id="quantize-unsupported")


def tokens_are_sampled(case: Case) -> Iterator[Problem]:
    """The family's class samples on the device, if it is set."""
    if case.model.sampling != "host" and case.family is not None and (why_not := _why_no_device_sampling(case)):
        fact = f"optimum-neuron does not sample tokens of {case.model.name} on the device: {why_not}"
        yield case.problem("setting-unsupported", ("sampling",), fact, "set sampling: host")


def _why_no_device_sampling(case: Case) -> str:
    """Returns why Optimum Neuron 0.4 switches it off (``_get_neuron_config`` of the family's class); "" if it does not.

    For qwen2 and qwen3 it names a fault of the SDK.
    """
    model = case.model
    if case.family == "mixtral":
        return "its class has none"
    if case.family in ("qwen2", "qwen3") and model.tp_degree == 2 and model.max_batch > 1:
        return f"not for {case.family} with tp_degree 2 and max_batch above 1"
    return ""


RULES = EngineRules(rules=(nothing_is_quantized, tokens_are_sampled))
