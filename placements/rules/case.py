"""The input of a rule: one model with its hosts and checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from placements.engines.capabilities import Capabilities
from placements.engines.registry import ENGINES, Engine, candidates_of, part, resolve, sdks_with, takes_cores
from placements.facts.adapters import Adapter
from placements.facts.checkpoints import Checkpoint
from placements.facts.plural import joined, plural
from placements.facts.topology import Host, Topology, degree
from placements.planner.replica_demand import has_degree, suits
from placements.resources.memory import MemoryEstimate, estimate, fits
from placements.spec.problems import Path, Problem, Severity
from placements.spec.schema import ModelSpec, Spec
from placements.spec.sections import EngineSettings


@dataclass(frozen=True)
class Fleet:
    """The hosts that a rule considers."""

    hosts: Sequence[Host]

    @cached_property
    def names(self) -> Mapping[str, Host]:
        return {host.name: host for host in self.hosts}

    @cached_property
    def kinds(self) -> Sequence[tuple[Host, int]]:
        """One host of each type, reserve and memory, with their number."""
        kinds: dict[tuple[object, ...], tuple[Host, int]] = {}
        for host in self.hosts:
            key = (host.topology, host.reserved_cores, host.memory_gib)
            first, count = kinds.get(key, (host, 0))
            kinds[key] = (first, count + 1)
        return tuple(kinds.values())

    @property
    def types(self) -> list[Topology]:
        """The distinct instance types."""
        return list(dict.fromkeys(host.topology for host, _ in self.kinds if host.topology is not None))


MOST_TRIED = 1000
"""The most values that are tried for the hints of one check, which bounds its time."""


class UnreadField(Exception):
    """A rule reads a field that could not be read."""


class PartlyReadModel(ModelSpec):
    """A model of which some fields could not be read. Reading one raises UnreadField, which ends a rule; of ``cores``,
    the valid pins are left for the rules that check each pin."""

    def __getattribute__(self, name: str) -> Any:
        if name != "cores" and name in super().__getattribute__("__dict__").get("broken", ()):
            raise UnreadField(name)
        return super().__getattribute__(name)


Rule = Callable[["Case"], Iterator[Problem]]


class Objection(NamedTuple):
    """Why an engine cannot do what a field requires, and what to do."""

    fact: str
    hint: str


def no_objection(case: Case) -> Objection | None:
    """Returns None: the engine can do it."""
    return None


def planned_packages(case: Case, host: Host) -> Mapping[str, str]:
    """Returns the distributions of the last release whose images have the model's engine for such a host."""
    engine = case.candidates[0]
    releases = sdks_with(ENGINES[engine].beside or engine, host.topology.family) if host.topology else ()
    return releases[-1].packages if releases else {}


def itself(case: Case, engine: Engine) -> Sequence[Capabilities]:
    """Returns the engine, if it reads checkpoints and is not a command that decides everything."""
    own = ENGINES[engine]
    return (own,) if own.reads_checkpoint and not own.forwards else ()


@dataclass(frozen=True)
class EngineRules:
    """The rules of one engine, in its module ``rules``, and its answers to general rules."""

    rules: tuple[Rule, ...] = ()  # for models of the engine
    if_chosen: tuple[Rule, ...] = ()  # for its models, and for those of ``auto`` that no other candidate can run
    of_auto: tuple[Rule, ...] = ()  # for models of ``auto``, if it is a candidate of ``auto``
    of_every_model: tuple[Rule, ...] = ()  # about fields that it owns
    of_spec: tuple[Callable[[Spec], Iterator[Problem]], ...] = ()
    draft: Callable[[Case], Objection | None] = no_objection  # to the model's draft
    readers: Callable[[Case, Engine], Sequence[Capabilities]] = itself  # the engines whose code reads the checkpoint
    other_weights: Callable[[Case], bool] = lambda case: False  # the weights are those of another folder
    quantized_kv: Callable[[Case], Objection | None] = no_objection  # to ``quantize_kv``
    packages: Callable[[Case, Host], Mapping[str, str]] = planned_packages  # of the planned release


_NO_RULES = EngineRules()


def rules_of(engine: Engine) -> EngineRules:
    """Returns the rules of an engine."""
    module = part(engine, "rules")
    rules: EngineRules = _NO_RULES if module is None else module.RULES
    return rules


class Trials:
    """The rules that a value in a hint must keep, and how many values may still be tried."""

    def __init__(self, rules: Sequence[Rule], spec: Spec) -> None:
        pins = sum(len(model.cores) for model in spec.models)
        self.rules = rules
        self._left = MOST_TRIED // (1 + pins // 10)  # each trial compares a model's pins with all

    def take(self) -> bool:
        """Counts one more value. Returns whether it may be tried."""
        self._left -= 1
        return self._left >= 0


