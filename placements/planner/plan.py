"""plan: which replica of which model lies on which cores of which host. Values in, values out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from placements.facts.checkpoints import Checkpoint
from placements.facts.core_range import CoreRange
from placements.facts.topology import Host
from placements.planner.draft import Draft
from placements.planner.host_pool import HostPool
from placements.planner.placement import Move, Placement, Running, Unplaced
from placements.spec.problems import Problem
from placements.spec.schema import Spec

__all__ = [
    "Changes",
    "Move",
    "Placement",
    "Plan",
    "Running",
    "Unplaced",
    "Window",
    "defragment",
    "diff",
    "plan",
]


@dataclass(frozen=True)
class Plan:
    """All placements, in the order of the spec; what did not fit, and why; and findings about the spec.

    ``moves`` holds the running replicas that get other cores: those that make room, and those that gave way to a higher
    grade and found another place.
    """

    placements: tuple[Placement, ...] = ()
    unplaced: tuple[Unplaced, ...] = ()
    problems: tuple[Problem, ...] = ()
    moves: tuple[Move, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every model has its ``min`` and no problem is an error: exit code 0 or 2 of `plan`, not 1."""
        errors = any(problem.severity == "error" for problem in self.problems)
        return not errors and not any(unplaced.required for unplaced in self.unplaced)

    @classmethod
    def refused(cls, problems: Iterable[Problem]) -> Plan:
        """The plan of a spec with errors: nothing but them."""
        return cls(problems=tuple(problems))

    def with_problems(self, problems: Iterable[Problem]) -> Plan:
        """The same with the findings about the spec, such as the warnings of `check`."""
        return replace(self, problems=(*self.problems, *problems))

    def as_dict(self) -> dict[str, Any]:
        """The stable JSON of `plan -o json`."""
        return {
            "placements": [placement.as_dict() for placement in self.placements],
            "unplaced": [unplaced.as_dict() for unplaced in self.unplaced],
            "moves": [move.as_dict() for move in self.moves],
            "problems": [problem.as_dict() for problem in self.problems],
        }


@dataclass(frozen=True)
class Changes:
    """What separates a plan from what runs. False when there is nothing to do."""

    start: tuple[Placement, ...]
    stop: tuple[Running, ...]

    def __bool__(self) -> bool:
        return bool(self.start or self.stop)


def diff(plan: Plan, running: Iterable[Running]) -> Changes:
    """What to start and what to stop, so that the plan is what runs."""
    observed = list(dict.fromkeys(running))
    wished = {placement.running for placement in plan.placements}
    return Changes(
        start=tuple(placement for placement in plan.placements if placement.running not in observed),
        stop=tuple(replica for replica in observed if replica not in wished),
    )


def plan(
    spec: Spec,
    hosts: Sequence[Host],
    checkpoints: Mapping[str, Checkpoint] | None = None,
    running: Iterable[Running] = (),
    wanted: Mapping[str, int] | None = None,
    blocked: Mapping[str, frozenset[int]] | None = None,
    numbered: Mapping[str, frozenset[int]] | None = None,
    *,
    moves: int | None = 0,
    costs: Mapping[str, float] | None = None,
    held: Mapping[str, frozenset[str]] | None = None,
) -> Plan:
    """Place every model's replicas: its ``min``, or what ``wanted`` names for it, at most its ``max``.

    ``running`` holds what runs now, ``blocked`` cores by host that may not be used (cordons, quarantine), ``numbered``
    replica indices by model that are in use elsewhere (older versions that still serve). ``checkpoints`` say which
    hosts have the memory for a model; one without is taken to fit. ``moves`` is how many running replicas may be given
    other cores to make room (None: any number), ``costs`` what that costs for a replica of a model, 1 where it names
    none, ``held`` the models by host whose artifacts are there. The spec is taken as free of errors.

    1. Running replicas that fit the spec stay, those on a pin first, then those with the lowest index. Others end:
       their cores count as free.
    2. A model's pins go to its replicas in order, where there are more pins than replicas those whose cores are not
       blocked first; pins that find their cores taken are not placed elsewhere.
    3. A replica that takes no cores goes to the host where such replicas have the fewest threads.
    4. Who gets cores is decided by grade: priority, then what ``min`` asks for before what exceeds it, then what runs
       before what is new. What runs gives way to a higher grade, and is placed anew. Within a grade most cores served
       win, largest degree first.
    5. Each takes its place as `packer` says.
    6. Where memory, CPUs or spread leave some without, other orders are tried; where running ones had to move, whether
       fewer would do (`refine`).
    7. What found no place is tried once more wherever a legal range is left.
    8. Of otherwise equal places a new replica takes one on a host that holds what it loads (`holding`).

    The result is deterministic. Planning with ``running`` equal to its placements changes nothing, but that further
    moves may be made for what is still missing.
    """
    draft = Draft(
        spec, HostPool(hosts, blocked or {}), checkpoints or {}, numbered or {}, moves, costs or {}, held or {}
    )
    draft.keep(running, wanted or {})
    draft.place_pinned()
    draft.place_coreless()
    draft.place_floating()
    return Plan(draft.placements(), draft.unplaced(), moves=draft.moves())


@dataclass(frozen=True)
class Window:
    """A range that can be had, and what has to move for it."""

    host: str
    cores: CoreRange
    moves: tuple[Move, ...]


def defragment(
    spec: Spec,
    hosts: Sequence[Host],
    checkpoints: Mapping[str, Checkpoint] | None = None,
    running: Iterable[Running] = (),
    blocked: Mapping[str, frozenset[int]] | None = None,
    *,
    cores: int,
    moves: int | None = None,
    costs: Mapping[str, float] | None = None,
) -> Window | None:
    """The fewest and cheapest moves of running replicas that are found, after which ``cores`` cores in a row are free.

    The arguments are those of `plan`. None: at most ``moves`` of them open no such range. Raises ValueError for less
    than one core.
    """
    if cores < 1:
        raise ValueError(f"a window has at least one core, not {cores}")
    observed = tuple(running)
    counts = Counter(replica.model for replica in observed)
    for allowed in (0, 1, 2, 3, 4, 6, 8, 12, 16, None):
        last = allowed is None or (moves is not None and allowed >= moves)
        most = moves if last else allowed
        draft = Draft(spec, HostPool(hosts, blocked or {}), checkpoints or {}, {}, most, costs or {})
        draft.keep(observed, counts)
        opening = draft.clear_range(cores)
        if opening is not None:
            return Window(*opening, draft.moves())
        if last:
            break
    return None
