"""Replicas that give way to others: nobody is lost, no limit is overrun, and nobody goes for nothing."""

from __future__ import annotations

from typing import Any

import pytest

from placements.facts.core_range import CoreRange
from placements.facts.topology import TOPOLOGIES, Host
from placements.planner.board import Demand, Space, Tenant
from placements.planner.grid import grid_of
from placements.planner.packer import Packer
from placements.planner.plan import Plan, Running, defragment, plan
from placements.spec.schema import ModelSpec, Spec

SMALL, MIDDLE = "inf2.xlarge", "inf2.24xlarge"  # two cores, twelve cores


def machine(instance: str, i: int = 0, memory: float | None = None, reserved: tuple[int, ...] = ()) -> Host:
    return Host(f"{instance}/{i}", TOPOLOGIES[instance], tuple(range(8)), 0, frozenset(reserved), memory_gib=memory)


def model(name: str, tp: int, replicas: int = 1, **more: Any) -> ModelSpec:
    return ModelSpec(name=name, source="./m", tp_degree=tp, replicas=replicas, **more)  # type: ignore[arg-type]


def runs(name: str, replica: int, host: str, cores: str) -> Running:
    return Running(name, replica, host, CoreRange.parse(cores))


def mentioned(drawn: Plan) -> list[str]:
    """Returns every replica of the plan, placed or not."""
    placed = [f"{replica.model}/{replica.replica}" for replica in drawn.placements]
    return sorted([*placed, *(f"{replica.model}/{replica.replica}" for replica in drawn.unplaced)])


def test_a_displaced_replica_without_another_place_is_reported() -> None:
    """Beside one whose spread excludes it, for which other orders are tried."""
    spec = Spec(models=(model("low", 2), model("high", 2, priority=1), model("apart", 1, 2, priority=1, spread="host")))
    drawn = plan(spec, [machine(SMALL)], running=[runs("low", 0, "inf2.xlarge/0", "0-1")])
    assert mentioned(drawn) == ["apart/0", "apart/1", "high/0", "low/0"]


def test_going_home_never_overruns_a_hosts_memory() -> None:
    """Two of 60 GiB never lie on a host of 100."""
    hosts = [machine(MIDDLE, i, 100.0) for i in range(3)]
    spec = Spec(models=(model("m0", 1, 3, host_memory_gib=60.0), model("m1", 8, 2, host_memory_gib=30.0)))
    running = [
        runs("m0", 0, "inf2.24xlarge/2", "6"),
        runs("m0", 1, "inf2.24xlarge/1", "5"),
        runs("m1", 1, "inf2.24xlarge/0", "4-11"),
    ]
    drawn = plan(spec, hosts, running=running, moves=3)
    assert sorted(replica.host for replica in drawn.placements if replica.model == "m0") == [
        host.name for host in hosts
    ]


@pytest.mark.parametrize("more", [{"host_memory_gib": 10.0}, {"spread": "host"}])
def test_a_pin_without_a_host_uses_a_suitable_one(more: dict[str, Any]) -> None:
    """By memory, and by spread."""
    spec = Spec(models=(model("a", 1, 2, cores=("0", "1"), **more),))
    drawn = plan(spec, [machine(SMALL, 0, 16.0), machine(SMALL, 1, 16.0)])
    assert [replica.host for replica in drawn.placements] == ["inf2.xlarge/0", "inf2.xlarge/1"]


def test_a_pin_without_a_host_is_placed_where_its_degree_allows() -> None:
    """Cores 2-5 are not a range of four on trn2, but they are on inf2."""
    spec = Spec(models=(model("a", 4, cores=("2-5",)),))
    drawn = plan(spec, [machine("trn2.48xlarge"), machine("inf2.48xlarge")])
    assert [replica.host for replica in drawn.placements] == ["inf2.48xlarge/0"]


def test_a_higher_grade_uses_a_range_off_the_grid() -> None:
    """Core 1 is in use by an equal, so only 2-9 and 4-11 are left, where two of low priority run."""
    spec = Spec(models=(model("low", 2, 2), model("high", 8, priority=2), model("top", 1, priority=2)))
    running = [runs("low", 0, "inf2.24xlarge/0", "6-7"), runs("low", 1, "inf2.24xlarge/0", "8-9")]
    drawn = plan(spec, [machine(MIDDLE)], running=[*running, runs("top", 0, "inf2.24xlarge/0", "1")])
    assert "high" in {replica.model for replica in drawn.placements}


