"""The families of a fleet that is played: models, requests, a strange core, devices, a certificate."""

from __future__ import annotations

import asyncio
from pathlib import Path

from orchestrator.gateway.telemetry.gateway_metrics import GatewayMetrics, ModelSnapshot, ReplicaSnapshot, Vitals
from orchestrator.scaling.demand_report import DemandReport, DemandWindow
from tests.orchestrator.fakes import FakeCluster, Played
from workers.host.device_metrics import Sums, device_families
from workers.host.facts.neuron_monitor import parse_neuron_monitor
from workers.messages.metric_family import MetricFamily, joined, labelled
from workers.messages.status import Failure, ServerLoad

SAMPLE = Path(__file__).parents[1] / "workers" / "samples" / "neuron-monitor-inf2.48xlarge.jsonl"
HOST = "inf2.48xlarge/0"
SPEC = """\
version: 1
name: test
hosts: {emulate: inf2.48xlarge}
defaults: {engine: echo}
models:
  chat: {source: ./none, tp_degree: 8}
  small: {source: "s3://models/small", engine: cpu, tp_degree: 2, replicas: 2}
"""


def gateway_families() -> list[MetricFamily]:
    """Of a gateway that has served some requests and refused others."""
    metrics = GatewayMetrics()
    for replica in (0, 1):
        small = metrics.model("small", replica)
        small.first_token(0.2, 0.1, 0.1)
        small.token(0.01)
        small.ended("stop", 10, 2, 0.3, 0.01)
        small.ended("error", 10, 2, 0.3, 0.01)
    metrics.model("vectors", 0).encoded(3, 0.2, 0.1, 0.1)
    metrics.overhead.observe(0.0002)
    metrics.unknown(["messages.x_new"])
    metrics.refused("small", 429, "queue_full")
    metrics.refused("small", 503, "unavailable")
    metrics.refused(None, 401, "invalid_api_key")
    metrics.retried("small", "lost")
    snapshot = [
        ModelSnapshot("chat", 0, [ReplicaSnapshot(0, 1, 8, 100, 4096)]),
        ModelSnapshot("small", 2, [ReplicaSnapshot(n, 1, 8, 100, 4096) for n in (0, 1)]),
        ModelSnapshot("vectors", 0, [ReplicaSnapshot(0, 1, 64, 100, 0)], encodes=True),
    ]
    vitals = Vitals(connections=3, keys=2, keys_in_use=1, certificate_expires=1.9e9, controller_age_s=0.2)
    return metrics.families(snapshot, vitals)


def devices() -> list[MetricFamily]:
    """Of a host with devices, as neuron-monitor tells of them, with the latency of an execution."""
    sums = Sums()
    line = SAMPLE.read_text().splitlines()[1]
    sample = parse_neuron_monitor(
        line.replace('"total_latency": null', '"total_latency": {"p50": 0.01, "p99": 0.02}', 1)
    )
    sums.add(sample)
    return [labelled(family, "host", HOST) for family in device_families(sample, sums)]


async def played_families(home: Path) -> list[MetricFamily]:
    """Every family that a fleet can tell, each with at least one series."""
    cluster = FakeCluster()
    cluster.held = {23: 4711}
    async with Played(home, cluster, SPEC) as fleet:
        await fleet.until(lambda: fleet.host()["quarantined"] == 1, "the strange core is seen")
        await fleet.settled()
        await cluster.replicas["chat/0.1"].report(server=ServerLoad(0.5, 1, 2))
        cluster.store.clear()
        cluster.unfetchable["s3://models/small"] = Failure("s3-unreachable", "nobody answers")
        await cluster.replicas["small/1.1"].die("killed by signal 9")
        await fleet.until(lambda: fleet.replica("small/1").get("restarts") == 1, "started again, without its model")
        cluster.unfetchable.clear()
        cluster.loads = False  # from now on a start goes on for ever
        await fleet.until(lambda: fleet.replica("small/1").get("restarts") == 2, "started once more")
        models = [DemandWindow(model="chat", arrived=1, live=1), DemandWindow(model="small", arrived=3, waiting=2)]
        await fleet.controller.demand(DemandReport(gateway="g", number=1, seconds=1.0, models=models))
        await asyncio.sleep(0)
        return joined([*gateway_families(), *await fleet.controller.metrics(), *devices()])
