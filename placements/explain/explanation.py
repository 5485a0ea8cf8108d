"""The question why a model is placed as it is, the changes that are tried to answer it, and its explanation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from placements.engines.registry import takes_cores
from placements.facts.checkpoints import Checkpoint
from placements.facts.core_range import CoreRange
from placements.facts.plural import plural
from placements.facts.topology import Host
from placements.planner.plan import Placement, Plan, Running, plan
from placements.spec.schema import ModelSpec, Spec


@dataclass(frozen=True)
class Trial:
    """Changed arguments of `check` and `plan`, and the change in words."""

    id: str  # the kind of change
    change: str  # what to do, in words
    spec: Spec
    hosts: tuple[Host, ...]
    wanted: Mapping[str, int]
    blocked: Mapping[str, frozenset[int]]
    moves: int = 0
    losers: frozenset[str] = frozenset()  # models that lose replicas by the change itself

    def and_then(self, other: Trial) -> Trial:
        """Returns the combination with ``other``, which was derived from this trial."""
        return replace(other, id=f"{self.id}+{other.id}", change=f"{self.change}, and {other.change}")


@dataclass(frozen=True)
class Suggestion:
    """A change that gives the model its replicas, with the resulting plan."""

    trial: Trial
    plan: Plan
    gives: str

    def as_dict(self) -> dict[str, Any]:
        """Returns the JSON of `explain -o json`."""
        return {
            "id": self.trial.id,
            "change": self.trial.change,
            "gives": self.gives,
            "moves": [move.as_dict() for move in self.plan.moves],
        }


@dataclass(frozen=True)
class Question:
    """The model to explain with all inputs of the planner, and the plan without changes.

    `explain.explain` takes one whose last two fields are not known, with the whole spec and any ``wanted``.
    """

    model: ModelSpec
    spec: Spec  # for `remedies` without other models that have errors: those run nowhere
    hosts: tuple[Host, ...]
    checkpoints: Mapping[str, Checkpoint] = field(default_factory=dict)
    drafts: Mapping[str, Checkpoint] = field(default_factory=dict)
    running: tuple[Running, ...] = ()
    wanted: Mapping[str, int] = field(default_factory=dict)  # for `remedies` of this never 0
    blocked: Mapping[str, frozenset[int]] = field(default_factory=dict)
    cordoned: Mapping[str, frozenset[int]] = field(  # the part of ``blocked`` that an operator can give back
        default_factory=dict
    )
    wrong: bool = False  # the model's part of the spec has errors, so that nothing of it is placed
    tolerated: frozenset[tuple[str, str]] = frozenset()  # (id, what) of errors elsewhere
    absent: tuple[Host, ...] = ()  # further hosts of the spec, whose machines do not exist now

    @property
    def target(self) -> int:
        """The number of replicas to plan for."""
        return self.wanted[self.model.name]

    @cached_property
    def drawn(self) -> Plan:
        return plan(self.spec, self.hosts, self.checkpoints, self.running, self.wanted, self.blocked)

    @cached_property
    def placed(self) -> tuple[Placement, ...]:
        """The placements of this model."""
        return tuple(placement for placement in self.drawn.placements if placement.model == self.model.name)

    @cached_property
    def own_hosts(self) -> tuple[Host, ...]:
        """The hosts where the model uses cores."""
        return tuple(host for host in self.hosts if takes_cores(self.model.engine, host))

    def unusable(self, host: Host) -> frozenset[int]:
        """Returns the reserved and the blocked cores of a host."""
        return host.reserved_cores | self.blocked.get(host.name, frozenset())

    @cached_property
    def kinds(self) -> tuple[Host, ...]:
        """One host of each type where the model uses cores, machine or not."""
        kinds: dict[object, Host] = {}
        for host in (*self.own_hosts, *(host for host in self.absent if takes_cores(self.model.engine, host))):
            kinds.setdefault((host.topology, host.emulated, len(host.usable_cpus), host.memory_gib), host)
        return tuple(kinds.values())


def without(spec: Spec, name: str) -> Spec:
    return spec.model_copy(update={"models": tuple(model for model in spec.models if model.name != name)})


def changed(spec: Spec, name: str, fields: Mapping[str, object]) -> Spec:
    """Returns the spec with other fields of one model."""
    models = (model.model_copy(update=dict(fields)) if model.name == name else model for model in spec.models)
    return spec.model_copy(update={"models": tuple(models)})


def spots(placements: Iterable[Placement]) -> Iterator[str]:
    """Yields each host with the cores of its placements: "inf2.48xlarge/0 cores 0-7, 8-15"."""
    on_host: dict[str, list[CoreRange | None]] = {}
    for placement in placements:
        on_host.setdefault(placement.host, []).append(placement.cores)
    for host, core_ranges in on_host.items():
        text = place_text(host, core_ranges[0])
        yield ", ".join([text, *(str(cores) for cores in core_ranges[1:] if cores is not None)])


def place_text(host: str, cores: CoreRange | None) -> str:
    """Returns, for example, "inf2.48xlarge/0 cores 0-7"."""
    if cores is None:
        return host
    return f"{host} {plural(len(cores), 'core')} {cores}"


@dataclass(frozen=True)
class Constraint:
    """One demand of a model. ``id`` is a problem id if the demand is not met, else the dimension's name."""

    id: str
    what: str  # with its numbers
    details: tuple[str, ...] = ()
    hint: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "what": self.what, "details": list(self.details), "hint": self.hint}


@dataclass(frozen=True)
class ExplainedPlacement:
    """A placed replica, and the reasons for its place."""

    placement: Placement
    why: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        placement = self.placement
        return {
            "replica": f"{placement.model}/{placement.replica}",
            "host": placement.host,
            "cores": None if placement.cores is None else str(placement.cores),
            "threads": placement.threads,
            "why": list(self.why),
        }


@dataclass(frozen=True)
class Explanation:
    """The explanation of one model's placement on these hosts."""

    model: str
    priority: int
    required: int  # ``replicas.min``
    wanted: int  # replicas that were planned for; 1 for a model scaled to zero
    places: tuple[ExplainedPlacement, ...] = ()
    failed: tuple[Constraint, ...] = ()  # in the order in which they are judged
    holds: tuple[Constraint, ...] = ()
    suggestions: tuple[Suggestion, ...] = ()  # the smallest change first
    tried: Literal["nothing", "some", "all"] = (
        "nothing"  # which of the known changes were tried; "some": the budget of plans was used up
    )

    @property
    def fits(self) -> bool:
        """Returns whether the model has its ``min`` replicas, or one replica if it is scaled to zero."""
        return len(self.places) >= (min(self.required, self.wanted) or self.wanted) and not self.broken

    @property
    def broken(self) -> bool:
        """Returns whether the model's part of the spec has errors, so that none of its replicas are placed."""
        return not self.places and bool(self.failed)

    def as_dict(self) -> dict[str, Any]:
        """The JSON of `corewright explain`."""
        return {
            "model": self.model,
            "fits": self.fits,
            "priority": self.priority,
            "min": self.required,
            "wanted": self.wanted,
            "replicas": [position.as_dict() for position in self.places],
            "failed": [constraint.as_dict() for constraint in self.failed],
            "holds": [constraint.as_dict() for constraint in self.holds],
            "suggestions": [suggestion.as_dict() for suggestion in self.suggestions],
            "tried": self.tried,
        }
