"""The input of a rule: one model with its hosts and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from placements.facts.adapters import Adapter
from placements.facts.checkpoints import Checkpoint
from placements.facts.engines import AUTO_ENGINES, Engine, resolve, runs_on, serves, takes_cores
from placements.facts.plural import plural
from placements.facts.topology import Host, Topology, degree
from placements.planner.replica_demand import has_degree, suits
from placements.resources.memory import MemoryEstimate, estimate, fits
from placements.spec.problems import Problem, Severity
from placements.spec.schema import ModelSpec, Spec
from placements.spec.source_positions import Path


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

    @property
    def hosts(self) -> Sequence[Host]:
        return self.fleet.hosts

    @property
    def engine(self) -> Engine:
        """The engine, resolved if hosts are known: a fleet has only real or only emulated hosts."""
        hosts = self.all_hosts.hosts
        return resolve(self.model.engine, hosts[0], self.model.kind) if hosts else self.model.engine

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
        places = self.machines or ("",)
        family = self.family
        return tuple(
            engine
            for engine in AUTO_ENGINES
            if any(runs_on(engine, place) and (family is None or serves(engine, family, place)) for place in places)
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

    def problem(self, id: str, path: Path, what: str, hint: str = "", severity: Severity = "error") -> Problem:
        """Returns a problem at the position of a field of the model."""
        return Problem(id, severity, self.spec.where("models", self.model.name, *path), what, hint)


Rule = Callable[[Case], Iterator[Problem]]


SIZES = frozenset(
    (
        "engine",
        "dtype",
        "tp_degree",
        "max_batch",
        "max_len",
        "hbm_overhead_gib",
        "draft",
        "quantize",
        "group_query_attention",
        "engine_options",
    )
)
"""The fields that determine the memory of a replica."""


class FieldRule(NamedTuple):
    """A rule, and the fields that it reads: it is skipped if one of them could not be read."""

    rule: Rule
    needs: frozenset[str]


def has_tp(topology: Topology, tp: int) -> bool:
    """Returns whether hosts of the type support the degree by the table."""
    return tp <= topology.cores and degree(topology.family, tp) is not None


def on_each(types: Sequence[Topology], describe: Callable[[Topology], str]) -> str:
    """Returns, for example, "32 cores on trn1.32xlarge; 24 cores on inf2.48xlarge"."""
    return "; ".join(f"{describe(topology)} on {topology.instance}" for topology in types)


def core_list(cores: Sequence[int]) -> str:
    """Returns, for example, "core 3" or "cores 3, 4"."""
    return f"{plural(len(cores), 'core')} {', '.join(map(str, cores))}"
