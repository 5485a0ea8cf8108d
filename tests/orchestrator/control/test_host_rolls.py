"""Maintenance of host after host: every model is served all the time, or it does not begin."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.api.refused import Refused
from orchestrator.records.journal import Journal, JournalUnwritable
from orchestrator.records.journal_records import Cordon
from orchestrator.rollout.host_roll import Phase, RollFacts, Wait, next_phase
from orchestrator.state.record_writer import RecordWriter
from tests.orchestrator.fakes import FakeCluster, Played, virtually
from tests.orchestrator.fakes import play as play_on

HOSTS = ["inf2.48xlarge/0", "inf2.48xlarge/1"]
ROOMY = """\
version: 1
hosts: {emulate: inf2.48xlarge, count: 2}
models:
  a: {engine: echo, tp_degree: 4, replicas: 3}
  b: {engine: echo, tp_degree: 8}
"""
FULL = """\
version: 1
hosts: {emulate: inf2.48xlarge, count: 2}
models:
  a: {engine: echo, tp_degree: 24, replicas: 2}
"""


def play(tmp_path: Path, text: str, story: Callable[[Played], Coroutine[Any, Any, None]]) -> None:
    """A story that begins when every replica is ready. A start takes 20 s."""
    cluster = FakeCluster()
    cluster.load_s = 20.0

    async def settled(played: Played) -> None:
        await played.settled()
        await story(played)

    play_on(tmp_path, cluster, text, settled)


async def emptied(played: Played, least: dict[str, int]) -> list[str]:
    """Watches until the maintenance is over. Returns the hosts in the order in which they were used again."""
    for _ in range(2000):
        status = played.controller.status()
        for model, number in least.items():
            assert len(played.ready(model)) >= number
        if status.maintenance is None:
            return [event.host or "" for event in played.journal.events() if event.reason == "Uncordoned"]
        await asyncio.sleep(0.2)
    raise AssertionError(f"the maintenance does not end: {status}")


def phase(played: Played) -> str | None:
    roll = played.controller.status().maintenance
    return None if roll is None else roll["phase"]


def test_every_host_is_emptied_in_turn_while_all_replicas_serve(tmp_path: Path) -> None:
    async def story(played: Played) -> None:
        await played.operator.roll_hosts([], "none", None, "tester")
        assert await emptied(played, {"a": 3, "b": 1}) == HOSTS
        assert [host.cordoned for host in played.controller.status().hosts] == [[], []]
        assert played.happened().count("HostDraining") == 2
        assert "MaintenanceOver" in played.happened()

    play(tmp_path, ROOMY, story)


def test_a_host_waits_for_the_operator(tmp_path: Path) -> None:
    """`hosts continue` before it is empty is refused, and so is a second maintenance."""

    async def story(played: Played) -> None:
        await played.operator.roll_hosts(HOSTS[::-1], "operator", None, "tester")
        for work in (played.operator.continue_roll("x"), played.operator.roll_hosts([], "none", None, "x")):
            with pytest.raises(Refused) as refused:
                await work
            assert refused.value.problem.id in ("roll-not-waiting", "roll-in-progress")
        await played.until(lambda: phase(played) == "waiting", "empty", 200)
        await asyncio.sleep(500)
        assert played.host(1)["cordoned"] == "all"
        await played.operator.continue_roll("tester")
        assert played.host(1)["cordoned"] == []
        await played.until(lambda: phase(played) == "waiting", "the next one is empty", 200)
        assert played.controller.status().maintenance["hosts"] == HOSTS[:1]
        await played.operator.stop_roll("tester")
        assert (phase(played), played.host(0)["cordoned"]) == (None, [])
        with pytest.raises(Refused) as refused:
            await played.operator.stop_roll("tester")
        assert refused.value.problem.id == "no-roll"

    play(tmp_path, ROOMY, story)


def test_the_end_of_a_maintenance_is_the_act_of_the_operator_who_ended_it(tmp_path: Path) -> None:
    """And not of the one who has begun it."""

    async def story(played: Played) -> None:
        written: list[Any] = []
        await played.operator.roll_hosts(HOSTS[:1], "operator", None, "tester")
        await played.until(lambda: phase(played) == "waiting", "empty", 200)
        records = played.operator._state.records
        records.record = lambda record: written.append(record) or RecordWriter.record(records, record)  # type: ignore
        await played.operator.stop_roll("another")
        assert [record.by for record in written if isinstance(record, Cordon)] == ["another"]

    play(tmp_path, ROOMY, story)


@pytest.mark.parametrize("end", ["continue_roll", "stop_roll"])
def test_a_maintenance_goes_on_if_the_disk_refuses_its_end(tmp_path: Path, end: str) -> None:
    """As with each operation of an operator, which is rejected then."""

    async def refuse(record: object) -> None:
        raise JournalUnwritable(errno.ENOSPC, "no space")

    async def story(played: Played) -> None:
        await played.operator.roll_hosts(HOSTS[:1], "operator", None, "tester")
        await played.until(lambda: phase(played) == "waiting", "empty", 200)
        played.operator._state.records.record = refuse  # type: ignore[assignment, method-assign]
        with pytest.raises(Refused, match="journal-unwritable"):
            await getattr(played.operator, end)("tester")
        assert (phase(played), played.host(0)["cordoned"]) == ("waiting", "all")

    play(tmp_path, ROOMY, story)


def test_a_host_waits_for_its_new_node(tmp_path: Path) -> None:
    """Its machine restarts: it is lost for a while, and comes back with another Ray node."""

    async def story(played: Played) -> None:
        await played.operator.roll_hosts(HOSTS[:1], "node", None, "tester")
        await played.until(lambda: phase(played) == "waiting", "empty", 200)
        await played.cluster.lose(HOSTS[0])
        await asyncio.sleep(100)
        assert phase(played) == "waiting"
        played.cluster.nodes[HOSTS[0]] = "2"
        played.cluster.lost_now.clear()
        await played.until(lambda: phase(played) is None, "over", 30)
        assert played.host(0)["cordoned"] == []

    play(tmp_path, ROOMY, story)


def test_a_maintenance_without_room_is_refused_with_the_reason(tmp_path: Path) -> None:
    """With a deadline fewer replicas are allowed, but never none."""

    async def story(played: Played) -> None:
        before = played.journal.state()
        with pytest.raises(Refused) as refused:
            await played.operator.roll_hosts([], "none", None, "tester")
        assert refused.value.problem.id == "roll-no-room"
        assert "a/0 needs" in refused.value.problem.what
        assert played.journal.state() == before
        await played.operator.roll_hosts([], "none", 60.0, "tester")
        assert await emptied(played, {"a": 1}) == HOSTS
        await played.settled()

    play(tmp_path, FULL, story)


def test_the_only_host_of_a_model_is_never_rolled(tmp_path: Path) -> None:
    async def story(played: Played) -> None:
        with pytest.raises(Refused) as refused:
            await played.operator.roll_hosts([], "none", 60.0, "tester")
        assert refused.value.problem.id == "roll-no-room"
        with pytest.raises(Refused) as refused:
            await played.operator.roll_hosts(["x"], "none", None, "tester")
        assert refused.value.problem.id == "host-unknown"

    play(tmp_path, ROOMY.replace(", count: 2", ""), story)


def test_room_that_is_lost_meanwhile_delays_the_next_host(tmp_path: Path) -> None:
    """The maintenance says what it waits for, and goes on when there is room again."""

    async def story(played: Played) -> None:
        await played.operator.roll_hosts([], "operator", None, "tester")
        await played.until(lambda: phase(played) == "waiting", "empty", 200)
        await played.cluster.lose(HOSTS[0])
        await played.until(lambda: played.host(0)["lost"], "lost", 10)
        await played.operator.continue_roll("tester")
        await played.until(lambda: "MaintenanceWaits" in played.happened(), "it waits", 100)
        assert "b/0 needs" in played.controller.status().maintenance["refusal"]
        played.cluster.lost_now.clear()
        await played.until(lambda: phase(played) == "waiting", "the next one is empty", 200)

    play(tmp_path, ROOMY, story)


def test_replicas_stay_while_room_is_lost_during_a_drain(tmp_path: Path) -> None:
    """They serve where they are: to stop them would free no core for their successors."""

    async def story(played: Played) -> None:
        await played.operator.roll_hosts([], "none", None, "tester")
        await played.until(lambda: phase(played) == "draining", "it drains", 10)
        await played.cluster.lose(HOSTS[1])
        await asyncio.sleep(300)
        assert (len(played.ready("a")), len(played.ready("b"))) == (3, 1)
        played.cluster.lost_now.clear()
        assert await emptied(played, {"a": 3, "b": 1}) == HOSTS

    play(tmp_path, ROOMY, story)


@pytest.mark.parametrize("at", ["draining", "waiting"])
def test_a_restarted_controller_goes_on_where_it_was(tmp_path: Path, at: str) -> None:
    cluster = FakeCluster()
    cluster.load_s = 20.0

    async def story(played: Played) -> None:
        await played.settled()
        await played.operator.roll_hosts([], "operator", None, "tester")
        await played.until(lambda: phase(played) == at, at, 200)
        await played.kill()
        played.journal.close()
        journal = Journal(tmp_path / "journal")
        async with Played(tmp_path, cluster, ROOMY, journal=journal, restarted=True) as second:
            for left in (1, 0):
                await second.until(lambda: phase(second) == "waiting", "empty", 200)
                await second.operator.continue_roll("tester")
                assert len((second.controller.status().maintenance or {"hosts": []})["hosts"]) == left
            await second.settled()
        journal.close()

    async def live() -> None:
        async with Played(tmp_path, cluster, ROOMY, journal=Journal(tmp_path / "journal")) as played:
            await story(played)
        assert cluster.violations == []

    virtually(live)


NODES = st.sampled_from([None, "1", "2"])


@given(
    st.sampled_from(["next", "draining", "waiting"]),
    st.sampled_from(["none", "operator", "node"]),
    st.sampled_from(["1", "2"]),
    st.builds(RollFacts, st.booleans(), st.none() | st.just("no room"), st.integers(0, 2), NODES),
)
def test_no_phase_is_left_too_early(phase: Phase, wait: Wait, node: str, facts: RollFacts) -> None:
    """A drain begins only when all replicas serve and fit elsewhere; no host with replicas is in maintenance."""
    after = next_phase(phase, wait, node, facts)
    if phase == "next" and after != "next":
        assert facts.settled
        assert facts.refusal is None
    if phase == "draining" and after != "draining":
        assert facts.busy == 0
        assert (after == "done") == (wait == "none")
    if phase == "waiting" and after == "done":
        assert wait == "node"
        assert facts.node not in (None, node)
