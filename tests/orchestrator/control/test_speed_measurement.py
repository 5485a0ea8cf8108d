"""The controller keeps the speeds that gateways measure, and plans with them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from orchestrator.api import queries
from orchestrator.control.speed_measurement import WRITE_S
from orchestrator.scaling.demand_report import DemandReport, DemandWindow
from placements.resources.measured_times import PACE, Times, note
from tests.orchestrator.fakes import FakeCluster, Played, settled_fleet, virtual

SPEC = """\
version: 1
hosts: {emulate: inf2.48xlarge}
defaults: {engine: echo}
models:
  m: {tp_degree: 8, max_batch: 4, max_len: 1024}
"""


async def report(fleet: Played, number: int, *, version: str | None = None, requests: int = 300) -> None:
    times: Times = {}
    for _ in range(requests):
        note(times, PACE, 0.02)
    own = fleet.controller.state.current.versions["m"] if version is None else version
    demand = DemandWindow(model="m", times={own: times})
    await fleet.controller.demand(DemandReport(gateway="g", number=number, seconds=1.0, models=[demand]))


async def row(fleet: Played, spec: str = SPEC) -> dict[str, Any]:
    speeds = (await fleet.operator.propose(spec, "spec.yaml", str(fleet.home)))["speeds"]
    assert [each["model"] for each in speeds] == ["m"]
    return dict(speeds[0])


@settled_fleet(SPEC)
async def test_plans_are_corrected_by_what_gateways_report(fleet: Played) -> None:
    """Each report once, and only of versions that the fleet has."""
    before = await row(fleet)
    await report(fleet, 1)
    await report(fleet, 1)
    await report(fleet, 2, version="unknown")
    after = await row(fleet)
    assert (before["source"], before["measured_requests"]) == ("the echo engine's step_ms", 0)
    assert (round(after["step_ms"]), after["measured_requests"]) == (20, 300)
    near = await row(fleet, SPEC.replace("max_batch: 4", "max_batch: 8"))
    assert "by 300 requests measured with max_batch 4 instead of 8" in near["source"]


@virtual
async def test_speeds_outlive_the_controller(tmp_path: Path) -> None:
    """All of a fleet that is shut down; after a crash those of the last minute are lost."""
    cluster = FakeCluster()
    async with Played(tmp_path, cluster, SPEC) as first:
        await first.settled()
        await report(first, 1)
        await asyncio.sleep(WRITE_S + 2)
        await report(first, 2)
    async with Played(tmp_path, cluster, SPEC, journal=first.journal, restarted=True) as second:
        await second.settled()
        assert (await row(second))["measured_requests"] == 300
        await report(second, 1)
        await second.controller.shutdown(0.0)
    async with Played(tmp_path, FakeCluster(), SPEC, fleet="next") as third:
        await third.settled()
        assert (await row(third))["measured_requests"] == 600


@virtual
async def test_a_damaged_file_of_speeds_does_not_hold_the_fleet(tmp_path: Path) -> None:
    """It is measured again."""
    (tmp_path / "speeds.json").write_bytes(b"\x00")
    async with Played(tmp_path, FakeCluster(), SPEC) as fleet:
        await fleet.settled()
        assert queries.speeds(fleet.fleet).speeds == []
