"""A fleet to be planned, in the benchmark's own words, and a layout of it: what generator, solver and checker share."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property

from benchmarks.placement_parts.rules import CORES


@dataclass(frozen=True)
class Machine:
    """One host. Nothing may lie on ``reserved`` and ``quarantined`` cores."""

    name: str
    instance: str
    reserved: tuple[int, ...] = ()
    quarantined: tuple[int, ...] = ()

    @property
    def forbidden(self) -> frozenset[int]:
        return frozenset(self.reserved) | frozenset(self.quarantined)

    @property
    def free(self) -> int:
        """A mask: bit i is set where core i may be used."""
        return ((1 << CORES[self.instance]) - 1) & ~sum(1 << core for core in self.forbidden)


@dataclass(frozen=True)
class Pinned:
    """The cores of one replica, by the spec."""

    host: str
    first: int


@dataclass(frozen=True)
class Model:
    """``wanted`` replicas, the first ``min`` of which are required; as many as there are ``pins`` lie on those."""

    name: str
    tp: int
    wanted: int
    min: int
    priority: int = 0
    pins: tuple[Pinned, ...] = ()
    spread: int | None = None  # most replicas on one host
    memory_gib: int | None = None  # of the host, for one replica


@dataclass(frozen=True)
class Replica:
    """A replica on its cores, ``first`` to ``last``."""

    model: str
    index: int
    host: str
    first: int
    last: int


@dataclass(frozen=True)
class Fleet:
    """Everything that a plan depends on."""

    machines: tuple[Machine, ...]
    models: tuple[Model, ...]
    running: tuple[Replica, ...] = ()

    @property
    def cores(self) -> int:
        """Cores that may be used."""
        return sum(machine.free.bit_count() for machine in self.machines)

    @property
    def asked(self) -> int:
        """Cores wanted."""
        return sum(model.tp * model.wanted for model in self.models)

    @property
    def replicas(self) -> int:
        return sum(model.wanted for model in self.models)

    @cached_property
    def by_name(self) -> dict[str, Model]:
        return {model.name: model for model in self.models}

    @property
    def grades(self) -> tuple[tuple[int, bool], ...]:
        """(priority, required), best first: a lower one never costs a higher one a core."""
        priorities = sorted({model.priority for model in self.models}, reverse=True)
        return tuple((priority, required) for priority in priorities for required in (True, False))

    def served(self, placed: Iterable[Replica]) -> tuple[int, ...]:
        """Cores in use by grade, best first."""
        counts = Counter(replica.model for replica in placed)
        cores: Counter[tuple[int, bool]] = Counter()
        for model in self.models:
            required = min(counts[model.name], model.min)
            cores[model.priority, True] += model.tp * required
            cores[model.priority, False] += model.tp * (counts[model.name] - required)
        return tuple(cores[grade] for grade in self.grades)

    @property
    def digest(self) -> str:
        """Of all of it: another generator gives another."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Layout:
    """A plan of a fleet: what lies where, what does not fit, and which running replicas were given other cores."""

    placed: tuple[Replica, ...]
    refused: tuple[tuple[str, int], ...] = ()
    moves: tuple[tuple[Replica, Replica], ...] = ()


def share_served(ours: tuple[int, ...], best: tuple[int, ...]) -> float:
    """The cores that ours serves as a share of the best's, counted over the grades down to each, at the worst of them.

    1.0 exactly when ours is the optimum by grade: whatever is gained below a loss does not count.
    """
    share, mine, other = 1.0, 0, 0
    for gained, two in zip(ours, best, strict=True):
        mine, other = mine + gained, other + two
        share = min(share, mine / other if other else 1.0)
    return share
