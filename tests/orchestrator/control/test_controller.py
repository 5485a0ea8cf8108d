"""The controller's loop over a fake cluster: what it starts, what it hears, what it says."""

from __future__ import annotations

import asyncio
from pathlib import Path

from orchestrator.messages.replica_states import Signal
from tests.orchestrator.fakes import DEADLINE_S, FakeCluster, Played, settled_fleet, starting_fleet
from workers.messages.status import Failure, Phase, Reaction

SPEC = """\
version: 1
name: test
hosts: {emulate: inf2.48xlarge}
defaults: {engine: echo}
models:
  a: {source: ./none, tp_degree: 8, cores: ["0-7"]}
  b: {source: ./none, tp_degree: 2, replicas: 2}
  c: {source: ./none, replicas: {min: 0, max: 1}}
"""


def running(home: Path, cluster: FakeCluster | None = None) -> Played:
    """A controller at work."""
    return Played(home, cluster or FakeCluster(), SPEC)


@settled_fleet(SPEC)
async def test_every_min_replica_is_started_on_its_cores(fleet: Played) -> None:
    """The fleet becomes ready with each replica on the planned cores, and `min: 0` starts nothing."""
    assert {(c.model.name, c.place.replica, c.place.env["NEURON_RT_VISIBLE_CORES"]) for c in fleet.cluster.started} == {
        ("a", 0, "0-7"),
        ("b", 0, "8-9"),
        ("b", 1, "10-11"),
    }
    assert [model.state for model in fleet.controller.status().models] == ["ready", "ready", "unloaded"]


@starting_fleet(SPEC, held={23: 4711})
async def test_leased_free_and_quarantined_cores_are_all_cores(fleet: Played) -> None:
    """The three numbers of a host add up to its cores, with a core of a foreign process counted once."""
    await fleet.until(lambda: fleet.host()["quarantined"] == 1, "the strange core is seen")
    await fleet.until(lambda: fleet.controller.status().ready, "ready")

    host = fleet.host()
    assert (host["leased"], host["free"], host["quarantined"]) == (12, 11, 1)
    assert host["leased"] + host["free"] + host["quarantined"] == host["cores"] == 24


@settled_fleet(SPEC)
async def test_a_dead_replica_restarts_on_the_same_cores_with_the_next_epoch(fleet: Played) -> None:
    """The death of its process is confirmed first; the others are not affected."""
    await fleet.cluster.replicas["b/1.1"].die("killed by signal 9")
    await fleet.until(lambda: fleet.replica("b/1")["restarts"] == 1, "started again")
    await fleet.until(lambda: fleet.replica("b/1")["state"] == "ready", "ready again")

    first, second = [c for c in fleet.cluster.configs("b") if c.place.replica == 1]
    assert (first.place.cores, first.run.epoch) == ([10, 11], 1)
    assert (second.place.cores, second.run.epoch) == ([10, 11], 2)
    assert fleet.cluster.ended == ["b/1.1"]
    assert fleet.replica("a/0")["restarts"] == 0


@settled_fleet(SPEC)
async def test_requests_wait_for_a_replica_that_died_in_service(fleet: Played) -> None:
    """A model whose only replica died is loading, not failed: the gateway keeps requests that can still be answered."""
    states: list[str] = []

    def died() -> bool:
        states.append(fleet.controller.routes().models[0].state.value)
        return bool(fleet.replica("a/0")["restarts"] == 1 and fleet.replica("a/0")["state"] == "ready")

    await fleet.cluster.replicas["a/0.1"].die("killed by signal 9")
    await fleet.until(died, "ready again")

    assert "loading" in states
    assert "failed" not in states


