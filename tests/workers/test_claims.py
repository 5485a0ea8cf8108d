"""The locks that stand for NeuronCores on an emulated host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from workers.host.core_claims import CoreClaim, CoresTaken, held_cores

HOLD = """
import sys, pathlib
from workers.host.core_claims import CoreClaim
claim = CoreClaim(pathlib.Path(sys.argv[1]), range(int(sys.argv[2]), int(sys.argv[3])))
print("held", flush=True)
sys.stdin.read()
"""


def hold(folder: Path, first: int, last: int) -> subprocess.Popen[str]:
    """Another process that holds first..last-1."""
    arguments = [sys.executable, "-c", HOLD, str(folder), str(first), str(last)]
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_core_that_another_process_holds_gives_the_runtimes_message_and_the_owner(tmp_path: Path) -> None:
    """Two processes can never hold one core, and the refused one learns who has it, in the runtime's words."""
    other = hold(tmp_path, 4, 8)
    try:
        with pytest.raises(CoresTaken) as refused:
            CoreClaim(tmp_path, range(6, 10))
    finally:
        other.kill()
        other.communicate()

    assert str(refused.value) == (
        "nrt_allocate_neuron_cores NeuronCore(s) not available - Requested:nc6-nc9 Available:2"
    )
    assert refused.value.owners == {6: other.pid, 7: other.pid}


def test_who_holds_cores_is_told_by_runs() -> None:
    """Each process once for each run of its cores."""
    taken = CoresTaken([0, 7], {0: 71, 1: 71, 2: 71, 4: 71, 5: 80, 7: None})
    assert taken.held == "nc0-nc2 by pid 71, nc4 by pid 71, nc5 by pid 80, nc7 by pid unknown"


def test_a_refused_claim_leaves_nothing_held(tmp_path: Path) -> None:
    """A claim takes all of its cores or none."""
    other = hold(tmp_path, 4, 5)
    try:
        with pytest.raises(CoresTaken):
            CoreClaim(tmp_path, range(3, 6))
        assert held_cores(tmp_path) == {4: other.pid}
    finally:
        other.kill()
        other.communicate()


def test_the_kernel_frees_the_cores_of_a_killed_process(tmp_path: Path) -> None:
    """After kill -9 the next process has the cores."""
    other = hold(tmp_path, 0, 8)
    os.kill(other.pid, signal.SIGKILL)
    other.communicate()

    claim = CoreClaim(tmp_path, range(8))

    assert held_cores(tmp_path) == dict.fromkeys(range(8), os.getpid())
    claim.release()
    assert held_cores(tmp_path) == {}


def test_a_claim_is_not_refused_by_someone_who_only_looks(tmp_path: Path) -> None:
    """`held_cores` has each lock for a moment; a claim made in that moment waits for it."""
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            held_cores(tmp_path)

    CoreClaim(tmp_path, range(24)).release()
    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(50):
            CoreClaim(tmp_path, range(24)).release()
    finally:
        over.set()
        looking.join()
