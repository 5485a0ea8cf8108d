"""A pause of the controller, or of everything, costs no replica: deadlines count the time in which the loop ran."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.control.decisions.reconcile import DRAIN_GRACE_S, Fail, Stop, reconcile
from orchestrator.control.decisions.replica_view import Observed, ReplicaView
from orchestrator.control.decisions.rollout_step import ReplicaTarget
from orchestrator.messages.replica_states import STARTING, State
from orchestrator.process.awake_clock import AGAIN_S, BEAT_S, LATE_S, AwakeClock
from placements.facts.core_range import CoreRange
from placements.planner.plan import Placement
from tests.orchestrator.fakes import FakeCluster, Played, VirtualLoop, virtual, virtually
from tests.searches import search
from workers.messages.status import Phase, ReplicaStatus

SPEC = """\
version: 1
hosts: {emulate: inf2.48xlarge}
models:
  m: {engine: echo, replicas: {min: 1, max: 2}, deadlines: {step_s: 30, start_s: 60, drain_s: 20}}
"""
steps = st.lists(st.floats(0.0, BEAT_S), min_size=1, max_size=40)


class Raw:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def pause(seconds: float) -> None:
    cast(VirtualLoop, asyncio.get_running_loop()).pause(seconds)


def play(cluster: FakeCluster, story: Callable[[Played], Coroutine[Any, Any, None]]) -> None:
    async def live() -> None:
        with tempfile.TemporaryDirectory() as home:
            async with Played(Path(home), cluster, SPEC, awake=True) as fleet:
                await fleet.settled()
                await story(fleet)

    virtually(live)


@given(parts=st.lists(st.tuples(steps, st.floats(LATE_S + 0.001, 1e6)), max_size=6))
def test_the_clock_counts_the_run_time_of_the_loop_without_pauses(parts: list[tuple[list[float], float]]) -> None:
    """For any order of short steps and pauses."""
    raw = Raw()
    clock, ran = AwakeClock(raw), 100.0
    for passed, paused in parts:
        for step in passed:
            raw.now += step
            ran += step
            assert clock() == pytest.approx(ran, abs=1e-6)
        raw.now += paused
        assert clock() == pytest.approx(ran, abs=1e-6)
        assert clock.resumed_at() == pytest.approx(ran, abs=1e-6)


views = st.builds(
    partial(ReplicaView, "m", 0, 1, "h", CoreRange(0, 1)),
    state=st.sampled_from([*STARTING, State.READY, State.DRAINING]),
    since=st.floats(-1e5, 1000.0),
    begun=st.floats(-1e5, 1000.0),
    step_s=st.floats(0.0, 1e5),
    compile_s=st.floats(0.0, 1e5),
    requested=st.booleans(),
)


@search(100)
@given(view=views, since_pause=st.floats(0.0, 2 * AGAIN_S))
def test_no_deadline_expires_shortly_after_a_pause(view: ReplicaView, since_pause: float) -> None:
    """The same snapshot without a pause, or later, is decided as usual."""
    target = ReplicaTarget("m", 0, "h", CoreRange(0, 1), "", Placement("m", 0, "h", CoreRange(0, 1), threads=1))
    now = 1000.0

    def decided(resumed: float) -> list[Any]:
        made = reconcile([target], Observed(now, {view.id: view}, resumed))
        return [action for action in made if isinstance(action, Fail | Stop)]

    if since_pause < AGAIN_S:
        assert decided(now - since_pause) == []
    else:
        assert decided(now - since_pause) == decided(float("-inf"))
    late = view.state is State.DRAINING and now - view.since > view.deadlines.drain_s + DRAIN_GRACE_S
    late = late or (view.state in (State.READY, State.DRAINING) and view.step_s > view.deadlines.step_s)
    late = late or (view.state in STARTING and view.overdue(now) is not None)
    assert bool(decided(float("-inf"))) is late


@search(20)
@given(
    story=st.lists(st.tuples(st.floats(0.0, 12.0), st.floats(LATE_S + 0.1, 4000.0)), max_size=3),
    loading=st.booleans(),
    stepping=st.booleans(),
)
def test_no_sequence_of_pauses_ends_a_healthy_replica(
    story: list[tuple[float, float]], loading: bool, stepping: bool
) -> None:
    """The replicas measure their steps and loads by clocks that count the pauses."""
    cluster = FakeCluster()

    async def befall(fleet: Played) -> None:
        loop = asyncio.get_running_loop()
        if loading:  # a second replica, in its start when the pauses come
            cluster.loads = False
            await fleet.operator.scale("m", 2, "tester")
            await asyncio.sleep(1.0)
        replica = cluster.find("m/0")
        for ran, paused in story:
            began = loop.time()
            await asyncio.sleep(ran)
            pause(paused)
            if stepping:  # one step that began before the pause and has not ended
                await replica.report(phase=Phase.READY, step_s=loop.time() - began)
            await asyncio.sleep(AGAIN_S + 1.0)
            await replica.report(phase=Phase.READY, step_s=0.0)
        if loading:
            await cluster.find("m/1").report(phase=Phase.READY)
        await asyncio.sleep(30.0)
        assert cluster.ended == []
        assert len(cluster.started) == (2 if loading else 1)
        assert fleet.model("m")["state"] == "ready"

    play(cluster, befall)


def test_a_hanging_step_is_detected_although_the_controller_was_paused(tmp_path: Path) -> None:
    """Its deadline continues after the pause."""
    cluster = FakeCluster()

    async def story(fleet: Played) -> None:
        hung, began = cluster.find("m/0"), asyncio.get_running_loop().time()
        for _ in range(3):
            await asyncio.sleep(5.0)
            await hung.report(phase=Phase.READY, step_s=asyncio.get_running_loop().time() - began)
        pause(1000.0)
        for _ in range(5):
            await asyncio.sleep(5.0)
            if hung.dead is None:
                await hung.report(phase=Phase.READY, step_s=asyncio.get_running_loop().time() - began)
        assert hung.dead is not None
        assert "Paused" in fleet.happened()

    play(cluster, story)


def test_a_drain_continues_after_a_pause() -> None:
    """The replica's own clock is past the deadline, but its requests had no time to end."""

    class Drains(FakeCluster):
        async def drain(self, name: str, timeout_s: float) -> bool:
            self.drained.append(name)
            if len(self.drained) == 1:
                pause(60.0)
                return False
            await asyncio.sleep(2.0)
            return True

    cluster = Drains()

    async def story(fleet: Played) -> None:
        await fleet.operator.restart("m", "tester")
        await fleet.until(lambda: cluster.drained.count("m/0.1") == 2, "drained again", 120.0)
        await fleet.until(lambda: "m/0.1" in cluster.ended, "ended", 120.0)
        assert cluster.drained.count("m/0.1") == 2

    play(cluster, story)