@starting_fleet(SPEC, loads=False)
async def test_a_replica_that_cannot_start_shows_its_cause_and_its_last_log_lines(fleet: Played) -> None:
    """The cause comes with its remedy; the other models serve."""
    await fleet.until(lambda: len(fleet.cluster.replicas) == 3, "all asked for")
    await fleet.cluster.replicas["a/0.1"].report(
        phase=Phase.FAILED, failure=Failure("weights-missing", "no safetensors", "convert it")
    )
    for name in ("b/0.1", "b/1.1"):
        await fleet.cluster.replicas[name].report(phase=Phase.READY)
    await fleet.until(lambda: fleet.replica("a/0")["log"], "the log is read")

    failed = fleet.replica("a/0")
    assert failed["reason"] == "weights-missing: no safetensors (convert it)"
    assert failed["log"] == ["the end of a-0.log"]
    assert [model.state for model in fleet.controller.status().models] == ["failed", "ready", "unloaded"]
    assert not fleet.controller.status().ready


@settled_fleet(SPEC)
async def test_a_failed_replica_has_no_requests(fleet: Played) -> None:
    """Its last report of slots and queue no longer applies."""
    await fleet.cluster.find("a/0").report(live=3, waiting=1, version=5)
    await fleet.until(lambda: fleet.replica("a/0")["live"] == 3, "it works")
    failure = Failure("device-failed", "it is broken", reaction=Reaction.STOP)
    await fleet.cluster.find("a/0").report(phase=Phase.FAILED, failure=failure)
    await fleet.until(lambda: fleet.replica("a/0")["state"] == "failed", "it fails")

    assert (fleet.replica("a/0")["live"], fleet.replica("a/0")["waiting"]) == (0, 0)


@starting_fleet(SPEC, refuses_start=ValueError("no such resource nc0"))
async def test_a_start_that_ray_rejects_is_a_failure_with_its_cause(fleet: Played) -> None:
    """An effect that raises does not leave the replica pending forever."""
    await fleet.until(lambda: fleet.replica("a/0").get("state") == "failed", "failed")

    assert fleet.replica("a/0")["reason"] == "start-failed: ValueError: no such resource nc0"


@settled_fleet(SPEC)
async def test_a_model_with_min_0_is_started_by_the_first_request(fleet: Played) -> None:
    """`wake` starts one replica; a second call changes nothing."""
    await fleet.controller.wake("c")
    await fleet.controller.wake("c")
    await fleet.until(lambda: fleet.replica("c/0").get("state") == "ready", "woken")

    assert len(fleet.cluster.configs("c")) == 1
    assert [route.id for route in fleet.controller.routes().models[2].replicas] == ["c/0"]


async def test_a_restarted_controller_adopts_the_live_replicas(tmp_path: Path) -> None:
    """Nothing is restarted, the routes are the same, and the next start has the next epoch."""
    cluster = FakeCluster()
    async with running(tmp_path, cluster) as first:
        await first.until(lambda: first.controller.status().ready, "ready")
        await first.controller.wake("c")
        await first.until(lambda: first.replica("c/0").get("state") == "ready", "woken")
        before = first.controller.routes()
    async with Played(tmp_path, cluster, SPEC, journal=first.journal, restarted=True) as second:
        await second.until(lambda: second.controller.status().ready, "adopted")

        assert len(cluster.started) == 4
        assert second.controller.routes() == before
        await cluster.replicas["a/0.1"].die("killed")
        await second.until(lambda: second.replica("a/0")["state"] == "ready" and len(cluster.started) == 5, "again")
        assert cluster.started[-1].run.epoch == 2


async def test_the_age_of_an_adopted_start_does_not_depend_on_the_clock_of_its_machine(tmp_path: Path) -> None:
    """Which may have booted long after that of the controller."""
    cluster = FakeCluster()
    cluster.loads = False
    async with running(tmp_path, cluster) as first:
        await first.until(lambda: "a/0.1" in cluster.replicas, "a start")
        await cluster.replicas["a/0.1"].report(started=-1e6, age_s=5.0)
    async with Played(tmp_path, cluster, SPEC, journal=first.journal, restarted=True) as second:
        await second.until(lambda: second.replica("a/0").get("state") == "loading", "adopted")
        state = second.controller.state

        assert 5.0 <= state.clock() - state.views["a/0"].begun < 100.0


