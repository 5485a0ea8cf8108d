"""The checker of benchmarks.placement finds every kind of invalid layout, and nothing in valid ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.placement_parts import online
from benchmarks.placement_parts.checker import InvalidLayout, check, violations
from benchmarks.placement_parts.exact import fewest_loads, most_served
from benchmarks.placement_parts.firstfit import openings
from benchmarks.placement_parts.fleet import Fleet, Layout, Machine, Model, Pinned, Replica, share_served
from benchmarks.placement_parts.generator import churned, fresh
from benchmarks.placement_parts.plain import first_fit
from benchmarks.placement_parts.planner import arguments, layout
from benchmarks.placement_parts.recorded import recall
from benchmarks.placement_parts.rules import CORES, MEMORY_GIB, STEP
from placements.planner.plan import Plan

BIG = Machine("inf2.48xlarge/0", "inf2.48xlarge", reserved=(22,), quarantined=(23,))
OTHER = Machine("inf2.48xlarge/1", "inf2.48xlarge")
TRN1 = Machine("trn1.32xlarge/0", "trn1.32xlarge")


def on(host: Machine, model: str, index: int, first: int, tp: int) -> Replica:
    return Replica(model, index, host.name, first, first + tp - 1)


RUNS = on(OTHER, "eight", 0, 0, 8)
FLEET = Fleet(
    machines=(BIG, OTHER, TRN1),
    models=(
        Model("eight", 8, wanted=2, min=1),
        Model("four", 4, wanted=2, min=1, pins=(Pinned(BIG.name, 6),)),
        Model("wide", 2, wanted=2, min=2, spread=1),
        Model("heavy", 1, wanted=3, min=0, memory_gib=300),
    ),
    running=(RUNS,),
)
VALID = (
    RUNS,
    on(BIG, "eight", 1, 14, 8),
    on(BIG, "four", 0, 6, 4),
    on(OTHER, "four", 1, 10, 4),
    on(BIG, "wide", 0, 0, 2),
    on(OTHER, "wide", 1, 14, 2),
    on(BIG, "heavy", 0, 2, 1),
    on(BIG, "heavy", 1, 3, 1),
    on(OTHER, "heavy", 2, 9, 1),
)


def instead(old: Replica, new: Replica) -> Layout:
    assert old in VALID
    return Layout(tuple(new if replica == old else replica for replica in VALID))


def without(replica: Replica, refused: tuple[tuple[str, int], ...] = ()) -> Layout:
    return Layout(tuple(other for other in VALID if other != replica), refused)


def test_a_valid_layout_has_no_violations() -> None:
    """The example of this file, which the others spoil in one way each."""
    assert violations(FLEET, Layout(VALID)) == []


@pytest.mark.parametrize(
    ("spoilt", "violation"),
    [
        (instead(VALID[1], on(TRN1, "eight", 1, 28, 8)), "outside the host"),
        (instead(VALID[1], Replica("eight", 1, "gone", 0, 7)), "no such host"),
        (instead(VALID[1], on(BIG, "eight", 1, 14, 6)), "not 8 cores"),
        (instead(VALID[1], on(TRN1, "eight", 1, 2, 8)), "8 cores may not begin there"),
        (instead(VALID[3], on(TRN1, "four", 1, 0, 4)), "4 cores may not begin there"),
        (instead(VALID[5], on(OTHER, "wide", 1, 15, 2)), "2 cores may not begin there"),
        (instead(VALID[6], on(BIG, "heavy", 0, 22, 1)), "core 22 is reserved"),
        (instead(VALID[6], on(BIG, "heavy", 0, 23, 1)), "core 23 is quarantined"),
        (instead(VALID[6], on(BIG, "heavy", 0, 3, 1)), "belongs to"),
        (instead(VALID[2], on(BIG, "four", 0, 10, 4)), "off its 1 pins"),
        (instead(VALID[2], on(TRN1, "wide", 9, 6, 2)), "four: 1 replicas are told of, 2 are wanted"),
        (instead(VALID[8], on(OTHER, "heavy", 1, 9, 1)), "heavy/1 is told 2 times"),
        (instead(VALID[8], on(OTHER, "heavy", -1, 9, 1)), "no such index"),
        (instead(VALID[8], on(OTHER, "stranger", 0, 9, 1)), "is of no model"),
        (without(VALID[8]), "heavy: 2 replicas are told of, 3 are wanted"),
        (without(VALID[8], (("heavy", 1),)), "heavy/1 is told 2 times"),
        (instead(VALID[5], on(BIG, "wide", 1, 4, 2)), "2 replicas on inf2.48xlarge/0, at most 1"),
        (instead(VALID[8], on(BIG, "heavy", 2, 4, 1)), "900 GiB of host memory are taken, it has 768"),
        (instead(RUNS, on(TRN1, "eight", 0, 8, 8)), "without a move"),
        (instead(RUNS, on(OTHER, "eight", 5, 0, 8)), "ends though it is wanted"),
    ],
)
def test_each_kind_of_violation_is_told(spoilt: Layout, violation: str) -> None:
    """One rule is broken, and named."""
    assert any(violation in sentence for sentence in violations(FLEET, spoilt))


MOVED = on(TRN1, "eight", 0, 8, 8)


def test_a_move_that_is_told_and_allowed_is_valid() -> None:
    """It happened, and there are no more of them than allowed."""
    layout = replace(instead(RUNS, MOVED), moves=((RUNS, MOVED),))
    assert violations(FLEET, layout, moves=1) == []
    assert violations(FLEET, layout, moves=None) == []


def test_more_moves_than_allowed_are_told() -> None:
    """The limit counts."""
    layout = replace(instead(RUNS, MOVED), moves=((RUNS, MOVED),))
    assert violations(FLEET, layout, moves=0) == ["1 replicas are moved, at most 0 may be"]


def test_a_move_that_did_not_happen_is_told() -> None:
    """What a plan says of its moves agrees with where things lie."""
    assert "did not happen" in violations(FLEET, Layout(VALID, moves=((RUNS, MOVED),)), moves=1)[0]


def test_a_running_replica_may_end_where_fewer_are_wanted() -> None:
    """A surplus is no violation."""
    fewer = replace(FLEET, models=(Model("eight", 8, wanted=0, min=0), *FLEET.models[1:]))
    placed = tuple(replica for replica in VALID if replica.model != "eight")
    assert violations(fewer, Layout(placed)) == []


def test_check_raises_with_what_is_wrong() -> None:
    """The benchmark ends at the first plan that is invalid."""
    with pytest.raises(InvalidLayout, match="3 are wanted"):
        check(FLEET, without(VALID[8]))


def test_the_solver_serves_the_best_grade_first() -> None:
    """The required 8 of low priority lose to 24 of high priority that exceed min; what is reserved is not there."""
    models = (Model("high", 24, wanted=2, min=0, priority=1), Model("low", 8, wanted=9, min=1), Model("one", 1, 1, 1))
    best = most_served(Fleet((BIG, OTHER), models))
    assert best.proven
    assert best.served == (0, 24, 9, 8)


def test_the_solver_knows_spread_and_host_memory() -> None:
    """Two hosts of one each, and 768 GiB hold two of 300; pins count."""
    models = (
        Model("wide", 2, wanted=5, min=5, spread=1, pins=(Pinned(OTHER.name, 0),)),
        Model("heavy", 1, wanted=9, min=9, memory_gib=300),
    )
    assert most_served(Fleet((BIG, OTHER), models)).served == (2 * 2 + 4 * 1, 0)


def test_the_solver_moves_as_few_as_possible() -> None:
    """One move makes room for 12 cores; beside a pin another 12 take the small host, whose two replicas move."""
    small = Machine("inf2.24xlarge/0", "inf2.24xlarge")
    running = (on(small, "a", 0, 0, 1), on(small, "b", 0, 5, 1), on(OTHER, "b", 1, 5, 1), on(OTHER, "b", 2, 13, 1))
    models = (Model("a", 1, 1, 1), Model("b", 1, 3, 3), Model("new", 12, 1, 1))
    assert fewest_loads(Fleet((small, OTHER), models, running)).loads == 2
    pinned = (Model("a", 1, 1, 1), Model("b", 1, 3, 3, pins=(Pinned(OTHER.name, 5),)), Model("new", 12, 2, 1))
    assert fewest_loads(Fleet((small, OTHER), pinned, running)).loads == 2 + 3


def test_plain_first_fit_is_valid() -> None:
    """Its list could be a plan: what it leaves is counted as refused."""
    fleet = churned(5, 20)
    placed = layout(Plan(placements=tuple(first_fit(arguments(fleet))))).placed
    there = {(replica.model, replica.index) for replica in placed}
    refused = tuple(
        (model.name, index) for model in fleet.models for index in _missing(there, model.name, model.wanted)
    )
    assert violations(fleet, Layout(placed, refused)) == []


def _missing(there: set[tuple[str, int]], name: str, wanted: int) -> list[int]:
    unused = [index for index in range(2 * wanted) if (name, index) not in there]
    return unused[: wanted - sum(model == name for model, _ in there)]


def test_first_fit_online_loses_what_finds_no_room() -> None:
    """Ten hosts, and eleven replicas that need a whole one at once: one is lost, and a later one finds room again."""
    sequence = tuple(online.Arrival(n, at, 1.0, 24) for n, at in enumerate((0.0, *[0.5] * 10, 2.0)))
    assert online.rejected_by_first_fit(sequence) == 24
    assert online.rejected_by_plan(sequence, 4) == 24


def test_recorded_results_are_those_of_the_present_generator() -> None:
    """A changed generator voids them: run `benchmarks.placement --only loads --full`."""
    assert [recall(churned(seed, 100)) is not None for seed in range(5)] == [True] * 5


def free_ranges(fleet: Fleet) -> list[str]:
    """Machines where the pins and what runs overlap or leave the host."""
    problems = []
    free = {machine.name: machine.free for machine in fleet.machines}
    for replica in fleet.running:
        mask = ((1 << (replica.last - replica.first + 1)) - 1) << replica.first
        if free[replica.host] & mask != mask:
            problems.append(replica.host)
        free[replica.host] &= ~mask
    return problems


@pytest.mark.parametrize("make", [lambda: churned(3, 20), lambda: fresh(3, 4), lambda: fresh(6, 7, True)])
def test_a_seed_always_makes_the_same_fleet(make: Callable[[], Fleet]) -> None:
    """The digest names it, and what runs in it is valid."""
    assert make().digest == make().digest
    assert free_ranges(make()) == []


@pytest.mark.parametrize("seed", range(3))
def test_the_planner_passes_the_checker(seed: int) -> None:
    """On small fleets of each kind."""
    for fleet, moves in ((fresh(seed, 3), 0), (fresh(seed, 3, True), 0), (churned(seed, 10), None)):
        assert violations(fleet, layout(arguments(fleet).plan(moves)), moves) == []


def test_the_tables_agree_with_the_planner_s() -> None:
    """Two people's reading of the same sources: written down twice, and equal."""
    from placements.facts.topology import DEGREES, TOPOLOGIES

    for instance, cores in CORES.items():
        assert (TOPOLOGIES[instance].cores, TOPOLOGIES[instance].memory_gib) == (cores, MEMORY_GIB[instance])
    for family, steps in STEP.items():
        assert {tp: row.legal for tp, row in DEGREES[family].items()} == steps


def test_openings_are_the_legal_starts_of_free_ranges() -> None:
    """As trying each range finds them."""
    free = 0b1111_1110_0111_1111_1011_1101
    assert [i for i in range(24) if openings(free, "inf2.48xlarge", 4) >> i & 1] == [
        i for i in range(0, 21, 2) if free >> i & 15 == 15
    ]


@pytest.mark.parametrize(
    ("ours", "best", "share"),
    [((8, 4), (8, 4), 1.0), ((6, 6), (8, 4), 0.75), ((8, 2), (8, 4), 10 / 12), ((0, 4), (0, 4), 1.0)],
)
def test_what_is_gained_below_a_loss_does_not_count(ours: tuple[int, ...], best: tuple[int, ...], share: float) -> None:
    """The share is 1 only where every grade equals the optimum."""
    assert share_served(ours, best) == share
