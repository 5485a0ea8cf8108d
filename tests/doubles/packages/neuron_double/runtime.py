"""The Neuron runtime of one process: it holds cores, memory and NEFFs, and says what the real one says.

Written from AWS's runtime configuration, developer and troubleshooting guides. It computes nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from neuron_double import faults
from neuron_double.machine import GIB, instance, state

LOOK_S = 0.2  # neuron-ls looks at a lock for microseconds
NEFF_VERSION = 2  # the newest that this runtime loads; $NEURON_DOUBLE_NEFF_VERSION is what the compiler writes
STATUS = {
    1: "failure",
    2: "invalid",
    3: "invalid handle",
    4: "resource",
    5: "timeout",
    6: "hardware error",
    7: "queue full",
    9: "not enough cores",
    10: "unsupported NEFF version",
    11: "host memory",
    13: "uninitialized",
    14: "closed",
    101: "execution unit unrecoverable",
    1002: "bad input",
    1003: "numerical error",
    1004: "completed with error",
    1005: "NeuronCore busy",
    1006: "out of bounds",
    1200: "hardware error in collectives",
    1201: "HBM uncorrectable error",
    1202: "NeuronCore uncorrectable error",
    1203: "DMA abort",
    1204: "software queue overflow",
    1205: "repairable HBM error",
    1206: "network proxy error",
}
LASTING = {101, 1200, 1201, 1202, 1203}  # nothing runs in the process after one of these


class Runtime:
    """One process's use of the devices. Reserved from the first operation to the end of the process."""

    def __init__(self) -> None:
        self._cores: list[int] | None = None
        self._files: list[int] = []
        self._pid: int | None = None
        self._used = 0  # bytes on each of the own cores
        self._broken: int | None = None

    def claim(self) -> list[int]:
        """Reserve the cores that the environment names, at the first call; their numbers on the host.

        With neither NEURON_RT_VISIBLE_CORES nor NEURON_RT_NUM_CORES every core of the host. Raises RuntimeError with
        the runtime's message.
        """
        if self._cores is not None:
            if self._pid != os.getpid():
                raise self._failed("nrt_init", 13)  # the runtime does not live through a fork
            return self._cores
        machine = instance()
        visible, number = os.environ.get("NEURON_RT_VISIBLE_CORES"), os.environ.get("NEURON_RT_NUM_CORES")
        if visible:
            cores = _parse(visible)
            if cores[-1] >= machine.cores:
                raise _error(("nrt_init", f"Could not open the nd{cores[-1] // machine.cores_per_device}"))
            self._take(cores)
        elif number and int(number):
            self._take_free(int(number), machine.cores)
        else:
            self._take(list(range(machine.cores)))
        self._meet("claim", "nrt_init")
        assert self._cores is not None
        return self._cores

    @property
    def visible(self) -> int:
        """How many cores this process has. Within it they are numbered from 0."""
        return len(self.claim())

    @property
    def claimed(self) -> bool:
        """Returns whether it holds cores already."""
        return self._cores is not None

    def load_collectives(self, tp: int) -> None:
        """Join the first ``tp`` own cores. Raises RuntimeError for a group that the machine's links do not carry."""
        cores = self.claim()
        if tp > len(cores):
            raise _error(("nrt_load", f"Could not find VNC id {len(cores)}"))
        self._meet("load_collectives", "nrt_load_collectives")
        supported, legal = _topology(instance().family, tp, cores[0])
        if not legal:
            raise _error(
                ("nrt_load_collectives", f"Unsupported topology. Supported number of Neuron Cores is {supported}"),
                ("nrt_load_collectives", "status=4"),
            )

    def allocate(self, bytes_per_core: int, what: str) -> None:
        """Take HBM on each own core, for ``what`` ("tensors", "model code"). Raises RuntimeError when there is none."""
        cores = self.claim()
        self._meet("allocate", "nrt_tensor_allocate")
        most = instance().hbm_per_core_gib * GIB
        if self._used + bytes_per_core > most:
            size, used = bytes_per_core / 1024**2, self._used / GIB
            raise _error(
                ("mc_alloc", f"Failed to alloc DEVICE memory: {bytes_per_core}"),
                (
                    "mempool",
                    f"Failed to allocate {size:.3f}MB (usage: {what}) on ND {cores[0] // 2}:NC {cores[0] % 2}, "
                    f"current utilization: {used:.3f}GB of {most / GIB:.3f}GB",
                ),
                ("nrt_tensor_allocate", "status=4"),
            )
        self._used += bytes_per_core

    def execute(self) -> None:
        """One step on the device. Raises RuntimeError with the status of a planned fault, and of those that last."""
        self.claim()
        if self._broken is not None:
            raise self._failed("nrt_execute", self._broken)
        self._meet("execute", "nrt_execute")

    def load_neff(self, neff: str | Path | bytes) -> dict[str, Any]:
        """Load what ``compile_graph`` gave, or a file of that. Returns what the NEFF tells of itself.

        Raises RuntimeError for one that is too new, for other hardware or another LNC, or of more cores than are
        visible.
        """
        cores = self.claim()
        self._meet("load_neff", "nrt_load")
        text = neff if isinstance(neff, bytes) else Path(neff).read_bytes()
        try:
            record = dict(json.loads(text))
        except ValueError:
            raise self._failed("nrt_load", 2) from None
        if record["neff_version"] > NEFF_VERSION:
            raise _error(
                (
                    "nrt_load",
                    f"NEFF version mismatch supported: {NEFF_VERSION}.0 received: {record['neff_version']}.0",
                ),
                ("nrt_load", "status=10"),
            )
        machine = instance()
        if record["target"] != machine.target or (machine.lnc is not None and record["lnc"] != machine.lnc):
            raise _error(("nrt_load", f"status=2: compiled for {record['target']} with lnc {record['lnc']}"))
        if record["cores"] > len(cores):
            raise _error(("nrt_load", f"Could not find VNC id {len(cores)}"))
        return record

    def close(self) -> None:
        """nrt_close: the cores are free again. The end of the process, however it ends, does the same."""
        while self._files:
            os.close(self._files.pop())
        self._cores, self._pid, self._used, self._broken = None, None, 0, None

    def _take(self, cores: list[int]) -> None:
        files = _lock(cores)
        if len(files) < len(cores):
            for file in files.values():
                os.close(file)
            raise _error(
                (
                    "nrt_allocate_neuron_cores",
                    f"NeuronCore(s) not available - Requested:nc{cores[0]}-nc{cores[-1]} Available:{len(files)}",
                )
            )
        for file in files.values():
            os.ftruncate(file, 0)
            os.pwrite(file, str(os.getpid()).encode(), 0)
        self._files, self._cores, self._pid = list(files.values()), cores, os.getpid()

    def _take_free(self, number: int, most: int) -> None:
        """The first run of free cores that is long enough."""
        for start in range(most - number + 1):
            wished = list(range(start, start + number))
            if not set(wished) & set(held()):
                self._take(wished)
                return
        free = most - len(held())
        raise _error(
            ("nrt_allocate_neuron_cores", f"NeuronCore(s) not available - Requested:{number} Available:{free}")
        )

    def _meet(self, at: str, call: str) -> None:
        fault = faults.due(at, self._cores or ())
        if fault is None:
            return
        if "text" in fault:
            raise _error((call, fault["text"]))
        if fault["status"] in LASTING:
            self._broken = fault["status"]
        raise self._failed(call, fault["status"])

    def _failed(self, call: str, status: int) -> RuntimeError:
        return _error((call, f"status={status} message={STATUS.get(status, 'unknown')!r}"))


