"""What the controller does about a failure that says more than that it failed, on a fake cluster."""

from __future__ import annotations

import asyncio
import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from orchestrator.control.decisions.replica_view import BREAKER_PAUSE_S, MAX_REFUSALS, ReplicaView
from orchestrator.control.host_conditions import SET_ASIDE_S, cores_of_devices
from orchestrator.control.journal.journal import Journal
from orchestrator.messages.replica_states import State
from orchestrator.messages.route_table import ModelRoutes
from placements.facts.core_range import CoreRange
from placements.facts.topology import TOPOLOGIES, Host
from tests.orchestrator.fakes import FakeCluster, Played, settled_fleet, starting_fleet, virtually
from workers.messages.status import Failure, Phase, Reaction, ServerLoad

SPEC = """\
version: 1
name: test
hosts: {emulate: inf2.48xlarge}
defaults: {engine: echo}
models:
  a: {tp_degree: 4}
  b: {tp_degree: 1, replicas: 2}
"""
PINNED = SPEC.replace("a: {tp_degree: 4}", 'a: {tp_degree: 4, cores: ["0-3"]}')
HOST = "inf2.48xlarge/0"
TAKEN = Failure("cores-taken", "nc0-nc3 were requested", "end it", Reaction.ELSEWHERE, held=True)
REFUSED = Failure("cores-taken", "nc0-nc3 were requested", "end it", Reaction.ELSEWHERE)
BROKEN = Failure("memory-uncorrectable", "bad memory", "replace it", Reaction.QUARANTINE)
FULL = Failure("hbm-exhausted", "the cores' memory is full", "lower max_batch", Reaction.STOP)


async def fails(fleet: Played, name: str, failure: Failure) -> None:
    await fleet.cluster.replicas[name].report(phase=Phase.FAILED, failure=failure)


def quarantine(fleet: Played) -> dict[int, str | None]:
    return {core["core"]: core["cause"] for core in fleet.host()["quarantine"]}


@settled_fleet(SPEC)
async def test_cores_that_the_runtime_refuses_are_not_used_for_a_while(fleet: Played) -> None:
    """The same start goes elsewhere at once, and after a while the cores are tried again."""
    before = fleet.replica("a/0")["cores"]
    await fails(fleet, "a/0.1", TAKEN)
    await fleet.until(lambda: fleet.replica("a/0").get("epoch") == 2 and fleet.ready("a"), "elsewhere")

    assert (before, fleet.replica("a/0")["cores"]) == ("0-3", "8-11")
    assert quarantine(fleet) == dict.fromkeys(range(4), str(TAKEN))
    assert fleet.host()["quarantined"] == 4
    assert "CoresSetAside" in fleet.happened()


@settled_fleet(PINNED)
async def test_a_pinned_replica_waits_for_its_cores_with_a_reason(fleet: Played) -> None:
    """It cannot move: it is retried when the cores are usable."""
    begun = fleet.controller.state.clock()
    await fails(fleet, "a/0.1", TAKEN)
    await fleet.until(lambda: not fleet.model("a")["replicas"], "it has no place", 30.0)
    reason = fleet.model("a")["reason"]
    await fleet.until(lambda: fleet.replica("a/0").get("state") == "ready", "ready again", 600.0)
    assert SET_ASIDE_S <= fleet.controller.state.clock() - begun < SET_ASIDE_S + 5.0
    assert "0-3" in reason
    assert "withheld" in reason
    assert (fleet.replica("a/0")["cores"], quarantine(fleet)) == ("0-3", {})


@starting_fleet(SPEC, loads=False)
async def test_refused_cores_that_no_process_holds_are_retried_before_they_are_set_aside(fleet: Played) -> None:
    """The retries follow after 1, 2, 4 and 8 s and are not failures. Only then does the replica start elsewhere."""
    at: list[float] = []
    for epoch in range(1, MAX_REFUSALS + 2):
        await fleet.until(lambda name=f"a/0.{epoch}": name in fleet.cluster.replicas, "requested")  # type: ignore[misc]
        at.append(fleet.controller.state.clock())
        assert (fleet.replica("a/0")["cores"], fleet.replica("a/0")["failures"], quarantine(fleet)) == ("0-3", 0, {})
        await fails(fleet, f"a/0.{epoch}", REFUSED)
    await fleet.until(lambda: f"a/0.{MAX_REFUSALS + 2}" in fleet.cluster.replicas, "elsewhere")
    assert [round(later - before) for before, later in pairwise(at)] == [1, 2, 4, 8]
    assert fleet.replica("a/0")["cores"] == "8-11"
    assert set(quarantine(fleet)) == set(range(4))


