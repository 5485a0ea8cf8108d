"""Claims of emulated NeuronCores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
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
    """Starts a process that holds first..last-1."""
    arguments = [sys.executable, "-c", HOLD, str(folder), str(first), str(last)]
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_claim_of_a_taken_core_fails_with_its_owner(tmp_path: Path) -> None:
    """The message is that of the Neuron runtime."""
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


def test_the_holders_of_cores_are_shown_by_ranges() -> None:
    error = CoresTaken([0, 7], {0: 71, 1: 71, 2: 71, 4: 71, 5: 80, 7: None})
    assert error.held == "nc0-nc2 by pid 71, nc4 by pid 71, nc5 by pid 80, nc7 by pid unknown"


def test_a_failed_claim_holds_no_core(tmp_path: Path) -> None:
    """Also none of those that were free."""
    other = hold(tmp_path, 4, 5)
    try:
        with pytest.raises(CoresTaken):
            CoreClaim(tmp_path, range(3, 6))
        assert held_cores(tmp_path) == {4: other.pid}
    finally:
        other.kill()
        other.communicate()


def test_the_cores_of_a_killed_process_are_free(tmp_path: Path) -> None:
    """The kernel releases its locks, also after kill -9."""
    other = hold(tmp_path, 0, 8)
    os.kill(other.pid, signal.SIGKILL)
    other.communicate()

    claim = CoreClaim(tmp_path, range(8))

    assert held_cores(tmp_path) == dict.fromkeys(range(8), os.getpid())
    claim.release()
    assert held_cores(tmp_path) == {}


def test_a_claimed_core_never_shows_its_former_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that comes between the lock and the name of the owner waits for both."""
    (tmp_path / "nc3.lock").write_text("999999")
    seen: list[dict[int, int | None]] = []
    reader = threading.Thread(target=lambda: seen.append(held_cores(tmp_path)))
    begun = threading.Event()
    glob = Path.glob

    def noticed(path: Path, pattern: str) -> Iterator[Path]:
        begun.set()
        return glob(path, pattern)

    def write(descriptor: int, text: bytes, offset: int) -> int:
        reader.start()
        assert begun.wait(10.0)
        return pwrite(descriptor, text, offset)

    pwrite = os.pwrite
    monkeypatch.setattr(Path, "glob", noticed)
    monkeypatch.setattr("workers.host.core_claims.os.pwrite", write)
    claim = CoreClaim(tmp_path, [3])
    reader.join()
    claim.release()

    assert seen == [{3: os.getpid()}]


def test_a_claim_waits_for_a_check_of_its_cores(tmp_path: Path) -> None:
    """`held_cores` holds the guard for microseconds."""
    stopped = threading.Event()

    def check() -> None:
        while not stopped.is_set():
            held_cores(tmp_path)

    CoreClaim(tmp_path, range(24)).release()
    checker = threading.Thread(target=check)
    checker.start()
    try:
        for _ in range(50):
            CoreClaim(tmp_path, range(24)).release()
    finally:
        stopped.set()
        checker.join()
