"""Arrivals and departures one by one: how many cores asked for are rejected."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.placement_parts.checker import check
from benchmarks.placement_parts.firstfit import FirstFit
from benchmarks.placement_parts.fleet import Fleet, Machine, Model, Replica
from benchmarks.placement_parts.planner import arguments, layout

HOSTS = 10
LOAD = 0.8
ARRIVING = {1: 0.30, 2: 0.25, 4: 0.20, 8: 0.14, 12: 0.05, 24: 0.06}
"""How often a replica of each degree arrives: first fit then rejects about 15 % of the cores asked for."""

WARM_UP = 0.1
"""The part of the arrivals, from the first on, whose rejections are not counted: the fleet begins empty."""

MACHINES = tuple(Machine(f"inf2.48xlarge/{i}", "inf2.48xlarge") for i in range(HOSTS))


@dataclass(frozen=True)
class Arrival:
    """A replica that is wanted from ``at`` for ``stay``, in mean stays."""

    number: int
    at: float
    stay: float
    tp: int


def arrivals(seed: int, count: int) -> tuple[Arrival, ...]:
    """A Poisson process whose stays are exponential; its load is 0.8 of the cores of all hosts."""
    rng = random.Random(f"online {seed}")
    mean = sum(tp * share for tp, share in ARRIVING.items())
    rate = LOAD * 24 * HOSTS / mean
    now = 0.0
    result = []
    for number in range(count):
        now += rng.expovariate(rate)
        tp = rng.choices(tuple(ARRIVING), tuple(ARRIVING.values()))[0]
        result.append(Arrival(number, now, rng.expovariate(1.0), tp))
    return tuple(result)


def _counted(sequence: tuple[Arrival, ...]) -> Iterator[tuple[Arrival, bool]]:
    for arrival in sequence:
        yield arrival, arrival.number >= WARM_UP * len(sequence)


def rejected_by_first_fit(sequence: tuple[Arrival, ...]) -> int:
    """Cores of the arrivals that found no room."""
    place = FirstFit(MACHINES, tuple(ARRIVING))
    ends: list[tuple[float, int, int, int, int]] = []
    rejected = 0
    for arrival, counts in _counted(sequence):
        while ends and ends[0][0] <= arrival.at:
            _, _, i, first, tp = heapq.heappop(ends)
            place.give(i, first, tp)
        spot = place.find(arrival.tp)
        if spot is None:
            rejected += arrival.tp * counts
            continue
        place.take(*spot, arrival.tp)
        heapq.heappush(ends, (arrival.at + arrival.stay, arrival.number, *spot, arrival.tp))
    return rejected


def rejected_by_plan(sequence: tuple[Arrival, ...], moves: int | None) -> int:
    """The same when each arrival is planned beside what runs, with at most so many moves for it (None: any number).

    Raises InvalidLayout where a plan breaks a rule or ends what runs.
    """
    running: dict[tuple[str, int], Replica] = {}
    ends: list[tuple[float, str, int]] = []
    rejected = 0
    for arrival, counts in _counted(sequence):
        while ends and ends[0][0] <= arrival.at:
            _, model, index = heapq.heappop(ends)
            del running[model, index]
        wanted = Counter(model for model, _ in running)
        wanted[f"tp{arrival.tp}"] += 1
        models = tuple(Model(f"tp{tp}", tp, wanted[f"tp{tp}"], 0) for tp in ARRIVING)
        fleet = Fleet(MACHINES, models, tuple(running.values()))
        drawn = layout(arguments(fleet).plan(moves))
        check(fleet, drawn, moves)
        before = set(running)
        running = {(replica.model, replica.index): replica for replica in drawn.placed}
        if not before <= set(running):
            raise RuntimeError("a running replica ended for a new one")
        new = set(running) - before
        if new:
            ((model, index),) = new
            heapq.heappush(ends, (arrival.at + arrival.stay, model, index))
        else:
            rejected += arrival.tp * counts
    return rejected


def demanded(sequence: tuple[Arrival, ...]) -> int:
    """Cores of the arrivals that are counted."""
    return sum(arrival.tp for arrival, counts in _counted(sequence) if counts)