def test_a_displaced_replica_may_take_the_place_of_a_lower_grade() -> None:
    """The highest one goes where the lowest one runs, and the one between gets two contiguous cores."""
    spec = Spec(models=(model("low", 1), model("top", 1, priority=2), model("mid", 2, priority=1)))
    hosts = [machine(SMALL), machine(SMALL, 1, reserved=(1,))]
    running = [runs("low", 0, "inf2.xlarge/1", "0"), runs("top", 0, "inf2.xlarge/0", "0")]
    assert [replica.model for replica in plan(spec, hosts, running=running, moves=None).unplaced] == ["low"]


def test_only_replicas_with_the_scarce_resource_are_displaced() -> None:
    """For lack of memory the one that uses it is displaced, the others stay."""
    wants = {"host_memory_gib": 60.0}
    spec = Spec(models=(model("low", 1, 3), model("mid", 1, priority=1, **wants), model("top", 1, priority=2, **wants)))  # type: ignore[arg-type]
    low = [runs("low", i, "inf2.24xlarge/0", cores) for i, cores in enumerate(("11", "9", "7"))]
    drawn = plan(spec, [machine(MIDDLE, 0, 100.0)], running=[*low, runs("mid", 0, "inf2.24xlarge/0", "5")])
    assert (drawn.moves, [replica.model for replica in drawn.unplaced]) == ((), ["mid"])


def test_a_pin_of_higher_priority_gets_its_cores() -> None:
    """The replica there goes elsewhere."""
    spec = Spec(models=(model("low", 2), model("pin", 2, cores=("0-1",), priority=1)))
    drawn = plan(spec, [machine(MIDDLE)], running=[runs("low", 0, "inf2.24xlarge/0", "0-1")])
    assert [(replica.model, str(replica.cores)) for replica in drawn.placements] == [("low", "2-3"), ("pin", "0-1")]


def test_freed_cores_are_used_in_the_last_pass() -> None:
    """A replica without room is not tried again until the last search for free ranges."""
    space = Space(0, grid_of("inf2", 2, 0b11), 0b11, 0b11)
    packer = Packer([space], 0)
    first, second = (Tenant(i, 0, 2, (0, False, True), Demand(i, 2, frozenset({0}))) for i in range(2))
    assert packer.place(first)
    assert not packer.place(second)
    packer.remove(first)
    assert not packer.place(second)
    assert packer.squeeze_in(second)


def test_a_pin_whose_cores_become_free_is_placed() -> None:
    """Their replica was displaced by a higher grade."""
    spec = Spec(models=(model("low", 2), model("pin", 1, cores=("1",)), model("top", 1, priority=1)))
    drawn = plan(spec, [machine(SMALL)], running=[runs("low", 0, "inf2.xlarge/0", "0-1")])
    assert [(replica.model, str(replica.cores)) for replica in drawn.placements] == [("pin", "1"), ("top", "0")]


def test_a_missing_replica_beyond_min_is_not_an_error() -> None:
    """One of two is placed, and min is one, whichever it is."""
    spec = Spec(models=(ModelSpec(name="a", source="./m", cores=("0",), replicas={"min": 1, "max": 2}),))  # type: ignore[arg-type]
    drawn = plan(spec, [machine(SMALL)], wanted={"a": 2}, blocked={"inf2.xlarge/0": frozenset({0})})
    assert (drawn.complete, [replica.problems[0].severity for replica in drawn.unplaced]) == (True, ["warning"])


def test_among_equal_replicas_the_first_numbers_have_the_places() -> None:
    spec = Spec(models=(model("a", 2, 9, host_memory_gib=3.0), model("b", 1, 9, host_memory_gib=5.0)))
    drawn = plan(spec, [machine(MIDDLE, 0, 30.0)])
    for name in ("a", "b"):
        placed = [replica.replica for replica in drawn.placements if replica.model == name]
        assert placed == list(range(len(placed)))


def test_a_larger_replica_off_the_grid_moves_for_a_smaller_one() -> None:
    """On 2-9 it leaves no four contiguous cores; on 4-11 it does."""
    spec = Spec(models=(model("a", 8), model("b", 4)))
    running = [runs("a", 0, "inf2.24xlarge/0", "2-9")]
    assert plan(spec, [machine(MIDDLE)], running=running, moves=None).unplaced == ()
    assert defragment(spec, [machine(MIDDLE)], running=running, cores=4) is not None


@pytest.mark.parametrize("cores", [0, -1])
def test_a_window_has_a_core(cores: int) -> None:
    """None at all is a mistake of the caller."""
    with pytest.raises(ValueError, match="at least 1 core"):
        defragment(Spec(models=(model("a", 1),)), [machine(SMALL)], cores=cores)
