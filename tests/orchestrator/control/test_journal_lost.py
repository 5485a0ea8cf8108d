"""A journal whose file is gone or was replaced under a running fleet: nothing more is decided."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.api.schemas import OperationRefused
from orchestrator.control.journal.journal import Journal
from orchestrator.control.record_writer import RecordWriter
from tests.orchestrator.control.test_journal_damage import LONG_S, ONE, TWO, idle, passes
from tests.orchestrator.fakes import FakeCluster, Played, virtual


def removed(path: Path) -> None:
    path.unlink()


def replaced_by_a_link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


def replaced_by_a_copy(path: Path) -> None:
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    copy.rename(path)


@pytest.mark.parametrize("lose", [removed, replaced_by_a_link, replaced_by_a_copy])
@virtual
async def test_a_fleet_without_its_journal_serves_and_holds_its_actions(
    tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    """An apply is refused, a killed replica is not restarted, and the status says why."""
    cluster, journal = FakeCluster(), Journal(tmp_path / "journal")
    async with Played(tmp_path, cluster, ONE, journal=journal) as played:
        await played.settled()
        lose(tmp_path / "journal")
        await played.until(lambda: "journal-lost: " in played.controller.status().hold, "the hold", 60.0)
        cluster.started.clear()
        with pytest.raises(OperationRefused) as refused:
            await played.apply(TWO)
        assert (refused.value.problem.id, refused.value.status) == ("journal-lost", 507)
        assert played.controller.status().revision == 1
        await cluster.find("a/0").die("killed")
        await passes(played, LONG_S)
        assert idle(cluster)
        routes = {model.name: len(model.replicas) for model in played.controller.routes().models}
        assert routes == {"a": 1, "old": 1, "sleeper": 0}
    with contextlib.suppress(OSError):
        journal.close()


@virtual
async def test_a_restarted_controller_without_any_revision_holds_its_actions(tmp_path: Path) -> None:
    """The spec of `up` may be older than what the replicas serve."""
    cluster, journal = FakeCluster(), Journal(tmp_path / "journal")
    async with Played(tmp_path, cluster, ONE, journal=journal) as played:
        await played.settled()
        await played.apply(TWO)
        await played.settled()
    journal.close()
    (tmp_path / "journal").unlink()
    for done in (cluster.started, cluster.drained, cluster.ended):
        done.clear()
    journal = Journal(tmp_path / "journal")
    async with Played(tmp_path, cluster, ONE, journal=journal, restarted=True) as played:
        await played.controller.settled()
        assert "the journal has no revision of this fleet" in played.controller.status().hold
        await passes(played, LONG_S)
        assert idle(cluster)
        await played.apply(TWO)
        await played.settled()
        assert (played.controller.status().hold, cluster.started) == ("", [])
    journal.close()


def test_a_journal_that_cannot_be_opened_is_lost_from_the_beginning(tmp_path: Path) -> None:
    """What a restarted controller does with a link in its place."""
    assert RecordWriter(Journal(tmp_path / "journal", lost=True)).lost
    assert not (tmp_path / "journal").exists()
