"""Journals that earlier versions wrote (tests/golden/previous, see `tests.recorded_journal`)."""

from __future__ import annotations

import asyncio
import shutil
import zlib
from pathlib import Path

import pytest

from orchestrator.control.journal.journal import Journal, read
from orchestrator.control.journal.journal_fold import failed_cores
from tests.orchestrator.elsewhere import forbid_remote_sources
from tests.orchestrator.fakes import FakeCluster, Played, virtual
from tests.recorded_journal import SPEC

RECORDED = Path(__file__).parents[3] / "golden" / "previous"


@pytest.mark.parametrize("name", ["journal", "journal-compacted"])
@virtual
async def test_a_controller_continues_from_an_earlier_versions_journal(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its revision, manual scale, cordons, drain, broken cores and epochs hold."""
    forbid_remote_sources(monkeypatch, tmp_path)
    shutil.copy(RECORDED / name, tmp_path / "journal")
    journal = Journal(tmp_path / "journal", clock=asyncio.get_running_loop().time)
    assert journal.damage == []
    before = journal.state()
    cluster = FakeCluster()
    async with Played(tmp_path, cluster, "", journal=journal, fleet="recorded", restarted=True) as played:
        await asyncio.sleep(600.0)
        current = played.controller.state.current.revision
        assert (current.number, current.text) == (3, SPEC.format(batch=2))
        assert len(played.ready("chat")) == 3, "as scaled by hand"
        assert len(played.ready("small")) == 2
        for config in cluster.started:
            assert config.run.epoch > before.epochs[config.id]
        broken = {(record.host, record.core) for record in failed_cores(before)}
        used = {
            (replica.config.place.host, core) for replica in cluster.living() for core in replica.config.place.cores
        }
        assert len(broken) == 2
        assert not used & (broken | {("inf2.48xlarge/0", core) for core in range(20, 24)})
        assert "inf2.48xlarge/1" not in {host for host, _ in used}, "it is drained"
        assert cluster.violations == []
    journal.close()


def test_records_of_kinds_that_were_removed_are_skipped_and_not_reported() -> None:
    """Unlike those of kinds that a newer version has added."""
    data = (RECORDED / "journal").read_bytes()
    last = read(data).state.seq

    for kind, damage in (("hostroll", 0), ("added", 1)):
        payload = b'{"kind":"%b","seq":%d,"at":1.0,"hosts":[],"phase":"next"}' % (kind.encode(), last + 1)
        contents = read(data + b"%08x %b\n" % (zlib.crc32(payload), payload))
        assert (len(contents.damage), contents.state.seq) == (damage, last + 1)
