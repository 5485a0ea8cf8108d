"""What the status shows of a start: its phase, since when, and whether it has compiled."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.orchestrator.fakes import Played, play, starting_fleet
from workers.messages.status import Phase

SPEC = """\
version: 1
hosts: {{emulate: inf2.48xlarge}}
models:
  m: {{{engine}, tp_degree: 8}}
"""
ECHO = SPEC.format(engine="engine: echo")
COMPILES = SPEC.format(engine="engine: cpu, source: ./m, engine_options: {compile: true}")


@starting_fleet(COMPILES, compile_s=100.0, load_s=5.0)
async def test_a_start_shows_whether_it_has_compiled(played: Played) -> None:
    """The first one has; the next one finds everything, but while it loads, the last one's is shown."""
    played.cluster.uncompiled = {played.controller.state.current.versions["m"]}
    await played.until(lambda: played.replica("m/0").get("state") == "loading", "it loads", 200.0)
    assert played.replica("m/0")["compiled"] is None
    await played.settled()
    assert played.replica("m/0")["compiled"] is True
    await played.cluster.find("m/0").die("killed")
    await played.until(lambda: played.replica("m/0")["state"] == "loading", "it starts again", 60.0)
    assert played.replica("m/0")["compiled"] is True
    await played.settled()
    assert played.replica("m/0")["compiled"] is False


@starting_fleet(COMPILES, loads=False)
async def test_compiling_in_the_process_counts(played: Played) -> None:
    """Graphs that need a device."""
    await played.until(lambda: played.cluster.started, "it starts", 60.0)
    await asyncio.sleep(2.0)  # of virtual time: it cannot have compiled for longer than it runs
    await played.cluster.find("m/0").report(compile_s=1.0)
    await played.cluster.find("m/0").report(phase=Phase.READY, load_s=1.0)
    await played.settled()
    assert played.replica("m/0")["compiled"] is True


def test_an_engine_that_compiles_nothing_has_no_hits(tmp_path: Path) -> None:
    async def story(played: Played) -> None:
        await played.settled()
        assert played.replica("m/0")["compiled"] is None

    play(tmp_path, ECHO, story)


@starting_fleet(ECHO, loads=False)
async def test_a_load_shows_its_phase_once_those_of_a_start_are_known(played: Played) -> None:
    """Engines have different phases; the first start shows none."""
    for epoch, phase in ((1, None), (2, "weights")):
        await played.until(lambda: len(played.cluster.started) == epoch, "it starts", 60.0)  # noqa: B023
        await played.cluster.find("m/0").report(load_phases={"process": 1.0})
        await played.until(lambda: played.replica("m/0")["state"] == "loading", "it loads", 60.0)
        assert played.replica("m/0")["phase"] == phase
        phases = {"process": 1.0, "weights": 2.0, "engine": 0.5}
        await played.cluster.find("m/0").report(phase=Phase.READY, load_s=1.0, load_phases=phases)
        await played.settled()
        assert played.replica("m/0")["phase"] is None
        await played.cluster.find("m/0").die("killed")


@starting_fleet(ECHO, load_s=30.0)
async def test_a_state_has_its_time(played: Played) -> None:
    """By the wall clock, so that it does not depend on when the status is read."""
    await played.until(lambda: played.replica("m/0").get("state") == "loading", "it loads", 60.0)
    began = played.replica("m/0")["since"]
    await played.settled()
    assert played.replica("m/0")["since"] == pytest.approx(began + 30.0, abs=0.5)
    assert played.controller.state.wall() >= played.replica("m/0")["since"]
