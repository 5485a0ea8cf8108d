"""A journal whose newest revision is lost to damage: nothing is done on an older one without an operator's word."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api.schemas import OperationRefused
from orchestrator.control.journal.journal import Journal, JournalUnwritable
from orchestrator.messages.replica_states import State
from tests.orchestrator.fakes import FakeCluster, Played, virtual, virtually
from workers.messages.status import Phase

ONE = """\
version: 1
hosts: {emulate: inf2.24xlarge}
defaults: {engine: echo}
models:
  a: {tp_degree: 2, max_batch: 4, replicas: 2}
  old: {tp_degree: 1}
  sleeper: {tp_degree: 1, replicas: {min: 0, max: 1}}
"""
TWO = ONE.replace("max_batch: 4, replicas: 2", "max_batch: 8, replicas: 3").replace("old:", "new:")
LONG_S = 600.0  # many passes of the controller


def damaged(path: Path, number: int) -> None:
    """Flip one bit in the record of that revision."""
    data = bytearray(path.read_bytes())
    data[data.index(b'"number":%d,' % number)] ^= 1
    path.write_bytes(data)


def play(
    home: Path, story: Callable[[Played], Coroutine[Any, Any, None]], *, lost: int = 2, fleet: str = "f"
) -> FakeCluster:
    """Bring up ONE, apply TWO, kill the controller, damage the record of revision ``lost``; tell ``story`` of the next
    controller, which is of another `up` when ``fleet`` is."""

    async def main() -> FakeCluster:
        cluster, path = FakeCluster(), home / "journal"
        journal = Journal(path)
        async with Played(home, cluster, ONE, journal=journal) as played:
            await played.settled()
            await played.apply(TWO)
            await played.settled()
        journal.close()
        if lost == 1:  # of both revisions nothing is left
            damaged(path, 2)
        damaged(path, lost)
        for done in (cluster.started, cluster.drained, cluster.ended):
            done.clear()
        journal = Journal(path)
        restarted = fleet == "f"
        async with Played(home, cluster, ONE, journal=journal, fleet=fleet, restarted=restarted) as played:
            await played.controller.settled()
            await story(played)
        journal.close()
        assert cluster.violations == []
        return cluster

    return virtually(main)


async def passes(played: Played, seconds: float) -> None:
    """So much of the fleet's time."""
    end = played.controller.state.wall() + seconds
    while (left := end - played.controller.state.wall()) > 0:
        await played.controller.change(10**9, left)


def idle(cluster: FakeCluster) -> bool:
    return not (cluster.started or cluster.drained or cluster.ended)


@pytest.mark.parametrize("lost", [1, 2], ids=["every revision", "the newest revision"])
def test_nothing_is_done_on_an_older_revision(tmp_path: Path, lost: int) -> None:
    """Replicas of the lost revision serve, a model that only it has is routed, and one that dies is not restarted."""

    async def story(played: Played) -> None:
        await passes(played, LONG_S)
        assert idle(played.cluster)
        table = played.controller.routes()
        assert {model.name: len(model.replicas) for model in table.models} == {"a": 3, "old": 0, "sleeper": 0, "new": 1}
        assert table.ready
        await played.controller.wake("sleeper")
        victim = played.ready("a")[0]["id"]
        await played.cluster.find(victim).die("killed")
        await passes(played, LONG_S)
        assert idle(played.cluster)
        reasons = [event.reason for event in played.journal.events()]
        assert not {"Woken", "UpdateStrategy", "MakingRoom"} & set(reasons[reasons.index("ActionsHeld") :])
        assert played.replica(victim)["state"] == State.FAILED.value

    play(tmp_path, story, lost=lost)


def test_a_hold_is_an_error_event_and_a_condition(tmp_path: Path) -> None:
    """With the problem's id and the remedy, for `events`, `status` and `up`."""

    async def story(played: Played) -> None:
        events = {event.reason: event for event in played.journal.events() if event.level == "error"}
        text = played.controller.status().hold
        assert events["JournalDamaged"].message.startswith("journal-damaged: bytes ")
        assert events["ActionsHeld"].message == text
        assert text.startswith("journal-damaged: ")
        assert "corewright apply SPEC; or corewright rollout undo --to 1" in text

    play(tmp_path, story)


def test_applying_the_lost_spec_ends_the_hold_and_drains_nothing(tmp_path: Path) -> None:
    """The replicas match it already. Its number is a new one."""

    async def story(played: Played) -> None:
        answer = await played.apply(TWO)
        await played.settled()
        assert (answer["changed"], answer["revision"]) == (True, 3)
        assert idle(played.cluster)
        assert played.controller.status().hold == ""
        victim = played.ready("a")[0]["id"]
        await played.cluster.find(victim).die("killed")
        await played.until(lambda: played.replica(victim)["restarts"], "it is started again", LONG_S)

    play(tmp_path, story)


