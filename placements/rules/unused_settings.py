"""Reports fields that have no effect on a model's engine or kind."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from placements.engines.registry import ENGINES, HOST_ENGINES, capabilities
from placements.rules.case import Case, Rule
from placements.spec.problems import Problem, Severity
from placements.spec.schema import ModelSpec
from placements.spec.sections import RequestDefaults

_DEFAULTS = ModelSpec(name="default", source="./")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_OF_THE_HOST = (*_PENALTIES, "min_p", "seed")
_OF_DEVICES = ("sampling", "quantize", "quantize_kv", "fuse_qkv")


def unused(
    case: Case,
    why: str,
    *fields: str,
    hint: str = "remove it",
    id: str = "setting-unsupported",
    severity: Severity = "error",
) -> Iterator[Problem]:
    """Yields a problem for each of the fields, as paths with dots, that is set: "FIELD has no effect" and ``why``.

    ``hint`` may have {field}. Fields that could not be read are passed over.
    """
    for field in fields:
        path, default = _default_of(field)
        if path[0] not in case.model.broken and _value(case.model, path) != default:
            yield case.problem(id, path, f"{field} has no effect{why}", hint.format(field=field), severity)


@cache
def _default_of(field: str) -> tuple[tuple[str, ...], Any]:
    """Returns a field's path and default."""
    path = tuple(field.split("."))
    return path, _value(_DEFAULTS, path)


def _value(model: ModelSpec, path: tuple[str, ...]) -> Any:
    value: Any = model
    for key in path:
        value = value.get(key) if isinstance(value, dict) else getattr(value, key)
    return value


def compiles(case: Case) -> bool:
    """Returns whether the engine compiles its buckets; on the host's CPUs only with an option."""
    engine, options = capabilities(case.engine), case.model.engine_options
    return engine.runs_on != "cpus" or ("compile" in engine.options and options.get("compile") is True)


def settings_of_the_engine(case: Case) -> Iterator[Problem]:
    """Settings of some engines are not set for others: those that its capabilities list, buckets where nothing is
    compiled, and the fields that only one engine has."""
    here, engine = f" on the engine {case.engine}", capabilities(case.engine)
    if case.engine != "auto" and not engine.shares_heads:
        owners = [name for name, other in ENGINES.items() if other.shares_heads]
        hint = f"remove it, or use the engine {' or '.join(owners)}"
        yield from unused(case, here, "group_query_attention", hint=hint, id="gqa-unsupported")
    for fields, hint, why, id, encoding in engine.unused:
        if not encoding:
            yield from unused(case, f"{here}{why}", *fields, hint=hint, id=id)
    for name in case.candidates if len(case.candidates) == 1 else ():
        if not ENGINES[name].sets_workers:
            yield from unused(case, f": {name} has no such option", "compiler.workers")
    if not compiles(case):
        yield from unused(case, here, "buckets", hint="remove {field}, or use a Neuron engine")
    if not engine.forwards:
        yield from unused(case, here, "server", hint="set engine: server, or remove server")


def settings_of_the_kind(case: Case) -> Iterator[Problem]:
    """Settings of generation are not set for other kinds, nor those of encoders for generate."""
    here = f" on kind {case.model.kind}"
    if case.model.kind == "generate":
        yield from unused(case, f"{here}, whose requests join between two steps", "max_wait_ms")
        why, hint = f"{here}, which encodes no inputs", "set ttft_ms, tpot_ms or queue_ms"
        yield from unused(case, why, "objectives.items_per_second", hint=hint)
        return
    yield from unused(case, here, "response_template", "trust_remote_code")
    for fields, hint, _, id, encoding in capabilities(case.engine).unused:
        if encoding:
            yield from unused(case, here, *fields, hint=hint, id=id)
    if case.engine not in HOST_ENGINES:  # others are reported as settings of the engine
        yield from unused(case, here, *_OF_DEVICES)
    why, hint = f"{here}, which gives no tokens", "set ttft_ms, the time to the answer"
    yield from unused(case, why, "objectives.tpot_ms", hint=hint)


def defaults_have_an_effect(case: Case) -> Iterator[Problem]:
    """The model's requests have the fields of its defaults, and of those of its aliases.

    1. an engine that forwards requests as they were sent -> none
    2. a model that does not generate                     -> none
    3. an engine that does not sample                     -> no penalties
    4. sampling on the device                             -> nothing that only the host does
    """
    model, engine = case.model, capabilities(case.engine)
    subject = ""
    refused: tuple[str, ...] = ()
    if engine.forwards:
        subject = f"the engine {case.engine}, which gets requests as they were sent"  # 1
    elif model.kind != "generate":
        subject = f"kind {model.kind}"  # 2
    elif not engine.penalizes:
        refused = _PENALTIES  # 3
    elif model.sampling == "device":
        refused = _OF_THE_HOST  # 4
    given: dict[tuple[str, ...], RequestDefaults] = {("request_defaults",): model.request_defaults}
    given |= {("aliases", alias): defaults for alias, defaults in model.alias_defaults.items()}
    for path, defaults in given.items():
        if subject and defaults.given:
            fact = f"{'.'.join(path)} has no effect on {subject}"
            yield case.problem("setting-unsupported", path, fact, "remove these defaults")
        for field in (field for field in refused if getattr(defaults, field) is not None):
            fact = f"{'.'.join((*path, field))} is not supported with "
            fact += "sampling: device" if engine.penalizes else f"the engine {case.engine}"
            yield case.problem("setting-unsupported", (*path, field), fact, "remove it")


UNUSED_SETTINGS: tuple[Rule, ...] = (settings_of_the_engine, settings_of_the_kind, defaults_have_an_effect)
