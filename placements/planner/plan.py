"""Plans replicas onto the cores of hosts, and computes diffs and defragmentations. A pure function of its arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from placements.facts.checkpoints import Checkpoint
from placements.facts.core_range import CoreRange
from placements.facts.topology import Host
from placements.planner.draft import PlanDraft
from placements.planner.host_pool import HostPool
from placements.planner.placement import Move, Placement, Running, Unplaced
from placements.spec.problems import Problem, has_errors
from placements.spec.schema import Spec

__all__ = ["Changes", "Move", "Placement", "Plan", "Running", "Unplaced", "Window", "defragment", "diff", "plan"]


@dataclass(frozen=True)
class Plan:
    """All placements, in the order of the spec; unplaced replicas with reasons; and problems of the spec.

    ``moves`` holds the running replicas that get other cores: to make room, or because a higher grade displaced them.
    """

    placements: tuple[Placement, ...] = ()
    unplaced: tuple[Unplaced, ...] = ()
    problems: tuple[Problem, ...] = ()
    moves: tuple[Move, ...] = ()

    @property
    def complete(self) -> bool:
        """Returns whether all models have their ``min`` replicas and no problem is an error: exit code 0 or 2."""
        return not has_errors(self.problems) and not any(unplaced.required for unplaced in self.unplaced)

    def with_problems(self, problems: Iterable[Problem]) -> Plan:
        """Returns a copy with more problems of the spec, such as the warnings of `check`."""
        return replace(self, problems=(*self.problems, *problems))

    def as_dict(self) -> dict[str, Any]:
        """Returns the stable JSON of `plan -o json`."""
        return {
            "placements": [placement.as_dict() for placement in self.placements],
            "unplaced": [unplaced.as_dict() for unplaced in self.unplaced],
            "moves": [move.as_dict() for move in self.moves],
            "problems": [problem.as_dict() for problem in self.problems],
        }


@dataclass(frozen=True)
class Changes:
    """The difference between a plan and the running replicas. False if there is none."""

    start: tuple[Placement, ...]
    stop: tuple[Running, ...]

    def __bool__(self) -> bool:
        return bool(self.start or self.stop)


def diff(plan: Plan, running: Iterable[Running]) -> Changes:
    """Returns the replicas to start and to stop to reach the plan."""
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
    """Plans the replicas of every model: its ``min``, or its count in ``wanted``, at most its ``max``.

    ``running`` holds the running replicas, ``blocked`` the cores by host that cannot be used (cordons, quarantine),
    ``numbered`` the replica indices by model that are in use elsewhere (older revisions that still serve).
    ``checkpoints`` decide which hosts have the memory for a model; a model without one is assumed to fit. ``moves``
    limits the running replicas that may be moved to make room (None: any number), ``costs`` holds the cost of moving a
    replica of a model (default 1), ``held`` the models whose artifacts each host holds. The spec must have no errors.

    1. Running replicas that fit the spec stay, those on a pin first, then those with the lowest index. Others stop:
       their cores count as free.
    2. A model's pins go to its replicas in order. With more pins than replicas, pins without blocked cores come first.
       A replica whose pinned cores are taken is not placed elsewhere.
    3. A replica that uses no cores goes to the host where such replicas have the fewest threads.
    4. Cores are assigned by grade: priority, then replicas within ``min`` before those beyond it, then running
       replicas before new ones. A higher grade displaces running replicas, which are placed again. Within a grade the
       most cores are served, largest degree first.
    5. Each replica is placed by the steps of `packer`.
    6. If memory, CPUs or spread leave replicas without a place, other orders are tried; if running replicas had to
       move, solutions with fewer moves are tried (`refine`).
    7. Replicas without a place are tried once more on every legal range that is left.
    8. Among otherwise equal places, a new replica gets a host that holds its artifacts (`locality`).

    The result is deterministic. Planning again with ``running`` equal to its placements changes nothing, except that
    more moves may be made for replicas that are still missing.
    """
    draft = PlanDraft(
        spec, HostPool(hosts, blocked or {}), checkpoints or {}, numbered or {}, moves, costs or {}, held or {}
    )
    draft.keep(running, wanted or {})
    draft.place_pinned()
    draft.place_coreless()
    draft.place_floating()
    return Plan(draft.placements(), draft.unplaced(), moves=draft.moves())


@dataclass(frozen=True)
class Window:
    """A range that can be freed, and the moves that free it."""

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
    """Searches for the fewest and cheapest moves of running replicas that free ``cores`` contiguous cores.

    The arguments are those of `plan`. Returns None if no such range is found within ``moves`` moves. Raises ValueError
    for less than one core.
    """
    if cores < 1:
        raise ValueError(f"a window must have at least 1 core, not {cores}")
    observed = tuple(running)
    counts = Counter(replica.model for replica in observed)
    for allowed in (0, 1, 2, 3, 4, 6, 8, 12, 16, None):
        last = allowed is None or (moves is not None and allowed >= moves)
        most = moves if last else allowed
        draft = PlanDraft(spec, HostPool(hosts, blocked or {}), checkpoints or {}, {}, most, costs or {}, {})
        draft.keep(observed, counts)
        opening = draft.clear_range(cores)
        if opening is not None:
            return Window(*opening, draft.moves())
        if last:
            break
    return None