@pytest.mark.parametrize("verb", ["apply", "undo"])
def test_the_older_revision_can_be_accepted(tmp_path: Path, verb: str) -> None:
    """By an apply of an equal spec, or by its number; the fleet then follows it."""

    async def story(played: Played) -> None:
        await (played.apply(ONE) if verb == "apply" else played.operator.undo(1, "tester"))
        await played.settled()
        assert len(played.ready("a")) == 2

    play(tmp_path, story)


def test_a_hold_outlives_the_controllers_next_restart(tmp_path: Path) -> None:
    """The damage is reported once; its end outlives a restart, too."""

    async def story(played: Played) -> None:
        await played.kill()
        played.journal.close()
        journal = Journal(tmp_path / "journal")
        async with Played(tmp_path, played.cluster, ONE, journal=journal, restarted=True) as second:
            await second.controller.settled()
            await passes(second, LONG_S)
            assert idle(second.cluster)
            assert second.controller.status().hold
            assert sum(event.reason == "JournalDamaged" for event in journal.events()) == 1
            await second.apply(TWO)
        journal.close()
        journal = Journal(tmp_path / "journal")
        async with Played(tmp_path, played.cluster, ONE, journal=journal, restarted=True) as third:
            await third.settled()
            assert third.controller.status().hold == ""
            assert idle(third.cluster)
        journal.close()

    play(tmp_path, story)


@pytest.mark.parametrize(
    "verb",
    [
        lambda operator: operator.scale("a", 1, "tester"),
        lambda operator: operator.load("sleeper", "tester"),
        lambda operator: operator.unload("a", "tester"),
        lambda operator: operator.restart("a", "tester"),
        lambda operator: operator.drain("new/0", "tester"),
        lambda operator: operator.pause("tester"),
        lambda operator: operator.resume("tester"),
        lambda operator: operator.promote("tester"),
    ],
    ids=["scale", "load", "unload", "restart", "drain", "pause", "resume", "promote"],
)
def test_changes_are_rejected_while_the_revision_is_unknown(tmp_path: Path, verb: Callable[[Any], Any]) -> None:
    """`plan` works, and shows what an apply would do."""

    async def story(played: Played) -> None:
        with pytest.raises(OperationRefused) as refused:
            await verb(played.operator)
        assert refused.value.problem.id == "journal-damaged"
        proposal = await played.operator.propose(TWO, "spec.yaml", str(tmp_path))
        assert proposal["changes"] == []

    play(tmp_path, story)


def test_the_next_up_ends_the_hold(tmp_path: Path) -> None:
    """It reports the damage, and holds nothing."""

    async def story(played: Played) -> None:
        assert played.controller.status().hold == ""
        assert any(event.reason == "JournalDamaged" for event in played.journal.events())
        await played.settled()
        assert len(played.ready("a")) == 2

    play(tmp_path, story, fleet="next")


@virtual
async def test_a_draining_replica_continues_only_after_the_hold(tmp_path: Path) -> None:
    """Its cores are not used meanwhile."""
    cluster, path = FakeCluster(), tmp_path / "journal"
    journal = Journal(path)
    async with Played(tmp_path, cluster, ONE, journal=journal) as played:
        await played.settled()
        cluster.drain_s = LONG_S
        await played.apply(ONE.replace("max_batch: 4", "max_batch: 8"))
        await played.until(lambda: cluster.drained, "one drains", LONG_S)
    journal.close()
    damaged(path, 2)
    for replica in cluster.living():
        if cluster.drained[0].startswith(f"{replica.config.model.name}/{replica.config.place.replica}."):
            await replica.report(phase=Phase.DRAINING)
    cluster.drained.clear()
    cluster.started.clear()
    journal = Journal(path)
    async with Played(tmp_path, cluster, ONE, journal=journal, restarted=True) as played:
        await passes(played, LONG_S)
        assert idle(cluster)
        cluster.drain_s = 0.0
        await played.apply(ONE)
        await played.settled()
    journal.close()


@virtual
async def test_on_a_full_disk_the_fleet_is_held_too(tmp_path: Path) -> None:
    """The record of the hold is pending with the others, and is written before the next revision."""
    cluster, path = FakeCluster(), tmp_path / "journal"
    journal = Journal(path)
    async with Played(tmp_path, cluster, ONE, journal=journal) as played:
        await played.settled()
        await played.apply(TWO)
        await played.settled()
    journal.close()
    damaged(path, 2)
    cluster.started.clear()
    cluster.drained.clear()
    cluster.ended.clear()
    journal = Journal(path)
    append = journal.append

    def full(record: Any) -> Any:
        raise JournalUnwritable(28, "No space left on device")

    journal.append = full  # type: ignore[method-assign]
    async with Played(tmp_path, cluster, ONE, journal=journal, restarted=True) as played:
        await passes(played, LONG_S)
        assert idle(cluster)
        journal.append = append  # type: ignore[method-assign]
        await passes(played, 5.0)
        assert idle(cluster)
        assert journal.state().held is not None
    journal.close()
