"""Checks the LoRA adapters of a model."""

from __future__ import annotations

from collections.abc import Iterator

from placements.facts.adapters import MODULES, RANKS, max_rank
from placements.facts.vllm import LORA_SINCE, version_of
from placements.rules.case import Case, FieldRule
from placements.rules.vllm_rules import releases
from placements.spec.notation import is_path
from placements.spec.problems import Problem


def engine_serves_adapters(case: Case) -> Iterator[Problem]:
    """Only vLLM serves adapters: on its CPU back end, and by the plugin on NxD Inference since 0.4."""
    if not case.model.adapters:
        return
    if case.engine != "vllm":
        what = f"the engine {case.engine} does not serve LoRA adapters"
        hint = "use engine: vllm, or merge the adapter" if case.works(engine="vllm") else "merge the adapter"
        yield case.problem("adapters-unsupported", ("adapters",), what, hint)
    for release in releases(case):
        if release.back_end == "neuron" or version_of(release.vllm) < LORA_SINCE:
            what = f"vllm-neuron {release.plugin} does not serve LoRA adapters"
            others = case.plugins_of("0.4", "0.5")
            hint = f"set engines.vllm.plugin: {others}, or merge the adapter" if others else "merge the adapter"
            yield case.problem("adapters-unsupported", ("adapters",), what, hint)


def adapters_without_prefix_cache(case: Case) -> Iterator[Problem]:
    """NxD Inference does not serve adapters together with a prefix cache."""
    model, option = case.model, "prefix_cache"
    caches = model.engine_options.get(option) is True
    if model.adapters and caches and any(release.back_end == "nxd" for release in releases(case)):
        what = f"{option} is not supported together with LoRA adapters on NxD Inference"
        yield case.problem("adapters-unsupported", ("adapters",), what, f"remove {option} or the adapters")


def adapters_fit_the_server(case: Case) -> Iterator[Problem]:
    """vLLM loads the adapters: their ranks and features."""
    largest = case.model.engine_options.get("max_lora_rank")
    if largest is not None and largest not in RANKS:
        what = f"engine_options.max_lora_rank is {largest!r}; vLLM has {', '.join(map(str, RANKS))}"
        yield case.problem("out-of-range", ("engine_options", "max_lora_rank"), what, "use one of them, or remove it")
        largest = None
    for name, adapter in case.adapters.items():
        where, what = ("adapters", name), f'the adapter "{name}" has the rank {adapter.rank}'
        if max_rank([adapter.rank]) is None:
            what += f"; vLLM serves at most {RANKS[-1]}"
            yield case.problem("adapter-unusable", where, what, "train an adapter of a smaller rank")
        elif largest is not None and adapter.rank > largest:
            what += f", above engine_options.max_lora_rank {largest}"
            yield case.problem("adapter-unusable", where, what, f"set it to {max_rank([adapter.rank])}, or remove it")
        if adapter.unsupported:
            what = f'the adapter "{name}" uses {adapter.unsupported}, which vLLM does not support'
            yield case.problem("adapter-unusable", where, what, "merge the adapter, or train one without it")


def adapters_are_of_the_model(case: Case) -> Iterator[Problem]:
    """The adapters were trained for this checkpoint, and change modules that it has."""
    model, known = case.model, MODULES.get(case.family or "")
    for name, adapter in case.adapters.items():
        where, base = ("adapters", name), adapter.base
        foreign = [module for module in adapter.modules if known and module.rpartition(".")[2] not in known]
        if foreign:
            what = f'the adapter "{name}" changes {", ".join(foreign)}, which a {case.family} does not have'
            yield case.problem("adapter-unusable", where, what, "use an adapter of this model")
        elif (
            model.source_kind == "hub"
            and base.count("/") == 1
            and not is_path(base)
            and _name(base) != _name(model.source)
        ):
            what = f'the adapter "{name}" was trained for {base}, not for {model.source}'
            yield case.problem(
                "adapter-of-another-model", where, what, "check that it is an adapter of this model", "warning"
            )


def _name(hub_id: str) -> str:
    return hub_id.rpartition("/")[2].lower()


ADAPTER_RULES: tuple[FieldRule, ...] = (
    FieldRule(engine_serves_adapters, frozenset({"adapters", "engine"})),
    FieldRule(adapters_without_prefix_cache, frozenset({"adapters", "engine_options"})),
    FieldRule(adapters_fit_the_server, frozenset({"adapters", "engine_options"})),
    FieldRule(adapters_are_of_the_model, frozenset({"adapters", "source"})),
)
