"""Checks the aliases of models, and the defaults that models and aliases give to requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from placements.rules.case import Case, FieldRule
from placements.spec.problems import Problem
from placements.spec.request_defaults import RequestDefaults
from placements.spec.schema import Spec

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_OF_THE_HOST = (*_PENALTIES, "min_p", "seed")


def names_are_of_one_model(spec: Spec) -> Iterator[Problem]:
    """An alias is not the name of a model or another alias. Reported at the later one."""
    names = {model.name for model in spec.models}
    adapters = {name for model in spec.models for name in model.served_adapters}
    owners: dict[str, str] = {}
    for model in spec.models:
        for i, alias in enumerate(model.aliases):
            where = spec.where("models", model.name, "aliases", alias if isinstance(model.aliases, Mapping) else i)
            if alias in names:
                what = f'the alias "{alias}" of "{model.name}" is the name of a model'
                yield Problem("alias-taken", "error", where, what, "use another alias, or rename the model")
            elif alias in adapters:
                what = f'the alias "{alias}" of "{model.name}" is the name of an adapter'
                yield Problem("alias-taken", "error", where, what, "use another alias, or rename the adapter")
            elif alias in owners:
                other = owners[alias]
                whose = "a duplicate" if other == model.name else f'also an alias of "{other}"'
                what = f'the alias "{alias}" of "{model.name}" is {whose}'
                yield Problem("alias-taken", "error", where, what, "remove one of the two")
            owners.setdefault(alias, model.name)


def defaults_have_an_effect(case: Case) -> Iterator[Problem]:
    """The model's requests have the fields of its defaults, and of those of its aliases.

    1. engine: server, which gets requests as they were sent -> none
    2. a model that does not generate                        -> none
    3. the engine echo, which does not sample                -> no penalties
    4. sampling on the device                                -> nothing that only the host does
    """
    model = case.model
    place = ""
    refused: tuple[str, ...] = ()
    if case.engine == "server":
        place = "the engine server, which gets requests as they were sent"  # 1
    elif model.kind != "generate":
        place = f"kind {model.kind}"  # 2
    elif case.engine == "echo":
        refused = _PENALTIES  # 3
    elif model.sampling == "device":
        refused = _OF_THE_HOST  # 4
    given: dict[tuple[str, ...], RequestDefaults] = {("request_defaults",): model.request_defaults}
    given |= {("aliases", alias): defaults for alias, defaults in model.alias_defaults.items()}
    for path, defaults in given.items():
        if place and defaults.given:
            what = f"{'.'.join(path)} has no effect on {place}"
            yield case.problem("setting-unsupported", path, what, "remove these defaults")
        for field in (field for field in refused if getattr(defaults, field) is not None):
            what = f"{'.'.join((*path, field))} is not supported with "
            what += "the engine echo" if case.engine == "echo" else "sampling: device"
            yield case.problem("setting-unsupported", (*path, field), what, "remove it")


ALIAS_RULES: tuple[FieldRule, ...] = (
    FieldRule(defaults_have_an_effect, frozenset({"aliases", "engine", "kind", "request_defaults", "sampling"})),
)
