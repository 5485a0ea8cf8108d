"""A controller that is killed while it makes its journal shorter, or opens it, loses no record that was confirmed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from orchestrator.control.journal.journal import Journal

KILLED = """
import os, signal, sys
from pathlib import Path
from orchestrator.control.journal.journal import Journal
from orchestrator.control.journal.journal_records import Scale

path, left = Path(sys.argv[1]), int(sys.argv[2])
armed = False

def counted(function):
    def call(*arguments, **options):
        global left
        if armed:
            if left == 0:
                if function is write:  # a part of it is on the disk
                    write(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
        return function(*arguments, **options)
    return call

write = os.write
journal = Journal(path, most_bytes=2_000, clock=lambda: 1.0)
for name in ("open", "write", "fsync", "close", "ftruncate", "unlink", "rename"):
    setattr(os, name, counted(getattr(os, name)))
compact = journal._compact
def armed_compact(path):
    global armed
    armed = True
    compact(path)
    print("compacted", flush=True)
    os._exit(0)
journal._compact = armed_compact
for count in range(10_000):
    confirmed = journal.append(Scale(model=f"m{count % 7}", count=count, by="ann"))
"""
MOST_STEPS = 30


def _killed_at(path: Path, step: int) -> bool:
    """Returns whether it was killed before that file operation of its first compaction; False when it has fewer."""
    process = subprocess.run([sys.executable, "-c", KILLED, str(path), str(step)], check=False, capture_output=True)
    if process.returncode == 0:
        assert process.stdout == b"compacted\n"
        return False
    assert process.returncode == -signal.SIGKILL, process.stderr
    return True


def test_a_kill_at_any_step_of_a_compaction_loses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    """At each file operation in turn; a write is cut in its middle."""
    whole = tmp_path / "whole" / "journal"
    whole.parent.mkdir()
    assert not _killed_at(whole, MOST_STEPS * 10)
    journal = Journal(whole)
    expected = journal.state()
    journal.close()
    steps = 0
    for step in range(MOST_STEPS):
        path = tmp_path / str(step) / "journal"
        path.parent.mkdir()
        if not _killed_at(path, step):
            break
        steps += 1
        journal = Journal(path)
        assert (step, journal.damage, journal.state()) == (step, [], expected)
        journal.close()
        assert {left.name for left in path.parent.iterdir()} <= {"journal", "journal.lock"}
    assert 5 < steps < MOST_STEPS
