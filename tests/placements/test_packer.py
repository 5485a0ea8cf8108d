"""What fits beside what, on hosts of which some cores are gone. The answers are known by trying everything."""

from __future__ import annotations

import pytest

from placements.facts.core_range import CoreRange
from placements.planner.plan import Plan, Running, plan
from placements.spec.schema import ModelSpec, Spec
from tests.placements.fleets import host

H0 = "inf2.48xlarge/0"


def fleet(*free: str, demand: dict[int, int]) -> Plan:
    """Hosts of 24 cores, one for each text, of which only the cores in it are free; replicas by degree."""
    hosts = [host(i=i) for i in range(len(free))]
    blocked = {
        host.name: frozenset(range(24)) - {core for part in text.split() for core in CoreRange.parse(part)}
        for host, text in zip(hosts, free, strict=True)
    }
    models = tuple(
        ModelSpec(name=f"tp{tp}", source="./m", tp_degree=tp, allow_degrees=(6,), replicas=count)  # type: ignore[arg-type]
        for tp, count in demand.items()
    )
    return plan(Spec(models=models), hosts, blocked=blocked)


def placed(drawn: Plan) -> dict[int, int]:
    """Replicas by degree."""
    counts: dict[int, int] = {}
    for placement in drawn.placements:
        tp = int(placement.model[2:])
        counts[tp] = counts.get(tp, 0) + 1
    return counts


@pytest.mark.parametrize(
    ("free", "demand", "answer"),
    [
        ("0-23", {8: 3}, True),
        ("0-23", {8: 3, 1: 1}, False),
        ("2-13", {4: 3}, True),  # only off the preferred alignment
        ("2-13", {8: 1, 4: 1}, True),
        ("1-2", {2: 1}, False),  # two halves of devices
        ("1-2", {1: 2}, True),
        ("0-23", {12: 1, 8: 1, 4: 1}, True),
        ("2-23", {12: 1, 8: 1}, True),
        ("4-21", {12: 1}, True),  # only off the preferred alignment
        ("1-12", {12: 1}, False),
        ("0-23", {12: 1, 8: 2}, False),
        ("0-23", {6: 4}, True),
        ("0-23", {6: 3, 4: 2}, False),
        ("0-23", {6: 2, 4: 3}, True),
        ("0-23", {}, True),
    ],
)
def test_what_fits_one_host(free: str, demand: dict[int, int], answer: bool) -> None:
    """Degrees that divide each other, and those that do not."""
    assert (not fleet(free, demand=demand).unplaced) is answer


@pytest.mark.parametrize(("eights", "answer"), [(3, True), (4, False)])
def test_a_twelve_is_placed_where_it_costs_the_eights_least(eights: int, answer: bool) -> None:
    """Two hosts, one with a half gone: the 12 must take the broken one."""
    assert (not fleet("0-23", "0-11 14-17", demand={12: 1, 8: eights}).unplaced) is answer


@pytest.mark.parametrize(
    ("wanted", "admitted"),
    [
        ({8: 5}, {8: 3}),
        ({24: 1, 8: 3}, {24: 1}),  # the same cores: the largest degree wins
        ({12: 1, 8: 3}, {8: 3}),  # 24 cores beat 20
        ({12: 1, 8: 1, 4: 1}, {12: 1, 8: 1, 4: 1}),
        ({4: 7, 1: 3}, {4: 6}),
    ],
)
def test_most_cores_are_served(wanted: dict[int, int], admitted: dict[int, int]) -> None:
    """On one empty host of 24 cores."""
    assert placed(fleet("0-23", demand=wanted)) == admitted


def running(*cores: str, name: str = "small") -> list[Running]:
    return [Running(name, i, H0, CoreRange.parse(text)) for i, text in enumerate(cores)]


def pair(small: int, count: int, big: int, **more: int) -> Spec:
    """Small replicas that run, and one big one that comes."""
    return Spec(
        models=(
            ModelSpec(name="small", source="./m", tp_degree=small, replicas=count),  # type: ignore[arg-type]
            ModelSpec(name="big", source="./m", tp_degree=big, **more),  # type: ignore[arg-type]
        )
    )


