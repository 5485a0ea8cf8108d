"""The moves that free contiguous cores."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.control.decisions.relocation import RunningFleet, defragmentation
from placements.facts.core_range import CoreRange
from placements.facts.topology import TOPOLOGIES, Host
from placements.planner.plan import Running
from placements.spec.schema import ModelSpec, Spec

HOST = "inf2.24xlarge/0"  # 12 cores
HOSTS = (Host(HOST, TOPOLOGIES["inf2.24xlarge"], tuple(range(96)), emulated=True),)
SPEC = Spec(models=(ModelSpec(name="small", source="./m", replicas=3),))  # type: ignore[arg-type]
SCATTERED = tuple(Running("small", i, HOST, CoreRange(core, core)) for i, core in enumerate((1, 6, 10)))


def freed(cores: int, hosts: tuple[Host, ...] = HOSTS, **state: Any) -> dict[str, Any]:
    return defragmentation(SPEC, hosts, {}, RunningFleet(SCATTERED, **state), cores)


def test_one_move_opens_a_window_of_eight_cores() -> None:
    """The placements are those after the move."""
    preview = freed(8, load_s={"small": 4.2})
    (move,) = preview["moves"]
    window = set(CoreRange.parse(preview["window"]["cores"]))
    occupied = {int(placement["cores"]) for placement in preview["placements"]}
    assert len(window) == 8
    assert int(move["from"]["cores"]) in window
    assert len(occupied) == 3
    assert not occupied & window
    assert (move["load_s"], preview["load_s"], preview["problems"]) == (4.2, 4.2, [])


def test_the_duration_is_unknown_if_a_start_was_never_measured() -> None:
    preview = freed(8)
    assert (preview["moves"][0]["load_s"], preview["load_s"]) == (None, None)


def test_a_free_window_needs_no_move() -> None:
    preview = freed(2)
    assert (preview["moves"], preview["load_s"], preview["problems"]) == ([], 0, [])


@pytest.mark.parametrize("state", ["quarantined", "cordoned"])
def test_a_window_has_no_blocked_cores(state: str) -> None:
    """Without core 2 the eight cores are on its right, and the host is listed with it."""
    blocked: dict[str, Any] = {state: {HOST: frozenset({2})}}
    preview = freed(8, **blocked)
    assert preview["window"]["cores"] == "4-11"
    assert preview["hosts"][0][state] == ["2"]


def test_the_replica_of_the_model_with_the_least_traffic_moves() -> None:
    """The moves of both models would open a window."""
    models = tuple(ModelSpec(name=name, source="./m", tp_degree=2) for name in ("busy", "quiet"))
    running = [Running("busy", 0, HOST, CoreRange(2, 3)), Running("quiet", 0, HOST, CoreRange(8, 9))]
    preview = defragmentation(Spec(models=models), HOSTS, {}, RunningFleet(running, traffic={"busy": 5.0}), 8)
    assert [move["model"] for move in preview["moves"]] == ["quiet"]


def test_a_window_that_no_move_opens_is_a_problem() -> None:
    """It states the free cores, and the longest range that replicas may use."""
    preview = freed(12, cordoned={HOST: frozenset({5})})
    (problem,) = preview["problems"]
    assert (preview["window"], preview["moves"], problem["id"]) == (None, [], "no-window")
    assert f"most are free on {HOST}, 8, and replicas may use 6-11 there" in problem["what"]


def test_a_host_without_usable_cores_has_no_window() -> None:
    (problem,) = freed(1, cordoned={HOST: frozenset(range(12))})["problems"]
    assert "none of its cores may be used" in problem["what"]


def test_a_fleet_without_a_live_host_has_no_window() -> None:
    """Its replicas are not placed anywhere."""
    preview = freed(1, ())
    assert (preview["placements"], preview["problems"][0]["what"]) == ([], "there is no host")
