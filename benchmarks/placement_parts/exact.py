"""The optimum, by OR-tools CP-SAT: most cores served by grade, and fewest replicas to load.

A boolean for each degree, host and legal start says that a range of that degree lies there. Which model's replica it is
matters only where spread and host memory are in play, and then only how many each host has of each model: replicas of
one degree are otherwise alike. Pins are met beforehand, so neither they nor forbidden cores are variables.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ortools.sat.python import cp_model

from benchmarks.placement_parts.fleet import Fleet, Replica
from benchmarks.placement_parts.rules import CORES, MEMORY_GIB, starts

WORKERS = 2
LEAST_S = 2.0
RANDOM_SEED = 1


@dataclass(frozen=True)
class Admission:
    """Cores served by grade, best first; ``bounds``: by no plan that serves the grades before as well, more."""

    served: tuple[int, ...]
    bounds: tuple[int, ...]

    @property
    def proven(self) -> bool:
        return self.served == self.bounds


@dataclass(frozen=True)
class Loads:
    """Replicas to load; ``bound``: by no plan fewer. None when nothing was found in the time."""

    loads: int | None
    bound: int
    seconds: float

    @property
    def proven(self) -> bool:
        return self.loads == self.bound


class _Ranges:
    """A boolean for each (degree, host, start) that is free, and that no core is taken twice."""

    def __init__(self, fleet: Fleet) -> None:
        self.model = cp_model.CpModel()
        self.all: list[cp_model.IntVar] = []
        self.at: dict[tuple[int, str, int], cp_model.IntVar] = {}
        self._covering: defaultdict[tuple[str, int], list[cp_model.IntVar]] = defaultdict(list)
        free = {machine.name: machine.free for machine in fleet.machines}
        for model in fleet.models:
            for pin in model.pins:
                free[pin.host] &= ~_mask(pin.first, model.tp)
        for machine in fleet.machines:
            for tp in sorted({model.tp for model in fleet.models}):
                for first in starts(machine.instance, tp):
                    if free[machine.name] & _mask(first, tp) == _mask(first, tp):
                        var = self.model.new_bool_var(f"{tp} at {machine.name}:{first}")
                        self.all.append(var)
                        self.at[tp, machine.name, first] = var
                        self.cover(machine.name, first, tp, var)

    def cover(self, host: str, first: int, tp: int, var: cp_model.IntVar) -> None:
        for core in range(first, first + tp):
            self._covering[host, core].append(var)

    def count(self, least: int, most: int) -> cp_model.IntVar:
        """A number of replicas."""
        self.all.append(self.model.new_int_var(least, most, ""))
        return self.all[-1]

    def close(self) -> None:
        """No more is covered."""
        for ranges in self._covering.values():
            self.model.add_at_most_one(ranges)

    def of(self, tp: int, host: str | None = None) -> list[cp_model.IntVar]:
        return [var for (size, name, _), var in self.at.items() if size == tp and host in (None, name)]


def _mask(first: int, tp: int) -> int:
    return ((1 << tp) - 1) << first


def _solver(seconds: float) -> cp_model.CpSolver:
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = WORKERS
    solver.parameters.random_seed = RANDOM_SEED
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.linearization_level = 2  # the relaxation of disjoint ranges is tight
    return solver


def most_served(fleet: Fleet, seconds: float = 20.0) -> Admission:
    """The optimum on an empty fleet, grade by grade: each is solved with the values of those before it fixed.

    ``seconds`` is for all grades together, but each has at least two. A grade that is not solved in its
    time has what the solution before it serves.
    """
    deadline = time.monotonic() + seconds
    ranges = _Ranges(fleet)
    ranges.close()
    required = {}
    excess = {}
    for model in fleet.models:
        pins = len(model.pins)
        required[model.name] = ranges.count(min(pins, model.min), model.min)
        excess[model.name] = ranges.count(max(0, pins - model.min), model.wanted - model.min)
    constrained = any(model.spread is not None or model.memory_gib for model in fleet.models)
    if constrained:
        _count_by_host(fleet, ranges, required, excess)
    else:
        for tp in {model.tp for model in fleet.models}:
            own = [model for model in fleet.models if model.tp == tp]
            counts = sum(required[model.name] + excess[model.name] - len(model.pins) for model in own)
            ranges.model.add(counts <= sum(ranges.of(tp)))
    total = sum(model.tp * (required[model.name] + excess[model.name]) for model in fleet.models)
    ranges.model.add(total <= fleet.cores)  # follows from the rest, and helps the proof
    known = {model.name: len(model.pins) for model in fleet.models}
    served: list[int] = []
    bounds: list[int] = []
    for at, (priority, is_required) in enumerate(fleet.grades):
        counts_of = required if is_required else excess
        own = [model for model in fleet.models if model.priority == priority]
        cores = sum(model.tp * counts_of[model.name] for model in own)
        ranges.model.maximize(cores)
        solver = _solver(max(LEAST_S, deadline - time.monotonic()))
        status = solver.solve(ranges.model)
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            known = {name: solver.value(required[name] + excess[name]) for name in required}
            ranges.model.clear_hints()
            for var in ranges.all:
                ranges.model.add_hint(var, solver.value(var))
        elif status != cp_model.UNKNOWN:
            raise RuntimeError(f"CP-SAT: {solver.status_name(status)}")
        served.append(_cores_by_grade(fleet, known)[at])
        bounds.append(int(solver.best_objective_bound + 1e-6))
        ranges.model.add(cores >= served[-1])
    return Admission(tuple(served), tuple(bounds))


def _cores_by_grade(fleet: Fleet, counts: Mapping[str, int]) -> tuple[int, ...]:
    """Of so many replicas of each model."""
    return fleet.served(Replica(name, i, "", 0, 0) for name, count in counts.items() for i in range(count))


def _count_by_host(
    fleet: Fleet, ranges: _Ranges, required: dict[str, cp_model.IntVar], excess: dict[str, cp_model.IntVar]
) -> None:
    """How many replicas of each model are on each host, beside the pinned ones."""
    pinned = Counter((model.name, pin.host) for model in fleet.models for pin in model.pins)
    here: dict[tuple[str, str], cp_model.IntVar] = {}
    for machine in fleet.machines:
        for model in fleet.models:
            most = min(model.wanted, CORES[machine.instance] // model.tp)
            if model.spread is not None:
                most = min(most, model.spread - pinned[model.name, machine.name])
            here[model.name, machine.name] = ranges.count(0, most)
        for tp in {model.tp for model in fleet.models}:
            counts = [here[model.name, machine.name] for model in fleet.models if model.tp == tp]
            ranges.model.add(sum(counts) <= sum(ranges.of(tp, machine.name)))
        taken = sum(pinned[model.name, machine.name] * (model.memory_gib or 0) for model in fleet.models)
        memory = sum(here[model.name, machine.name] * (model.memory_gib or 0) for model in fleet.models)
        ranges.model.add(memory <= MEMORY_GIB[machine.instance] - taken)
    for model in fleet.models:
        counts = [here[model.name, machine.name] for machine in fleet.machines]
        ranges.model.add(required[model.name] + excess[model.name] - len(model.pins) == sum(counts))


def fewest_loads(fleet: Fleet, seconds: float = 20.0) -> Loads:
    """The fewest replicas to load so that all that is wanted has a place: new ones, and running ones that move.

    For fleets without spread and host memory.
    """
    ranges = _Ranges(fleet)
    stays = {}
    for replica in _free_to_move(fleet):
        tp = replica.last - replica.first + 1
        stays[replica] = ranges.model.new_bool_var(f"{replica.model}/{replica.index} stays")
        ranges.cover(replica.host, replica.first, tp, stays[replica])
    ranges.close()
    for tp in {model.tp for model in fleet.models}:
        own = [var for replica, var in stays.items() if replica.last - replica.first + 1 == tp]
        wanted = sum(model.wanted - len(model.pins) for model in fleet.models if model.tp == tp)
        ranges.model.add(sum(own) + sum(ranges.of(tp)) == wanted)
    ranges.model.maximize(sum(stays.values()))
    solver = _solver(seconds)
    status = solver.solve(ranges.model)
    if status == cp_model.INFEASIBLE:
        raise RuntimeError("not all that is wanted fits")
    floating = sum(model.wanted - len(model.pins) for model in fleet.models)
    bound = floating - int(solver.best_objective_bound + 1e-6)
    solved = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    loads = floating - round(solver.objective_value) if solved else None
    return Loads(loads, bound, solver.wall_time)


def _free_to_move(fleet: Fleet) -> Iterator[Replica]:
    """Running replicas that are not on a pin of their model."""
    pins = {(model.name, pin.host, pin.first) for model in fleet.models for pin in model.pins}
    for replica in fleet.running:
        if (replica.model, replica.host, replica.first) not in pins:
            yield replica