@pytest.mark.parametrize("paused", [0.0, 60.0])
@virtual
async def test_a_call_is_late_by_the_time_that_the_loop_ran(paused: float) -> None:
    """Silence is a hang only after its deadline on the clock without pauses."""
    loop = asyncio.get_running_loop()
    clock = AwakeClock(loop.time)
    beating, answer = loop.create_task(clock.beat()), loop.create_future()

    def stop_and_go() -> None:
        pause(paused)
        loop.call_later(4.0, answer.set_result, "here")

    if paused:
        loop.call_later(10.0, stop_and_go)
        assert await clock.within(answer, 12.0) == "here"
    else:
        with pytest.raises(asyncio.TimeoutError):
            await clock.within(answer, 12.0)
        assert loop.time() == pytest.approx(12.0)
    beating.cancel()


def test_a_replica_measures_only_the_time_in_which_the_controller_ran() -> None:
    """Its own clock counts the pause, which must not count towards either of its deadlines."""
    view = ReplicaView("m", 0, 1, "h", None, State.LOADING, 0.0, heard=100.0, step_s=1.0, compile_s=2.0)
    status = ReplicaStatus(version=1, phase=Phase.LOADING, pid=1, started=0.0, step_s=61.0, compile_s=62.0)
    heard = view.after(status, 103.0)
    assert (heard.step_s, heard.compile_s, heard.heard) == (4.0, 5.0, 103.0)