def moved(drawn: Plan) -> list[tuple[str, str]]:
    return [(str(move.before.cores), str(move.after.cores)) for move in drawn.moves]


def test_no_replica_moves_without_permission() -> None:
    """The big one finds no room, and running replicas stay."""
    drawn = plan(pair(1, 3, 8), [host()], running=running("0", "8", "16"))
    assert (moved(drawn), [missing.model for missing in drawn.unplaced]) == ([], ["big"])


def test_the_fewest_replicas_move() -> None:
    """Of three ranges the one with a single small replica is emptied."""
    drawn = plan(pair(1, 5, 8), [host()], running=running("0", "1", "8", "16", "17"), moves=None)
    assert (moved(drawn), [str(p.cores) for p in drawn.placements if p.model == "big"]) == ([("8", "2")], ["8-15"])


def test_the_cheapest_replicas_move() -> None:
    """One that costs much stays where two that cost little can go."""
    wish = Spec(
        models=(
            ModelSpec(name="dear", source="./m"),
            ModelSpec(name="cheap", source="./m", replicas=4),  # type: ignore[arg-type]
            ModelSpec(name="big", source="./m", tp_degree=8),
        )
    )
    before = [*running("8", name="dear"), *running("0", "1", "16", "17", name="cheap")]
    drawn = plan(wish, [host()], running=before, moves=None, costs={"dear": 100.0})
    assert [move.before.model for move in drawn.moves] == ["cheap", "cheap"]


def test_no_more_replicas_move_than_allowed() -> None:
    """Two would have to move; one is not enough, and then none moves."""
    before = running("0", "1", "8", "9", "16", "17")
    answers = [plan(pair(1, 6, 8), [host()], running=before, moves=moves) for moves in (1, 2)]
    assert [(len(drawn.moves), len(drawn.unplaced)) for drawn in answers] == [(0, 1), (2, 0)]


def test_a_moving_replica_may_move_others() -> None:
    """The 4 in the way of the 8 finds room only if a 1 moves first."""
    wish = Spec(
        models=(
            ModelSpec(name="four", source="./m", tp_degree=4),
            ModelSpec(name="one", source="./m", replicas=3),  # type: ignore[arg-type]
            ModelSpec(name="pinned", source="./m", tp_degree=8, cores=("16-23",)),
            ModelSpec(name="big", source="./m", tp_degree=8),
        )
    )
    before = [
        *running("0-3", name="four"),
        *running("8", "9", "12", name="one"),
        *running("16-23", name="pinned"),
    ]
    drawn = plan(wish, [host()], running=before, moves=None)
    assert (len(drawn.moves), drawn.unplaced) == (2, ())


def test_a_running_replica_of_lower_priority_is_displaced() -> None:
    """It is placed elsewhere if there is room, and that does not count as a move."""
    drawn = plan(pair(8, 1, 24, priority=1), [host(), host(i=1)], running=running("0-7"))
    assert sorted((p.model, p.host, str(p.cores)) for p in drawn.placements) == [
        ("big", "inf2.48xlarge/1", "0-23"),
        ("small", H0, "0-7"),
    ]


def test_a_displaced_replica_of_lower_priority_stops_without_room() -> None:
    """With the message of a replica without room."""
    drawn = plan(pair(8, 1, 24, priority=1), [host()], running=running("0-7"))
    assert ([p.model for p in drawn.placements], [missing.model for missing in drawn.unplaced]) == (["big"], ["small"])


def test_replicas_beyond_min_are_displaced_by_those_within_another_min() -> None:
    """At one priority."""
    wish = Spec(
        models=(
            ModelSpec(name="a", source="./m", tp_degree=12, replicas={"min": 1, "max": 2}),  # type: ignore[arg-type]
            ModelSpec(name="b", source="./m", tp_degree=12),
        )
    )
    drawn = plan(wish, [host()], running=running("0-11", "12-23", name="a"), wanted={"a": 2})
    assert [(p.model, p.replica) for p in drawn.placements] == [("a", 0), ("b", 0)]
