"""The rules of the engine ``torch-neuronx``."""

from __future__ import annotations

from collections.abc import Iterator

from placements.rules.case import Case, EngineRules
from placements.spec.problems import Problem


def traces_fit(case: Case) -> Iterator[Problem]:
    """The lengths and the batch of traces fit those of the model: a trace holds no longer input."""
    model = case.model
    if model.kind == "generate":
        return
    lengths = model.buckets.prefill
    longest = model.length(case.checkpoint) if model.max_len is not None or case.checkpoint is not None else None
    if lengths and longest is not None and lengths[-1] < longest:
        fact = f"buckets.prefill ends at {lengths[-1]}; its longest length must be max_len, {longest}"
        where = ("buckets", "prefill", len(lengths) - 1)
        yield case.problem("bad-buckets", where, fact, f"add {longest}, or lower max_len")
    batch = model.engine_options.get("compiled_batch")
    if type(batch) is int and batch > model.max_batch:
        fact = f"engine_options.compiled_batch is {batch}, more than max_batch, {model.max_batch}"
        yield case.problem("out-of-range", ("engine_options", "compiled_batch"), fact, "raise max_batch, or lower it")


RULES = EngineRules(rules=(traces_fit,))