@settled_fleet(SPEC)
async def test_shutdown_drains_and_stops_every_replica(fleet: Played) -> None:
    """Nothing is started meanwhile, and nothing is left."""
    await fleet.controller.shutdown(1.0)

    names = {"a/0.1", "b/0.1", "b/1.1"}
    assert set(fleet.cluster.drained) == set(fleet.cluster.ended) == names
    assert fleet.controller.routes().stopping
    assert all(not model.replicas for model in fleet.controller.routes().models)


@starting_fleet(SPEC, held={8: 4711, 3: 4711})
async def test_a_core_of_a_foreign_process_is_not_assigned_to_a_replica(fleet: Played) -> None:
    """The planner places unpinned replicas elsewhere, and a pinned one waits with the reason."""
    await fleet.until(lambda: fleet.replica("b/1").get("state") == "ready", "placed elsewhere")

    assert {tuple(c.place.cores) for c in fleet.cluster.configs("b")} == {(10, 11), (12, 13)}
    assert fleet.cluster.configs("a") == []
    model = fleet.controller.status().models[0]
    assert model.state == "failed"
    assert "3" in (model.reason or "")
    fleet.cluster.held = {}
    await fleet.until(lambda: fleet.replica("a/0").get("state") == "ready", "placed when the core is free")


@settled_fleet(SPEC)
async def test_reports_of_an_old_epoch_are_ignored(fleet: Played) -> None:
    """A late report of a replaced start does not change the state of its successor."""
    cluster = fleet.cluster
    old = cluster.replicas["b/0.1"]
    cluster.late = asyncio.Event()
    await old.die("killed")  # heard by the watch that is under way only after the new start
    fleet.controller.table.signal(fleet.controller.state.views["b/0"], Signal.FAILED, "seen elsewhere")
    await fleet.until(lambda: fleet.replica("b/0")["restarts"] == 1, "started again")
    await fleet.until(lambda: fleet.replica("b/0")["state"] == "ready", "ready again")

    cluster.late.set()
    for _ in range(20):
        await asyncio.sleep(0)

    assert fleet.replica("b/0")["state"] == "ready"
    assert fleet.replica("b/0")["restarts"] == 1


@starting_fleet(SPEC, loads=False)
async def test_the_cause_and_the_log_stay_until_the_replica_is_ready(fleet: Played) -> None:
    """During the next start, `status` still shows why the last one failed."""
    await fleet.until(lambda: "a/0.1" in fleet.cluster.replicas, "asked for")
    await fleet.cluster.replicas["a/0.1"].report(
        phase=Phase.FAILED, failure=Failure("weights-missing", "no safetensors")
    )
    await fleet.until(lambda: "a/0.2" in fleet.cluster.replicas, "the second start")
    await fleet.cluster.replicas["a/0.2"].report(phase=Phase.LOADING)
    await fleet.until(lambda: fleet.replica("a/0")["state"] == "loading", "it loads")

    assert fleet.replica("a/0")["reason"] == "weights-missing: no safetensors"
    assert fleet.replica("a/0")["log"] == ["the end of a-0.log"]
    await fleet.cluster.replicas["a/0.2"].report(phase=Phase.READY)
    await fleet.until(lambda: fleet.replica("a/0")["state"] == "ready", "ready")
    assert (fleet.replica("a/0")["reason"], fleet.replica("a/0")["log"]) == (None, [])


async def test_no_routes_are_published_before_the_live_replicas_are_adopted(tmp_path: Path) -> None:
    """A restarted controller publishes nothing rather than wrong routes."""
    async with running(tmp_path) as first:
        await first.until(lambda: first.controller.status().ready, "ready")
        cluster = first.cluster
    fresh = running(tmp_path, cluster)
    change = asyncio.create_task(fresh.controller.change(0, 0.01))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not change.done()

    task = asyncio.create_task(fresh.controller.run())
    await asyncio.wait_for(change, DEADLINE_S)

    assert [len(model.replicas) for model in fresh.controller.routes().models] == [1, 2, 0]
    task.cancel()


@settled_fleet(SPEC, unadoptable={"a/0": 4})
async def test_an_unresponsive_replica_is_restarted_with_the_next_epoch(fleet: Played) -> None:
    """Its name is never used twice, although it could not be adopted."""
    assert [config.run.epoch for config in fleet.cluster.configs("a")] == [5]
