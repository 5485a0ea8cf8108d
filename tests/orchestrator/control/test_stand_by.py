"""Hosts are kept ready for starts: warm processes of engines, and the files of parked models."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.orchestrator.fakes import FakeCluster, Played

HOST = "inf2.48xlarge/0"
SPEC = """\
version: 1
hosts: {emulate: inf2.48xlarge}
models:
  a: {source: ./a, engine: cpu, max_len: 64, replicas: {min: 0, max: 1}}
  b: {engine: echo}
"""


async def park(fleet: Played) -> None:
    """Loads and unloads a model."""
    await fleet.controller.wake("a")
    await fleet.until(lambda: fleet.controller.state.ready("a") == 1, "a is ready")
    await fleet.operator.unload("a", by="tester")
    await fleet.until(lambda: fleet.model("a")["parked"], "a is parked")


@pytest.mark.parametrize(
    ("engines", "kept"),
    [
        ("", {"cpu": None}),
        ("engines: {cpu: {warm: false}}", {}),
        ("engines: {nxd-inference: {warm: true}}", {"cpu": None}),
    ],
)
async def test_a_host_keeps_a_warm_process_of_each_engine_that_is_to_have_one(
    tmp_path: Path, engines: str, kept: dict[str, str | None]
) -> None:
    """By default of the CPU engine, before a replica of it starts."""
    cluster = FakeCluster()
    async with Played(tmp_path, cluster, f"{SPEC}{engines}\n") as fleet:
        await fleet.until(lambda: HOST in cluster.standing_by, "the host is kept ready")

        assert cluster.standing_by[HOST] == (kept, [])


async def test_the_files_of_an_unloaded_model_stay_in_memory(tmp_path: Path) -> None:
    """And the status shows how much of them, and the expected time of a start."""
    cluster = FakeCluster()
    cluster.cached = 2**29
    cluster.load_s = 4.0
    async with Played(tmp_path, cluster, SPEC) as fleet:
        await fleet.controller.wake("a")
        await fleet.until(lambda: fleet.controller.state.ready("a") == 1, "a is ready")
        ((_, folder, _, _),) = cluster.configs("a")[0].sources()
        await fleet.operator.unload("a", by="tester")
        await fleet.until(lambda: fleet.model("a")["parked"], "a is parked")

        assert cluster.standing_by[HOST] == ({"cpu": None}, [folder])
        parked = fleet.model("a")["parked"]
        assert (parked["host"], parked["gib"], parked["cached_gib"]) == (HOST, 1.0, 0.5)
        assert parked["start_s"] >= 4.0


async def test_a_restarted_controller_knows_where_a_model_is_parked(tmp_path: Path) -> None:
    """And its files stay in memory."""
    cluster = FakeCluster()
    async with Played(tmp_path, cluster, SPEC) as first:
        await park(first)
        shown, kept = first.model("a")["parked"], cluster.standing_by.pop(HOST)
    async with Played(tmp_path, cluster, SPEC, journal=first.journal, restarted=True) as second:
        await second.until(lambda: second.model("a")["parked"], "a is parked")

        assert second.model("a")["parked"] == shown
        assert cluster.standing_by[HOST] == kept


async def test_a_model_that_runs_is_not_parked(tmp_path: Path) -> None:
    """Its process maps its files."""
    cluster = FakeCluster()
    async with Played(tmp_path, cluster, SPEC) as fleet:
        await fleet.until(lambda: fleet.controller.state.ready("b") == 1, "b is ready")
        await fleet.until(lambda: HOST in cluster.standing_by, "the host is kept ready")

        assert fleet.model("b")["parked"] is None


async def test_only_a_model_that_returns_to_its_host_serves_without_a_trial(tmp_path: Path) -> None:
    """There its version has served."""
    cluster = FakeCluster()
    async with Played(tmp_path, cluster, SPEC) as fleet:
        await park(fleet)
        await fleet.operator.load("a", by="tester")
        await fleet.until(lambda: fleet.controller.state.ready("a") == 1, "a is back")

        assert [config.proven for config in cluster.configs("a")] == [False, True]


async def test_what_a_lost_host_had_in_memory_is_not_parked(tmp_path: Path) -> None:
    """A return starts elsewhere, and reads everything."""
    cluster = FakeCluster()
    async with Played(tmp_path, cluster, SPEC) as fleet:
        await park(fleet)
        cluster.lost_now.add(HOST)

        await fleet.until(lambda: fleet.model("a")["parked"] is None, "it is not parked any more")


async def test_a_host_that_does_not_report_leaves_what_it_last_had(tmp_path: Path) -> None:
    """Of the folders in its page cache."""
    cluster = FakeCluster()
    async with Played(tmp_path, cluster, SPEC) as fleet:
        await park(fleet)
        shown = fleet.model("a")["parked"]
        cluster.reports_cached = False
        await fleet.controller.standby._refresh(HOST)
        fleet.controller.standby.round()

        assert fleet.model("a")["parked"] == shown
