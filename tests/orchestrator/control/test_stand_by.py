"""Hosts are kept ready for starts by warm processes of engines, and models return to where they have served."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.orchestrator.fakes import FakeCluster, Played, starting_fleet

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
@starting_fleet(lambda engines: f"{SPEC}{engines}\n")
async def test_a_host_keeps_a_warm_process_of_each_engine_that_is_to_have_one(
    fleet: Played, engines: str, kept: dict[str, str | None]
) -> None:
    """By default of the CPU engine, before a replica of it starts."""
    await fleet.until(lambda: HOST in fleet.cluster.standing_by, "the host is kept ready")

    assert fleet.cluster.standing_by[HOST] == kept


@starting_fleet(SPEC, load_s=4.0)
async def test_the_status_of_an_unloaded_model_has_its_last_host_and_the_time_of_a_start(fleet: Played) -> None:
    """As measured there."""
    await park(fleet)

    parked = fleet.model("a")["parked"]
    assert parked.keys() == {"host", "start_s"}
    assert parked["host"] == HOST
    assert parked["start_s"] >= 4.0


async def test_a_restarted_controller_knows_where_a_model_is_parked(tmp_path: Path) -> None:
    """From its journal."""
    cluster = FakeCluster()
    async with Played(tmp_path, cluster, SPEC) as first:
        await park(first)
        before = first.model("a")["parked"]
    async with Played(tmp_path, cluster, SPEC, journal=first.journal, restarted=True) as second:
        await second.until(lambda: second.model("a")["parked"], "a is parked")

        assert second.model("a")["parked"] == before


@starting_fleet(SPEC)
async def test_a_model_that_runs_is_not_parked(fleet: Played) -> None:
    """It has a replica."""
    await fleet.until(lambda: fleet.controller.state.ready("b") == 1, "b is ready")

    assert fleet.model("b")["parked"] is None


@starting_fleet(SPEC)
async def test_only_a_model_that_returns_to_its_host_serves_without_a_trial(fleet: Played) -> None:
    """There its version has served."""
    await park(fleet)
    await fleet.operator.load("a", by="tester")
    await fleet.until(lambda: fleet.controller.state.ready("a") == 1, "a is back")

    assert [config.run.proven for config in fleet.cluster.configs("a")] == [False, True]


@starting_fleet(SPEC)
async def test_a_model_whose_last_host_is_lost_is_not_parked(fleet: Played) -> None:
    """A return starts elsewhere, with a trial."""
    await park(fleet)
    fleet.cluster.lost_now.add(HOST)

    await fleet.until(lambda: fleet.model("a")["parked"] is None, "it is not parked any more")