def test_refusals_are_counted_on_the_same_cores_until_the_replica_serves() -> None:
    """Each place gets all of its attempts, and so does a replica that has served since."""
    cores = CoreRange(0, 3)
    view = ReplicaView("a", 0, 2, HOST, cores, State.FAILED, 0.0, refusals=MAX_REFUSALS)
    again = ReplicaView("a", 0, 3, HOST, cores, State.PENDING, 1.0)
    elsewhere = dataclasses.replace(again, cores=CoreRange(4, 7))
    assert again.following(view).refusals == MAX_REFUSALS
    assert elsewhere.following(view).refusals == 0
    assert dataclasses.replace(view, refusals=2).refusals_after(REFUSED) == 3
    assert view.refusals_after(REFUSED) == 0
    assert dataclasses.replace(view, served=True).refusals_after(REFUSED) == 1


@settled_fleet(PINNED)
async def test_a_replica_that_served_gets_cores_back_that_are_free_late(fleet: Played) -> None:
    """Its machine is full: cores that were set aside would leave it without a place for two minutes."""
    begun = fleet.controller.state.clock()
    await fails(fleet, "a/0.1", REFUSED)
    await fleet.until(lambda: fleet.replica("a/0").get("epoch") == 2 and fleet.ready("a"), "ready again", 10.0)
    assert fleet.controller.state.clock() - begun < 5.0
    assert "CoresSetAside" not in fleet.happened()


@settled_fleet(SPEC)
async def test_a_faulty_device_is_quarantined_completely_and_its_replica_moves(fleet: Played) -> None:
    """A replica of one core also takes the device's other core out; a replica running there continues."""
    where = {id: fleet.replica(id)["cores"] for id in ("b/0", "b/1")}
    assert where == {"b/0": "4", "b/1": "5"}  # the two cores of one device
    await fails(fleet, "b/0.1", BROKEN)
    await fleet.until(lambda: fleet.replica("b/0").get("cores") == "6", "elsewhere")
    await fleet.until(lambda: fleet.replica("b/0")["state"] == "ready", "ready")

    assert quarantine(fleet) == {4: str(BROKEN), 5: str(BROKEN)}
    assert (fleet.replica("b/1")["cores"], fleet.replica("b/1")["restarts"]) == ("5", 0)
    host = fleet.host()
    assert host["leased"] + host["free"] + host["quarantined"] == host["cores"]
    (event,) = [event for event in fleet.journal.events() if event.reason == "CoreQuarantined"]
    assert f"cores 4-5 are quarantined until `corewright uncordon {HOST}`: {BROKEN}" in event.message


@pytest.mark.parametrize(
    ("named", "cores"), [((1,), {2, 3}), ((0, 1), {0, 1, 2, 3}), ((), {0, 1, 2, 3}), ((7,), {0, 1, 2, 3})]
)
def test_only_the_devices_of_the_fault_are_quarantined(named: tuple[int, ...], cores: set[int]) -> None:
    """As far as the replica uses them; else all devices that it uses."""
    host = Host("h", TOPOLOGIES["inf2.48xlarge"], (0, 1))
    assert cores_of_devices(host, range(4), named) == cores


@settled_fleet(SPEC)
async def test_an_operator_lifts_a_quarantine(fleet: Played) -> None:
    """With `uncordon`, for some cores or the host; time alone does not."""
    await fails(fleet, "a/0.1", BROKEN)
    await fleet.until(lambda: len(quarantine(fleet)) == 4, "quarantined")
    await fleet.operator.cordon(HOST, "0-1", False, "tester")
    assert set(quarantine(fleet)) == {2, 3}
    await fleet.operator.cordon(HOST, None, False, "tester")
    assert quarantine(fleet) == {}


def test_a_quarantine_has_no_time_limit(tmp_path: Path) -> None:
    """A faulty device is never retried automatically."""

    async def play() -> dict[int, str | None]:
        async with Played(tmp_path, FakeCluster(), SPEC) as fleet:
            await fleet.settled()
            await fails(fleet, "a/0.1", BROKEN)
            await asyncio.sleep(3000.0)
            return quarantine(fleet)

    assert set(virtually(play)) == {0, 1, 2, 3}


