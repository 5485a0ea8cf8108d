"""Claims emulated NeuronCores for a process, with one locked file per core.

The kernel releases the locks of a process that ends, as the Neuron driver does with real cores. A taken core raises the
message of the Neuron runtime, so that both are handled alike. A guard file is locked by each process that claims cores
or reads their owners: a lock and the name of its owner appear together, never with the core's former owner.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from placements.facts.core_range import runs
from workers.host import file_lock

GUARD_FILE = "claims.lock"
MAX_GUARD_S = 1.0  # it is held for microseconds; a process that was stopped meanwhile must not stop all others
POLL_S = 0.001


class CoresTaken(Exception):
    """Cores that other processes hold. ``owners``: taken core -> the owner's pid from the lock file."""

    def __init__(self, requested: list[int], owners: dict[int, int | None]) -> None:
        # The runtime's message; see `nrt_allocate_neuron_cores` in AWS's troubleshooting guide.
        super().__init__(
            f"nrt_allocate_neuron_cores NeuronCore(s) not available - "
            f"Requested:nc{requested[0]}-nc{requested[-1]} Available:{len(requested) - len(owners)}"
        )
        self.owners = owners

    @property
    def held(self) -> str:
        """The holders for display: `nc0-nc7 by pid 71, nc9 by pid 80`."""
        holders = []
        for cores, pid in runs(self.owners):
            last = f"-nc{cores.last}" if len(cores) > 1 else ""
            holders.append(f"nc{cores.first}{last} by pid {pid or 'unknown'}")
        return ", ".join(holders)


class CoreClaim:
    """The locks of one process on its cores, until ``release`` or the end of the process."""

    def __init__(self, folder: Path, cores: Iterable[int]) -> None:
        """Locks all of ``cores`` in ``folder``, or none. Raises CoresTaken with the owners."""
        self.cores = sorted(cores)
        self._files: list[int] = []
        folder.mkdir(parents=True, exist_ok=True)
        taken: dict[int, int | None] = {}
        with _guard(folder):
            for core in self.cores:
                descriptor = file_lock.opened(_lock_file(folder, core))
                if file_lock.try_lock(descriptor):
                    self._files.append(descriptor)
                else:
                    taken[core] = _owner(descriptor)
                    os.close(descriptor)
            if taken:
                self.release()
                raise CoresTaken(self.cores, taken)
            for descriptor in self._files:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The open lock files. A process that inherits them holds the cores, too."""
        return tuple(self._files)

    def release(self) -> None:
        """Releases all cores before the end of the process (the engine must be closed already)."""
        while self._files:
            os.close(self._files.pop())


def held_cores(folder: Path) -> dict[int, int | None]:
    """Returns the held cores of ``folder`` with their owners' pids."""
    held: dict[int, int | None] = {}
    paths = sorted(folder.glob("nc*.lock"))
    with _guard(folder) if paths else contextlib.nullcontext():
        for path in paths:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if not file_lock.try_lock(descriptor, shared=True):
                    held[int(path.stem.removeprefix("nc"))] = _owner(descriptor)
            finally:
                os.close(descriptor)
    return held


@contextlib.contextmanager
def _guard(folder: Path) -> Iterator[None]:
    descriptor = file_lock.opened(folder / GUARD_FILE)
    try:
        file_lock.lock_within(descriptor, MAX_GUARD_S, POLL_S)
        yield
    finally:
        os.close(descriptor)


def _lock_file(folder: Path, core: int) -> Path:
    return folder / f"nc{core}.lock"


def _owner(descriptor: int) -> int | None:
    text = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
    return int(text) if text.isdigit() else None
