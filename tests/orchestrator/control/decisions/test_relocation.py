"""Scattered replicas are relocated without an outage to make room for a large one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.control.decisions.relocation import find_relocation
from orchestrator.control.decisions.replica_view import ReplicaView
from orchestrator.control.decisions.rollout_step import DesiredModel, Situation, compute_goal
from orchestrator.messages.replica_states import State
from placements.facts.core_range import CoreRange
from placements.facts.topology import TOPOLOGIES, Host
from placements.spec.schema import ModelSpec, Spec
from tests.orchestrator.fakes import FakeCluster, Played

HOST = "inf2.24xlarge/0"
SPEC = """\
version: 1
name: test
hosts: {emulate: inf2.24xlarge}
defaults: {engine: echo}
models:
  small: {source: ./none, replicas: {min: 0, max: 3}}
  big: {source: ./none, tp_degree: 8, replicas: {min: 0, max: 1}}
"""


async def scattered(home: Path, cluster: FakeCluster | None = None) -> Played:
    """A host of twelve cores where small replicas run on 0 and 8, so that no eight in a row are free."""
    fleet = Played(home, cluster or FakeCluster(), SPEC)
    await fleet.__aenter__()
    for closed, count in (("1-11", 1), ("0-7", 2)):
        await fleet.operator.cordon(HOST, closed, True, "tester")
        await fleet.operator.scale("small", count, "tester")
        await fleet.until(lambda count=count: len(fleet.ready("small")) == count, "small ones are ready")  # type: ignore[misc]
        await fleet.operator.cordon(HOST, closed, False, "tester")
    assert [replica["cores"] for replica in fleet.ready("small")] == ["0", "8"]
    return fleet


async def test_a_replica_in_the_way_moves_first(tmp_path: Path) -> None:
    """A replacement is ready on other cores before it stops; then the big one takes the cores."""
    fleet = await scattered(tmp_path)
    served: list[int] = []

    def done() -> bool:
        served.append(len(fleet.ready("small")))
        return bool(fleet.ready("big"))

    try:
        await fleet.operator.scale("big", 1, "tester")
        await fleet.until(done, "the big one is ready")
        assert min(served) == 2
        assert fleet.ready("big")[0]["cores"] == "0-7"
        assert sorted(replica["cores"] for replica in fleet.ready("small")) in (["10", "8"], ["11", "8"], ["8", "9"])
        assert fleet.happened().count("MakingRoom") == 1
    finally:
        await fleet.__aexit__()


async def test_nothing_moves_if_it_would_not_help(tmp_path: Path) -> None:
    """With a core of each half cordoned, no eight contiguous cores are possible, and the running replicas stay."""
    fleet = await scattered(tmp_path)
    try:
        await fleet.operator.cordon(HOST, "4", True, "tester")
        await fleet.operator.scale("big", 1, "tester")
        before: Any = [(replica["id"], replica["cores"]) for replica in fleet.ready("small")]
        await fleet.operator.scale("small", 3, "tester")
        await fleet.until(lambda: len(fleet.ready("small")) == 3, "a third small one is ready")
        assert [(replica["id"], replica["cores"]) for replica in fleet.ready("small")][:2] == before
        assert "MakingRoom" not in fleet.happened()
    finally:
        await fleet.__aexit__()


async def test_room_is_made_once_a_core_is_usable_again(tmp_path: Path) -> None:
    """It was not possible before, and no replica has changed since."""
    fleet = await scattered(tmp_path)
    try:
        await fleet.operator.cordon(HOST, "4", True, "tester")
        await fleet.operator.scale("big", 1, "tester")
        await fleet.until(lambda: fleet.controller.state.goal.plan.unplaced, "it finds no place")
        await fleet.operator.cordon(HOST, "4", False, "tester")
        await fleet.until(lambda: fleet.ready("big"), "the big one is ready")
    finally:
        await fleet.__aexit__()


def view(model: str, replica: int, cores: str) -> ReplicaView:
    """A ready replica on the host of 24 cores."""
    return ReplicaView(model, replica, 1, "inf2.48xlarge/0", CoreRange.parse(cores), State.READY, 0.0, version="v")


def test_no_replica_moves_onto_cores_that_others_must_free_first() -> None:
    """The 4 in the way would need the cores of two others, which still run."""
    models = (
        ModelSpec(name="four", source="./m", tp_degree=4),
        ModelSpec(name="one", source="./m", replicas=3),  # type: ignore[arg-type]
        ModelSpec(name="pinned", source="./m", tp_degree=8, cores=("16-23",)),
        ModelSpec(name="big", source="./m", tp_degree=8),
    )
    host = Host("inf2.48xlarge/0", TOPOLOGIES["inf2.48xlarge"], (0, 1), emulated=True)
    views = (
        view("four", 0, "0-3"),
        *(view("one", i, cores) for i, cores in enumerate(("8", "9", "12"))),
        view("pinned", 0, "16-23"),
    )
    desired_models = {model.name: DesiredModel(model, model.replicas.min, "v") for model in models}
    situation = Situation(Spec(models=models), (host,), {}, desired_models, views)
    assert len(compute_goal(situation, moves=4).plan.moves) == 2
    assert find_relocation(situation, compute_goal(situation)) is None