def test_a_restarted_controller_remembers_faults_and_a_new_fleet_retries(tmp_path: Path) -> None:
    """By the journal: the machine may have been repaired between two fleets, but hardly between two controllers."""

    async def play() -> list[list[int]]:
        journal, cluster = Journal(None, clock=asyncio.get_running_loop().time), FakeCluster()
        async with Played(tmp_path, cluster, SPEC, journal=journal) as fleet:
            await fleet.settled()
            await fails(fleet, "a/0.1", BROKEN)
            await fails(fleet, "b/0.1", TAKEN)
            await asyncio.sleep(30.0)
            quarantines = [sorted(quarantine(fleet))]
        async with Played(tmp_path, cluster, SPEC, journal=journal) as fleet:
            await fleet.settled()
            quarantines.append(sorted(quarantine(fleet)))
        async with Played(tmp_path, FakeCluster(), SPEC, journal=journal, fleet="another") as fleet:
            await fleet.settled()
            quarantines.append(sorted(quarantine(fleet)))
        return quarantines

    assert virtually(play) == [[0, 1, 2, 3, 4], [0, 1, 2, 3], []]


@starting_fleet(SPEC, loads=False)
async def test_a_permanent_error_is_not_retried(fleet: Played) -> None:
    """No pause leads to another try; status shows it, and the model is failed, not loading."""
    await fleet.until(lambda: "a/0.1" in fleet.cluster.replicas, "requested")
    await fails(fleet, "a/0.1", FULL)
    await asyncio.sleep(3000.0)
    replica, model = fleet.replica("a/0"), fleet.model("a")
    assert [config.run.epoch for config in fleet.cluster.configs("a")] == [1]
    assert (replica["state"], replica["stopped"], replica["pause_s"]) == ("failed", True, None)
    assert replica["reason"] == "hbm-exhausted: the cores' memory is full (lower max_batch)"
    assert model["state"] == "failed"
    assert [c["reason"] for c in model["conditions"] if c["type"] == "Healthy"] == ["Stopped"]


@pytest.mark.parametrize("ask", ["apply", "apply-other", "restart", "drain"])
def test_a_stopped_replica_is_retried_on_request(ask: str, tmp_path: Path) -> None:
    """By a changed spec, for any model, or an operator's command."""

    async def play() -> Any:
        cluster = FakeCluster()
        cluster.loads = False
        async with Played(tmp_path, cluster, SPEC) as fleet:
            await fleet.until(lambda: len(cluster.replicas) == 3, "requested")
            await fails(fleet, "a/0.1", FULL)
            await fleet.until(lambda: fleet.replica("a/0")["state"] == "failed", "failed")
            await asyncio.sleep(1000.0)
            cluster.loads = True
            if ask == "apply":
                await fleet.apply(SPEC.replace("tp_degree: 4", "tp_degree: 4, max_batch: 2"))
            elif ask == "apply-other":
                await fleet.apply(SPEC.replace("replicas: 2", "replicas: 1"))
            elif ask == "restart":
                await fleet.operator.restart("a", "tester")
            else:
                await fleet.operator.drain("a/0", "tester")
            await fleet.until(lambda: len(fleet.ready("a")) == len(fleet.model("a")["replicas"]) > 0, "ready", 60.0)
            return {replica["stopped"] for replica in fleet.model("a")["replicas"]}

    assert virtually(play) == {False}


@settled_fleet(SPEC)
async def test_an_update_that_can_never_start_is_rolled_back_at_once(fleet: Played) -> None:
    """Not after as many tries as a transient cause."""
    other = SPEC.replace("tp_degree: 4", "tp_degree: 4, max_batch: 64")
    fleet.cluster.loads = False
    await fleet.apply(other)
    await fleet.until(lambda: len(fleet.cluster.configs("a")) == 2, "the new one is asked for")
    fleet.cluster.loads = True
    new = fleet.cluster.configs("a")[-1]
    await fails(fleet, f"a/{new.place.replica}.{new.run.epoch}", FULL)
    await fleet.settled()
    assert fleet.journal.state().outcomes[2].state == "rolled_back"
    assert [config.model.max_batch for config in fleet.cluster.configs("a")].count(64) == 1


