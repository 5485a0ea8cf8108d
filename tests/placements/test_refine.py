"""What trying other orders gains, on fleets of the placement benchmark, against OR-tools CP-SAT."""

from __future__ import annotations

import pytest

import placements.planner.refine
from benchmarks.placement_parts.exact import fewest_loads, most_served
from benchmarks.placement_parts.fleet import Fleet
from benchmarks.placement_parts.generator import churned, fresh
from benchmarks.placement_parts.planner import arguments, layout

SOLVER_S = 20.0


def served(fleet: Fleet) -> tuple[int, ...]:
    """Cores by grade."""
    return fleet.served(layout(arguments(fleet).plan()).placed)


def loads(fleet: Fleet) -> int:
    """New replicas and moved ones."""
    drawn = arguments(fleet).plan(moves=None)
    assert drawn.unplaced == ()
    return len(drawn.placements) - len(fleet.running) + len(drawn.moves)


def test_where_memory_and_spread_decide_the_optimum_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six hosts, on which largest first serves two cores less of a grade."""
    fleet = fresh(2, 6, constrained=True)
    best = most_served(fleet, SOLVER_S).served
    assert served(fleet) == best
    monkeypatch.setattr(placements.planner.refine, "SERVE_TRIES", 0)
    assert served(fleet) < best


def test_no_more_replicas_move_than_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty hosts, where the cheapest range for each replica is not the cheapest for all."""
    fleet = churned(8, 20)
    fewest = fewest_loads(fleet, SOLVER_S).loads
    assert loads(fleet) == fewest
    monkeypatch.setattr(placements.planner.refine, "MOVE_TRIES", 0)
    assert loads(fleet) > (fewest or 0)
