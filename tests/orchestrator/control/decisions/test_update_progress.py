"""When an update that does not go on has failed, and how one ends that has nothing to go back to."""

from __future__ import annotations

import asyncio
from pathlib import Path

from orchestrator.control.decisions.replica_view import ReplicaView
from orchestrator.control.decisions.rollout_step import DesiredModel, Situation, compute_goal
from orchestrator.messages.replica_states import State
from placements.facts.core_range import CoreRange
from placements.facts.topology import TOPOLOGIES, Host
from placements.spec.schema import ModelSpec, Spec
from tests.orchestrator.control.decisions.test_updates import spec
from tests.orchestrator.fakes import FakeCluster, Played, play, settled_fleet, virtual

QUICK = ", update: {strategy: surge, progress_deadline_s: 60}"
PATIENT = ", deadlines: {start_s: 3600}"


@settled_fleet(spec(a=QUICK), load_s=5.0)
async def test_a_rollout_without_progress_fails_at_its_deadline(played: Played) -> None:
    """A new replica without a place: the rollout goes back after progress_deadline_s."""
    await played.apply(spec(a_batch=8, a=QUICK))
    await played.until(lambda: played.replica("a/1").get("state") == "loading", "it starts")
    await played.operator.cordon("inf2.48xlarge/0", None, True, "tester")
    await played.cluster.find("a/1").die("killed")
    await played.until(lambda: played.controller.status().revision == 3, "rolled back", 120)
    await played.settled()
    assert len(played.ready("a")) == 1
    assert "no progress for 6" in next(e.message for e in played.journal.events() if e.reason == "RolloutFailed")


@settled_fleet(spec(a=PATIENT), load_s=5.0, tick_s=30.0)
async def test_a_start_that_compiles_for_long_is_not_rolled_back(played: Played) -> None:
    """A start has its whole start_s: the deadline for progress, 900 s, does not end one of 3000 s."""
    played.cluster.load_s = 3000.0
    await played.apply(spec(a_batch=8, a=PATIENT))
    await played.settled(3100.0)
    assert played.controller.status().revision == 2
    assert played.replica("a/1")["load_s"] == 3000.0


@settled_fleet(spec(), load_s=5.0, tick_s=30.0)
async def test_compiling_is_not_part_of_the_start(played: Played) -> None:
    """The status shows for how long it has compiled, and neither start_s nor the update ends meanwhile."""
    played.cluster.load_s = 3300.0
    await played.apply(spec(a_batch=8))
    await played.until(lambda: played.replica("a/1").get("state") == "loading", "it starts")
    for compile_s in range(100, 3100, 100):  # a replica's clock cannot be ahead of the controller's
        await asyncio.sleep(100.0)
        await played.cluster.find("a/1").report(compile_s=float(compile_s))
    await played.settled(3400.0)
    assert played.controller.status().revision == 2
    assert played.replica("a/1")["failures"] == 0


def test_a_start_that_exceeds_its_deadline_is_rolled_back(tmp_path: Path) -> None:
    """A hanging start is a failure at start_s, and max_failures of them end the update."""
    patient = ", deadlines: {start_s: 3600}, update: {max_failures: 1}"

    async def story(played: Played) -> None:
        await played.settled()
        played.cluster.loads = False
        began = asyncio.get_running_loop().time()
        await played.apply(spec(a_batch=8, a=patient))
        await played.until(lambda: played.controller.status().revision == 3, "rolled back", 3700)
        assert 3600.0 < asyncio.get_running_loop().time() - began < 3640.0
        await played.settled()
        assert len(played.ready("a")) == 1
        assert "start-deadline" in next(e.message for e in played.journal.events() if e.reason == "RolloutFailed")

    play(tmp_path, spec(a=patient), story, tick_s=30.0, load_s=5.0)


@settled_fleet(spec(a=QUICK), load_s=5.0)
async def test_the_start_of_an_unchanged_model_does_not_extend_the_deadline(played: Played) -> None:
    """Only replicas that the update starts have time to start."""
    await played.apply(spec(a_batch=8, a=QUICK))
    await played.until(lambda: played.replica("a/1").get("state") == "loading", "it starts")
    await played.operator.cordon("inf2.48xlarge/0", "12-23", True, "tester")
    await played.cluster.find("a/1").die("killed")
    played.cluster.load_s = 800.0
    await played.cluster.find("b/0").die("killed")
    await played.until(lambda: played.controller.status().revision == 3, "rolled back", 120)
    assert played.replica("b/0")["state"] == "loading"


@settled_fleet(spec(a=", replicas: {min: 1, max: 3}", b_replicas=4), load_s=5.0)
async def test_replacement_continues_although_more_is_wanted_than_fits(played: Played) -> None:
    """Three are wanted and two fit: a drain and a restart keep as many as possible, and do not wait for the third."""

    def pids() -> set[int]:
        return {replica["pid"] for replica in played.ready("a")}

    await played.operator.scale("a", 3, "tester")
    await played.until(lambda: len(pids()) == 2, "two find a place", 100)
    first = pids()
    await played.operator.drain("a/0", "tester")
    await played.until(lambda: len(pids()) == 2 and len(pids() & first) == 1, "drained", 100)
    second = pids()
    await played.operator.restart("a", "tester")
    await played.until(lambda: len(pids()) == 2 and not pids() & second, "restarted", 100)


@virtual
async def test_old_replicas_do_not_wait_forever_for_new_ones_that_do_not_fit(tmp_path: Path) -> None:
    """Without a revision to return to, and three wanted where two fit: after progress_deadline_s the old one stops."""
    wide = "version: 1\nname: test\nhosts: {emulate: inf2.48xlarge}\ndefaults: {engine: echo}\nmodels:\n"
    wide += "  a: {tp_degree: DEGREE, replicas: {min: 1, max: 3}}\n  b: {tp_degree: 8}\n"
    fake = FakeCluster()
    fake.load_s = 5.0
    async with Played(tmp_path, fake, wide.replace("DEGREE", "4"), tick_s=5.0) as played:
        await played.operator.scale("a", 3, "tester")
        await played.until(lambda: len(played.controller.state.views) == 4, "all start", 10)
        await played.apply(wide.replace("DEGREE", "8"))
        await played.until(lambda: "UpdateStuck" in played.happened(), "it is stuck", 1000)
        new = played.controller.state.current.versions["a"]
        await played.until(lambda: [r["version"] for r in played.model("a")["replicas"]] == [new, new], "over", 60)
        assert fake.violations == []


def test_old_replicas_without_a_successor_stay() -> None:
    """Without a core for any new one, only the old ones serve."""
    model = ModelSpec(name="a", source="./none", tp_degree=8)
    host = Host("inf2.48xlarge/0", TOPOLOGIES["inf2.48xlarge"], cpus=(0,))
    views = tuple(
        ReplicaView("a", n, 1, host.name, CoreRange(8 * n, 8 * n + 7), State.READY, 0.0, version="old") for n in (0, 1)
    )
    wish = DesiredModel(model, 3, "new", strategy="in_place", reachable=True)
    free = Situation(Spec(models=(model,)), (host,), {}, {"a": wish}, views)
    cordoned = Situation(free.spec, free.hosts, {}, free.desired_models, views, {host.name: frozenset(range(24))})

    assert [view.replica for view in compute_goal(cordoned).steps["a"].keep] == [0, 1]
    assert compute_goal(free).plan.unplaced == ()