def test_the_last_log_lines_of_a_dead_replica_are_its_failure(tmp_path: Path) -> None:
    """The runtime aborts the process, so only the log has the cause. Only a Neuron engine's log is read."""
    spec = SPEC.replace("emulate", "instance").replace(
        "a: {tp_degree: 4}", "a: {tp_degree: 4, source: ./none, engine: nxd-inference, max_len: 128}"
    )

    async def play() -> tuple[Any, Any]:
        from tests.orchestrator.control.resolve.test_resolve_engine import NXDI  # an interpreter that holds the engine

        cluster = FakeCluster()
        cluster.interpreters[None] = NXDI
        cluster.log_faults = {"a-0.log": BROKEN, "b-0.log": BROKEN}
        async with Played(tmp_path, cluster, spec, instance="inf2.48xlarge") as fleet:
            await fleet.settled()
            await cluster.replicas["b/0.1"].die("killed by signal 6")
            await cluster.replicas["a/0.1"].die("killed by signal 6")
            await fleet.until(lambda: fleet.replica("a/0").get("cores") == "4-7", "elsewhere")
            failed = [event.message for event in fleet.journal.events() if event.reason == "Failed"]
            return failed, quarantine(fleet)

    failed, withheld = virtually(play)
    assert failed == [
        "replica-died: killed by signal 6",
        "memory-uncorrectable: bad memory; killed by signal 6 (replace it)",
    ]
    assert set(withheld) == {0, 1, 2, 3}


def test_stale_reports_about_a_dead_replica_do_not_block_its_cores(tmp_path: Path) -> None:
    """The tools refresh every 10 s: for a while they list a process of ours that is gone."""

    async def play() -> tuple[Any, int]:
        cluster = FakeCluster()
        async with Played(tmp_path, cluster, PINNED) as fleet:
            await fleet.settled()
            old = fleet.replica("a/0")["pid"]
            cluster.held = dict.fromkeys(range(4), old)
            await cluster.replicas["a/0.1"].die("killed by signal 9")
            await fleet.until(lambda: fleet.replica("a/0")["epoch"] == 2, "started again")
            await asyncio.sleep(10.0)
            meanwhile = (fleet.replica("a/0")["state"], fleet.replica("a/0")["cores"], quarantine(fleet))
            await asyncio.sleep(60.0)  # a process that has taken the pid, and holds them really
            return meanwhile, len(quarantine(fleet))

    (meanwhile, after) = virtually(play)
    assert meanwhile == ("ready", "0-3", {})
    assert after == 4


@settled_fleet(SPEC)
async def test_a_server_that_queues_is_reported_once(fleet: Played) -> None:
    """As an event when it begins, and in the status as long as it lasts."""
    replica = fleet.cluster.replicas["a/0.1"]
    assert fleet.replica("a/0")["server"] is None
    for kv_usage in (0.98, 0.99):
        await replica.report(server=ServerLoad(kv_usage, 3, 7, queues=True))
        seen = lambda usage=kv_usage: (fleet.replica("a/0")["server"] or {}).get("kv_usage") == usage  # noqa: E731
        await fleet.until(seen, "it is in the status")

    (event,) = [event for event in fleet.journal.events() if event.reason == "ServerQueues"]
    assert "queues 3 requests although slots are free" in event.message
    assert fleet.replica("a/0")["server"] == {"kv_usage": 0.99, "waiting": 3, "preemptions": 7, "queues": True}


@starting_fleet("hosts: {emulate: inf2.xlarge}\nmodels: {m: {engine: echo, scaling: {hold_s: 30}}}\n", load_s=2.0)
async def test_requests_are_held_for_a_replica_that_comes_back_within_the_hold_time(played: Played) -> None:
    """Also in the pauses after the second kill and later ones; not for a version that has never served."""

    def route() -> ModelRoutes:
        return played.controller.routes().models[0]

    assert not route().holds
    await played.settled()
    for kill in range(1, 5):
        await played.cluster.find("m/0").die("killed")
        await played.until(lambda: not route().replicas, "it is gone", 5)
        assert route().holds, kill
        assert route().required
        await played.settled()
    played.cluster.broken[played.controller.state.current.versions["m"]] = Failure("x", "broken")
    await played.cluster.find("m/0").die("killed")
    await played.until(lambda: played.replica("m/0")["pause_s"] == BREAKER_PAUSE_S, "the breaker is open", 600)
    assert not route().holds