@dataclass(frozen=True)
class Case:
    """One model to check. ``fleet`` holds the hosts where it uses cores; a model is legal if one type suits it."""

    spec: Spec
    model: ModelSpec
    fleet: Fleet
    all_hosts: Fleet
    checkpoint: Checkpoint | None
    draft: Checkpoint | None = None
    adapters: Mapping[str, Adapter] = field(default_factory=lambda: MappingProxyType({}))  # by name, as far as known
    trials: Trials | None = None  # None: hints name any value
    is_trial: bool = False
    installed: Mapping[Engine, Mapping[str, str]] = field(  # distributions in the interpreters of engines, where known
        default_factory=lambda: MappingProxyType({})
    )

    @cached_property
    def errors(self) -> Counter[tuple[str, str]]:
        """The number of the model's errors by id and position."""
        problems = self.problems_by(() if self.trials is None else self.trials.rules)
        return Counter((each.id, each.where) for each in problems if each.severity == "error")

    def problems_by(self, rules: Sequence[Rule]) -> Iterator[Problem]:
        """Yields the problems that the rules find. A rule ends at a field that could not be read."""
        for rule in rules:
            with suppress(UnreadField):
                yield from rule(self)

    def works(self, *path: str | int, **fields: Any) -> bool:
        """Returns whether the model with other values of fields has no error that it does not have now, and none at a
        path of the model. A hint names only such values."""
        return self.holds(self.model.model_copy(update=fields), self.spec.engines, path)

    def holds(self, model: ModelSpec, engines: Mapping[Engine, EngineSettings], path: Path = ()) -> bool:
        """Returns whether the model with these settings of engines has no new error, as `works` does."""
        if self.trials is None or self.is_trial:
            return True
        if not self.trials.take():
            return False
        models = tuple(model if other.name == model.name else other for other in self.spec.models)
        spec = self.spec.model_copy(update={"models": models, "engines": engines})
        fleet = Fleet([host for host in self.all_hosts.hosts if takes_cores(model.engine, host)])
        errors = replace(self, spec=spec, model=model, fleet=fleet, is_trial=True).errors
        position = self.spec.where("models", model.name, *path) if path else None
        return not errors - self._standing.errors and all(where != position for _, where in errors)

    @cached_property
    def _standing(self) -> Case:
        return replace(self, is_trial=True)

    def engines_of(self, *engines: Engine) -> str:
        """Returns the engines that the model works on, in words; "" if there is none."""
        return joined([engine for engine in engines if self.works(engine=engine)], "or")

    @property
    def hosts(self) -> Sequence[Host]:
        return self.fleet.hosts

    @property
    def engine(self) -> Engine:
        """The engine, resolved if hosts are known: a fleet has only real or only emulated hosts."""
        hosts, kind = self.all_hosts.hosts, vars(self.model)["kind"]  # the default if it could not be read
        return resolve(self.model.engine, hosts[0], kind) if hosts else self.model.engine

    @property
    def family(self) -> str | None:
        """The checkpoint's model_type, or None if it is unknown."""
        return self.checkpoint.model_type if self.checkpoint else None

    @property
    def machines(self) -> tuple[str, ...]:
        """The distinct families of the machines where the model uses cores."""
        return tuple(dict.fromkeys(topology.family for topology in self.fleet.types))

    @property
    def candidates(self) -> tuple[Engine, ...]:
        """The possible engines: the engine itself; for ``auto`` on Neuron, those that run on one of the machines and
        serve the family."""
        if self.engine != "auto":
            return (self.engine,)
        machines, family = self.machines or ("",), self.family
        return tuple(
            name
            for name in candidates_of(self.engine)
            for engine in [ENGINES[name]]
            if any(engine.runs_in(each) and (family is None or engine.serves(family, each)) for each in machines)
        )

    def has_degree(self, topology: Topology) -> bool:
        """Returns whether hosts of the type support the model's degree."""
        return has_degree(self.model, topology)

    def memory(self, tp_degree: int | None = None) -> MemoryEstimate | None:
        """Returns the memory of a core, at the model's degree or another; None without a checkpoint."""
        if self.checkpoint is None:
            return None
        model = self.model.model_copy(update={"tp_degree": tp_degree or self.model.tp_degree})
        return estimate(model, self.checkpoint, self.engine, self.draft)

    def has_room(self, tp_degree: int, topology: Topology) -> bool:
        """Returns whether a replica of another degree would fit the HBM, as far as known."""
        need = self.memory(tp_degree)
        return has_tp(topology, tp_degree) and (need is None or fits(need, topology))

    def suits(self, host: Host) -> bool:
        """Returns whether engine, degree and HBM allow a replica on the host if it were empty."""
        if host.topology is None or not takes_cores(self.model.engine, host):
            return True
        return suits(self.model, host, self.checkpoint, self.draft)

    def problem(self, id: str, path: Path, fact: str, hint: str = "", severity: Severity = "error") -> Problem:
        """Returns a problem at the position of a field of the model."""
        return Problem(id, severity, self.spec.where("models", self.model.name, *path), fact, hint)


def has_tp(topology: Topology, tp: int) -> bool:
    """Returns whether hosts of the type support the degree by the table."""
    return tp <= topology.cores and degree(topology.family, tp) is not None


def on_each(types: Sequence[Topology], describe: Callable[[Topology], str]) -> str:
    """Returns, for example, "32 cores on trn1.32xlarge; 24 cores on inf2.48xlarge"."""
    return "; ".join(f"{describe(topology)} on {topology.instance}" for topology in types)


def core_list(cores: Sequence[int]) -> str:
    """Returns, for example, "core 3" or "cores 3, 4"."""
    return f"{plural(len(cores), 'core')} {', '.join(map(str, cores))}"
