"""Records a journal of this version, which the next ones must read (`test_old_journals.py`).

At a release: `.venv/bin/python -m tests.recorded_journal tests/golden/previous`.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from orchestrator.control.journal.journal import Journal
from orchestrator.control.journal.journal_records import Event
from tests.orchestrator.fakes import FakeCluster, Played, virtually
from workers.messages.status import Failure, Phase, Reaction

AT = 1795183685.0  # 2026-11-20 14:08:05 UTC
SPEC = """\
version: 1
name: fleet
hosts: {{emulate: inf2.48xlarge, count: 3}}
models:
  chat: {{engine: echo, tp_degree: 8, replicas: {{min: 2, max: 3}}, max_batch: {batch}}}
  small: {{engine: cpu, source: s3://models/small, tp_degree: 2, replicas: 2}}
"""


async def _record_journal(home: Path) -> None:
    """Plays a fleet whose journal has records of most kinds: two revisions, an undo, a manual scale, a cordon, a drain,
    a broken device, a restart."""
    cluster = FakeCluster()
    cluster.load_s, cluster.fetch_s = 7.0, 4.0
    loop = asyncio.get_running_loop()
    journal = Journal(home / "journal", clock=lambda: AT + loop.time())
    async with Played(home, cluster, SPEC.format(batch=2), journal=journal, fleet="recorded") as played:
        await played.settled()
        await played.apply(SPEC.format(batch=4))
        await played.settled()
        await played.operator.scale("chat", 3, "ada")
        await played.operator.cordon("inf2.48xlarge/0", "20-23", True, "ada")
        await played.operator.restart("small", "ada")
        await played.settled()
        failure = Failure("device-failed", "it is broken", reaction=Reaction.QUARANTINE)
        await cluster.find("small/1").report(phase=Phase.FAILED, failure=failure)
        await played.until(lambda: played.is_settled(), "small/1 runs elsewhere", 600)
        await played.operator.undo(None, "ada")
        await played.settled()
        await played.operator.drain("inf2.48xlarge/1", "ada")
        await asyncio.sleep(600.0)
        await played.kill()
    journal.close()


def record(folder: Path) -> None:
    """Writes the journal, and the same one after a compaction."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home:
        virtually(lambda: _record_journal(Path(home)))
        data = (Path(home) / "journal").read_bytes()
        (folder / "journal").write_bytes(data)
        compact = Journal(Path(home) / "journal", most_bytes=1, clock=lambda: AT + 1e6)
        compact.append(Event(level="info", reason="Compacted", message="the file was replaced"))
        compact.close()
        (folder / "journal-compacted").write_bytes((Path(home) / "journal").read_bytes())


if __name__ == "__main__":
    record(Path(sys.argv[1]))
