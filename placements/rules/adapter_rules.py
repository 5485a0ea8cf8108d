"""Checks the LoRA adapters of a model."""

from __future__ import annotations

from collections.abc import Iterator

from placements.rules.case import Case, FieldRule
from placements.spec.notation import is_path
from placements.spec.problems import Problem


def engine_serves_adapters(case: Case) -> Iterator[Problem]:
    """Only vLLM serves adapters."""
    model = case.model
    if model.adapters and case.engine != "vllm":
        what = f"the engine {case.engine} does not serve LoRA adapters"
        yield case.problem("adapters-unsupported", ("adapters",), what, "use engine: vllm, or merge the adapter")


def adapters_without_prefix_cache(case: Case) -> Iterator[Problem]:
    """NxD Inference does not serve adapters together with a prefix cache."""
    model, option = case.model, "prefix_cache"
    caches = model.engine_options.get(option) is True
    if model.adapters and caches and any(not host.emulated for host in case.all_hosts.hosts):
        what = f"{option} is not supported together with LoRA adapters on Neuron devices"
        yield case.problem("adapters-unsupported", ("adapters",), what, f"remove {option} or the adapters")


def adapters_are_folders(case: Case) -> Iterator[Problem]:
    """Adapters are not fetched from S3 or the hub."""
    for name, source in case.model.adapters.items():
        if not is_path(source):
            what = f'the adapter "{name}" is {source}, but adapters are not fetched'
            hint = "write the path of a folder that every host has"
            yield case.problem("adapter-not-local", ("adapters", name), what, hint)


ADAPTER_RULES: tuple[FieldRule, ...] = (
    FieldRule(engine_serves_adapters, frozenset({"adapters", "engine"})),
    FieldRule(adapters_without_prefix_cache, frozenset({"adapters", "engine_options"})),
    FieldRule(adapters_are_folders, frozenset({"adapters"})),
)