def held() -> dict[int, int | None]:
    """Cores of the machine that a living process holds, each with its pid."""
    cores: dict[int, int | None] = {}
    for path in sorted(state().glob("nc*.lock")):
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(file, 32, 0).decode()
            cores[int(path.stem[2:])] = int(text) if text.isdigit() else None
        finally:
            os.close(file)
    return cores


_runtime = Runtime()


def runtime() -> Runtime:
    """That of this process."""
    return _runtime


def reset_for_tests() -> None:
    """As in a process that has just begun."""
    _runtime.close()
    faults.forget()


def _parse(visible: str) -> list[int]:
    """``7``, ``3-6``, ``3,4`` or ``3-5,6``: one increasing run. Raises RuntimeError for what is not."""
    cores: list[int] = []
    try:
        for part in visible.split(","):
            first, _, last = part.partition("-")
            cores += range(int(first), int(last or first) + 1)
    except ValueError:
        raise _error(("nrt_init", f"NEURON_RT_VISIBLE_CORES: cannot parse {visible!r}")) from None
    if not cores or cores != list(range(cores[0], cores[0] + len(cores))):
        raise _error(("nrt_init", "Neuron cores are not contiguous"))
    return cores


def _lock(cores: Sequence[int]) -> dict[int, int]:
    """The descriptors of those that could be locked. The kernel lets go of them with the process."""
    files: dict[int, int] = {}
    until = time.monotonic() + LOOK_S
    for core in cores:
        file = os.open(state() / f"nc{core}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        while core not in files:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                files[core] = file
            except BlockingIOError:
                if time.monotonic() > until:
                    os.close(file)
                    break
                time.sleep(0.001)
    return files


def _topology(family: str, tp: int, start: int) -> tuple[str, bool]:
    """What the machine supports, in the runtime's words, and whether ``tp`` cores from ``start`` on are such a group.

    trn1: the device sets that AWS's Kubernetes scheduler allows. inf2: whole consecutive devices, any even number.
    """
    if family == "trn1":
        alignment = {1: 1, 2: 2, 8: 8, 16: 16}.get(tp, 32 if tp % 32 == 0 else 0)
        return "1, 2, 8, 16 or a multiple of 32", bool(alignment) and start % alignment == 0
    if family == "inf2":
        return "1 or an even number on consecutive devices", tp == 1 or (tp % 2 == 0 and start % 2 == 0)
    return "1, 2, 4, 8, 16, 32 or 64", tp in (1, 2, 4, 8, 16, 32, 64)


def _error(*lines: tuple[str, str]) -> RuntimeError:
    """Each line (who says it, what): logged on standard error as the runtime does, and raised as text."""
    for function, text in lines:
        when = datetime.now().strftime("%Y-%b-%d %H:%M:%S.%f")
        sys.stderr.write(f"{when} {os.getpid():5}:{os.getpid():<5} ERROR   NRT:{function:<40}{text}\n")
    sys.stderr.flush()
    return RuntimeError("\n".join(f"{function} {text}" for function, text in lines))
