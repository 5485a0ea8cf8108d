"""The controller's part of /metrics."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

from orchestrator.gateway.telemetry.exposition import page
from tests.orchestrator.fakes import FakeCluster, Played, settled_fleet
from tests.orchestrator.promql import Page
from workers.messages.metric_family import gauge
from workers.messages.status import Failure, Phase, Reaction

SPEC = """\
version: 1
name: test
hosts: {emulate: inf2.48xlarge}
defaults: {engine: echo}
models:
  a: {source: ./none, tp_degree: 8, cores: ["0-7"]}
  b: {source: ./none, tp_degree: 2, replicas: 2}
"""


async def scraped(fleet: Played) -> Page:
    return Page.read(page(await fleet.controller.metrics())[0].decode())


@settled_fleet(SPEC, held={23: 4711})
async def test_the_cores_by_state_are_all_cores(fleet: Played) -> None:
    """All states add up to the cores of the host; foreign and cordoned cores are counted separately."""
    await fleet.operator.cordon("inf2.48xlarge/0", "10-11", on=True, by="tester")
    metrics = await scraped(fleet)

    host = "inf2.48xlarge/0"
    states = ("leased", "free", "cordoned", "quarantined", "reserved")
    cores = [metrics.value("corewright_cores", host=host, state=state) for state in states]
    assert cores == [12, 9, 2, 1, 0]
    assert sum(cores) == metrics.value("corewright_host_cores", host=host)
    assert metrics.value("corewright_host_up", host=host) == 1
    assert metrics.value("corewright_quarantines_total", host=host, cause="held") == 1


@settled_fleet(SPEC)
async def test_placements_loads_and_restarts_are_counted(fleet: Played) -> None:
    """Three replicas are placed and loaded; one dies, and its restart is a retry."""
    before = await scraped(fleet)
    await fleet.cluster.replicas["b/1.1"].die("killed by signal 9")
    await fleet.until(lambda: fleet.replica("b/1")["restarts"] == 1, "started again")
    await fleet.settled()
    after = await scraped(fleet)

    assert before.value("corewright_decisions_total", action="place") == 3
    assert before.value("corewright_decisions_total", action="retry") == 0
    assert before.value("corewright_load_seconds_count", model="b") == 2
    assert after.value("corewright_decisions_total", action="retry") == 1
    assert after.value("corewright_decisions_total", action="release") == 1
    assert after.value("corewright_replica_restarts_total", model="b") == 1
    died = {"model": "b", "problem": "replica-died", "phase": "serving"}
    assert after.value("corewright_replica_failures_total", **died) == 1
    assert after.value("corewright_load_seconds_count", model="b") == 3
    assert after.value("corewright_replicas", model="b", state="ready") == 2
    assert after.value("corewright_model_available", model="b") == 1


@settled_fleet(SPEC)
async def test_a_failed_load_is_counted_by_its_problem(fleet: Played) -> None:
    """With its phase, and as given up if the error is permanent."""
    failure = Failure("load-failed", "there are none", reaction=Reaction.STOP)
    fleet.cluster.loads = False
    await fleet.operator.restart("a", by="tester")
    await fleet.until(lambda: fleet.replica("a/0").get("state") in ("pending", "loading"), "it starts")
    began = await scraped(fleet)
    await asyncio.sleep(0.2)
    starting = await scraped(fleet)
    await fleet.cluster.find("a/0").report(phase=Phase.FAILED, failure=failure)
    await fleet.until(lambda: fleet.replica("a/0").get("state") == "failed", "it has failed")
    metrics = await scraped(fleet)

    seconds = [
        scrape.value("corewright_replica_starting_seconds", model="a", replica="0") for scrape in (began, starting)
    ]
    assert 0.2 <= seconds[1] - seconds[0] < 10
    failed = {"model": "a", "problem": "load-failed", "phase": "loading"}
    assert metrics.value("corewright_replica_failures_total", **failed) == 1
    assert metrics.value("corewright_replica_given_up", model="a", replica="0") == 1
    assert metrics.value("corewright_model_available", model="a") == 0


@settled_fleet(SPEC)
async def test_a_rollouts_end_is_counted_once(fleet: Played) -> None:
    """Not with every round that sees it complete."""
    await asyncio.sleep(0)
    await fleet.apply(SPEC.replace("tp_degree: 2", "tp_degree: 4"))
    await fleet.settled()
    for _ in range(3):
        fleet.controller.wake_up()
        await asyncio.sleep(0)
    metrics = await scraped(fleet)

    assert metrics.value("corewright_rollouts_total", state="complete") == 2
    assert metrics.value("corewright_rollout_state", state="complete") == 1
    assert metrics.value("corewright_rollout_state", state="progressing") == 0
    assert metrics.value("corewright_journal_revision") == 2
    assert metrics.value("corewright_controller_round_seconds_count") > 2
    assert metrics.value("corewright_condition", type="CoresAddUp") == 1


@settled_fleet(SPEC)
async def test_a_replicas_counters_are_exported(fleet: Played) -> None:
    """As last reported; a removed replica has none."""
    replica = fleet.cluster.find("b/1")
    await replica.report(slots=8, live=3, steps=40, tokens=120, drafted=20, accepted=15)
    await asyncio.sleep(0.01)
    metrics = await scraped(fleet)

    of = {"model": "b", "replica": "1"}
    assert metrics.value("corewright_slots", **of) == 8
    assert metrics.value("corewright_requests_running", **of) == 3
    assert metrics.value("corewright_engine_steps_total", **of) == 40
    assert metrics.value("corewright_generation_tokens_total", **of) == 120
    assert metrics.value("corewright_spec_decode_num_draft_tokens_total", **of) == 20
    assert metrics.value("corewright_spec_decode_num_accepted_tokens_total", **of) == 15

    await fleet.apply(SPEC.replace("replicas: 2", "replicas: 1"))
    await fleet.until(lambda: len(fleet.model("b")["replicas"]) == 1, "one is gone")
    steps = (await scraped(fleet)).series["corewright_engine_steps_total"]
    assert {(labels["model"], labels["replica"]) for labels in steps} == {("a", "0"), ("b", "0")}


def on_real_hosts(fleet: Played) -> None:
    """As if its emulated hosts had devices."""
    generation = fleet.controller.state.current
    hosts = tuple(dataclasses.replace(host, emulated=False) for host in generation.hosts)
    fleet.controller.state.current = dataclasses.replace(generation, hosts=hosts)


@settled_fleet(SPEC, devices=[gauge("neuroncore_utilization_ratio", "", 0.5)])
async def test_devices_are_measured_on_real_hosts_only(fleet: Played) -> None:
    """An emulated host has no values; those of a real one have its name."""
    emulated = await scraped(fleet)
    on_real_hosts(fleet)
    real = await scraped(fleet)

    assert "neuroncore_utilization_ratio" not in emulated.series
    assert real.value("neuroncore_utilization_ratio", host="inf2.48xlarge/0") == 0.5


async def test_an_unresponsive_host_does_not_delay_the_page(tmp_path: Path) -> None:
    """The rest is exported within the deadline of a scrape."""
    cluster = FakeCluster()

    async def hang(host: str) -> None:
        await asyncio.Event().wait()

    cluster.device_metrics = hang  # type: ignore[assignment, method-assign]
    async with Played(tmp_path, cluster, SPEC) as fleet:
        await fleet.settled()
        on_real_hosts(fleet)
        metrics = await asyncio.wait_for(scraped(fleet), 1.0)

        assert metrics.value("corewright_ready") == 1
