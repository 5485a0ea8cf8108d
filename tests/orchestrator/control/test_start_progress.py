"""What the status shows of a start: its phase, since when, and whether it has compiled."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.orchestrator.fakes import FakeCluster, Played, play
from workers.messages.status import Phase

SPEC = """\
version: 1
hosts: {{emulate: inf2.48xlarge}}
models:
  m: {{{engine}, tp_degree: 8}}
"""
ECHO = SPEC.format(engine="engine: echo")
COMPILES = SPEC.format(engine="engine: cpu, source: ./m, engine_options: {compile: true}")


def test_a_start_shows_whether_it_has_compiled(tmp_path: Path) -> None:
    """The first one has; the next one finds everything, but while it loads, the last one's is shown."""
    cluster = FakeCluster()
    cluster.compile_s, cluster.load_s = 100.0, 5.0

    async def story(played: Played) -> None:
        cluster.uncompiled = {played.controller.state.current.versions["m"]}
        await played.until(lambda: played.replica("m/0").get("state") == "loading", "it loads", 200.0)
        assert played.replica("m/0")["compiled"] is None
        await played.settled()
        assert played.replica("m/0")["compiled"] is True
        await cluster.find("m/0").die("killed")
        await played.until(lambda: played.replica("m/0")["state"] == "loading", "it starts again", 60.0)
        assert played.replica("m/0")["compiled"] is True
        await played.settled()
        assert played.replica("m/0")["compiled"] is False

    play(tmp_path, cluster, COMPILES, story)


def test_compiling_in_the_process_counts(tmp_path: Path) -> None:
    """Graphs that need a device."""
    cluster = FakeCluster()
    cluster.loads = False

    async def story(played: Played) -> None:
        await played.until(lambda: cluster.started, "it starts", 60.0)
        await asyncio.sleep(2.0)  # of virtual time: it cannot have compiled for longer than it runs
        await cluster.find("m/0").report(compile_s=1.0)
        await cluster.find("m/0").report(phase=Phase.READY, load_s=1.0)
        await played.settled()
        assert played.replica("m/0")["compiled"] is True

    play(tmp_path, cluster, COMPILES, story)


def test_an_engine_that_compiles_nothing_has_no_hits(tmp_path: Path) -> None:
    async def story(played: Played) -> None:
        await played.settled()
        assert played.replica("m/0")["compiled"] is None

    play(tmp_path, FakeCluster(), ECHO, story)


def test_a_load_shows_its_phase_once_those_of_a_start_are_known(tmp_path: Path) -> None:
    """Engines have different phases; the first start shows none."""
    cluster = FakeCluster()
    cluster.loads = False

    async def story(played: Played) -> None:
        for epoch, phase in ((1, None), (2, "weights")):
            await played.until(lambda: len(cluster.started) == epoch, "it starts", 60.0)  # noqa: B023
            await cluster.find("m/0").report(load_phases={"process": 1.0})
            await played.until(lambda: played.replica("m/0")["state"] == "loading", "it loads", 60.0)
            assert played.replica("m/0")["phase"] == phase
            phases = {"process": 1.0, "weights": 2.0, "engine": 0.5}
            await cluster.find("m/0").report(phase=Phase.READY, load_s=1.0, load_phases=phases)
            await played.settled()
            assert played.replica("m/0")["phase"] is None
            await cluster.find("m/0").die("killed")

    play(tmp_path, cluster, ECHO, story)


def test_a_state_has_its_time(tmp_path: Path) -> None:
    """By the wall clock, so that it does not depend on when the status is read."""
    cluster = FakeCluster()
    cluster.load_s = 30.0

    async def story(played: Played) -> None:
        await played.until(lambda: played.replica("m/0").get("state") == "loading", "it loads", 60.0)
        began = played.replica("m/0")["since"]
        await played.settled()
        assert played.replica("m/0")["since"] == pytest.approx(began + 30.0, abs=0.5)
        assert played.controller.state.wall() >= played.replica("m/0")["since"]

    play(tmp_path, cluster, ECHO, story)
