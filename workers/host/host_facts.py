"""Functions on this host: CPUs and memory, ends of processes, and logs. Does not import Ray."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import signal
import struct
import time
from itertools import chain
from pathlib import Path
from types import FrameType

import psutil

from placements.facts.cpu_layout import CpuLayout
from workers.host.lifetime import is_alive as is_alive
from workers.host.lifetime import process_start as process_start
from workers.host.process_tree import end_marked, exists

MOST_IDS = 2**14  # more CPUs than any machine has; limits the memory that an invalid list can take
_PART = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")


def parse_cpulist(text: str) -> tuple[int, ...] | None:
    """Returns the distinct ids, ascending; () for an empty list, None for an invalid one.

    The format of /sys/devices/system/node/node*/cpulist (empty for a memory-only node) and of
    ``NEURON_RT_VISIBLE_CORES`` (Neuron Runtime Configuration: "7", "3-6", "3,4,5,6", "3-5,6").
    """
    ids: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _PART.fullmatch(part)
        if match is None:
            return None
        first = int(match[1])
        last = int(match[2] or first)
        if last < first or last >= MOST_IDS:
            return None
        ids.update(range(first, last + 1))
    return tuple(sorted(ids))


log = logging.getLogger(__name__)

LOG_TAIL_BYTES = 64 * 1024
MAX_LOG_BYTES = 64 * 2**20  # a larger log is rotated
MARKS = (":job_id:", ":actor_name:", ":task_name:")  # prefixes of lines that Ray writes for its log reader
DMI_PRODUCT = "sys/devices/virtual/dmi/id/product_name"  # the instance type on EC2
ROOT_VARIABLE = "COREWRIGHT_HOST_ROOT"
NODE_VARIABLE = "COREWRIGHT_RAY_NODE"  # in the environment of each replica on a joined cluster
START_MARK = ":corewright_start:"  # line that a replica writes when it starts and when it is ready
HIDDEN = (*MARKS, START_MARK)
LAST_WORDS = 400  # lines
CGROUP = Path("/sys/fs/cgroup")  # cgroup v2
LOOK_S = 0.01  # interval of checks of killed processes
ENDING_S = 1.0  # for a process to exit after its connection has closed
_SIGNAL = re.compile(r"\*\*\* (SIG[A-Z]+) received at ", re.ASCII)
_PIDFD_INFO_EXIT = 1 << 3  # linux/pidfd.h
_PIDFD_GET_INFO = 3 << 30 | 64 << 16 | 0xFF << 8 | 11


def host_root() -> Path:
    """Returns the root of the host's /dev, /sys and /opt/aws/neuron: COREWRIGHT_HOST_ROOT in a container with the host
    mounted, else "/"."""
    return Path("/") / os.environ.get(ROOT_VARIABLE, "")


def usable_cpus() -> tuple[int, ...]:
    """Returns the CPU ids that this process may use, ascending: its affinity mask, limited by the cgroup's quota.

    ``os.cpu_count()`` would count the machine, not the container. A quota names no CPUs: they are evenly spread, so
    that each NUMA node has its share.
    """
    cpus = sorted(os.sched_getaffinity(0))
    quota = _cgroup_cpu_quota()
    count = len(cpus) if quota is None else min(len(cpus), max(1, quota))
    return tuple(cpus[i * len(cpus) // count] for i in range(count))


def cpu_layout(system: Path | None = None) -> CpuLayout | None:
    """Returns the physical cores of this machine and their NUMA nodes as the kernel lists them; None: unknown.

    The NUMA nodes of Neuron devices are not in it: the driver's devices are virtual, so that the kernel lists none.
    """
    system = system or host_root() / "sys/devices/system"
    siblings = set()
    node_of: dict[int, int] = {}
    try:
        for path in system.glob("cpu/cpu[0-9]*/topology/thread_siblings_list"):
            siblings.add(parse_cpulist(path.read_text().strip()))
        for path in system.glob("node/node[0-9]*/cpulist"):
            node_of |= dict.fromkeys(parse_cpulist(path.read_text().strip()) or (), int(path.parent.name[4:]))
    except (OSError, ValueError):
        return None
    cores = sorted(core for core in siblings if core)
    if not cores or len(cores) < len(siblings) or len(set(chain(*cores))) < sum(map(len, cores)):
        return None
    return CpuLayout(tuple(cores), tuple(node_of.get(core[0], 0) for core in cores))


def pin_to(cpus: str | None) -> None:
    """Pins all current and future threads of this process to a list of CPUs, such as "0-7,16".

    A plan for an instance type assumes all of its CPUs; a container may have fewer. If it has none of these, the mask
    is not changed.
    """
    if cpus is None:
        return
    mask = set(parse_cpulist(cpus) or ()) & os.sched_getaffinity(0)
    if not mask:
        log.warning("none of the planned CPUs (%s) are available to this process; its CPU mask is unchanged", cpus)
        return
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), mask)


def _cgroup_cpu_quota() -> int | None:
    with contextlib.suppress(OSError, ValueError):
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()  # cgroup v2: "200000 100000" or "max 100000"
        if limit != "max":
            return int(limit) // int(period)
    return None


def available_memory(cgroup: Path = CGROUP) -> int:
    """Returns the available memory in bytes: the machine's, or the rest of the cgroup's limit if that is less.

    Both include inactive page cache, which the kernel can drop.
    """
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):
        limit = int((cgroup / "memory.max").read_text())  # "max" without one
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        used = int((cgroup / "memory.current").read_text()) - int(statistics.get("inactive_file", 0))
        free = min(free, limit - used)
    return max(0, int(free))


def devices(dev: Path | None = None) -> tuple[int, ...]:
    """Returns n of each Neuron device /dev/neuron<n> of this machine or container, ascending."""
    names = (path.name.removeprefix("neuron") for path in (dev or host_root() / "dev").glob("neuron[0-9]*"))
    return tuple(sorted(int(name) for name in names if name.isascii() and name.isdigit()))


def has_devices(dev: Path | None = None) -> bool:
    """Returns whether this machine has Neuron devices."""
    return bool(devices(dev))


def instance_type(dev: Path | None = None, product: Path | None = None) -> str | None:
    """Returns the EC2 instance type if this machine has Neuron devices, else None."""
    dev, product = dev or host_root() / "dev", product or host_root() / DMI_PRODUCT
    if not has_devices(dev):
        return None
    try:
        return product.read_text().strip() or None
    except OSError:
        return None


def confirm_death(pid: int, started: float, deadline_s: float) -> bool:
    """Kills a process and all its descendants, including compilers that it left behind, and waits until they are gone.

    ``started`` distinguishes it from a later process with the same pid. False: some still exist at the deadline.
    """
    deadline = time.monotonic() + deadline_s
    processes: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        if is_alive(pid, started):
            process = psutil.Process(pid)
            processes = [process, *process.children(recursive=True)]
    for victim in processes:  # the root first, since it could start others
        with contextlib.suppress(psutil.Error):
            victim.kill()
    while any(map(exists, processes)) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    return end_marked(pid, started, max(0.0, deadline - time.monotonic())) and not any(map(exists, processes))


def node_mark(fleet: str, machine: str, node: str) -> str:
    """Returns the value of the variable for a fleet's replicas on one Ray node of a machine."""
    return f"{fleet}|{machine}|{node}"


def is_orphan(mark: str, current: str) -> bool:
    """True if the replica with a mark belongs to a former node of the machine of the ``current`` mark."""
    return mark != current and mark.rpartition("|")[0] == current.rpartition("|")[0]


def end_orphans(current: str, deadline_s: float) -> list[int]:
    """Kills the replicas of former nodes, with their processes. Returns the pids of those that still exist after
    ``deadline_s`` for each."""
    orphans = {}
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):
            mark = psutil.Process(pid).environ().get(NODE_VARIABLE, "")
            if is_orphan(mark, current) and (started := process_start(pid)) is not None:
                orphans[pid] = started
    if orphans:
        log.warning("processes of this machine's former Ray node are killed: %s", sorted(orphans))
    return [pid for pid, started in orphans.items() if not confirm_death(pid, started, deadline_s)]


def cut_log(path: Path, most: int = MAX_LOG_BYTES) -> None:
    """Copies a log that is too large to `NAME.log.1` and truncates it. The file itself stays, since other processes
    append to it through open descriptors. Raises OSError."""
    if path.stat().st_size <= most:
        return
    aside = path.with_name(f"{path.name}.1")
    aside.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+b") as log:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as copy:
            shutil.copyfileobj(log, copy)
        os.ftruncate(log.fileno(), 0)


class Endings:
    """Finds out how processes of this host ended, including those that are not children of this process.

    The kernel reports the exit status to holders of a pidfd (Linux 6.15 and later). Else the log may show it: Ray's
    handler writes the name of a signal that the process itself caused.
    """

    def __init__(self) -> None:
        self._pidfds: dict[tuple[int, float], int] = {}

    def attend(self, pid: int, started: float) -> None:
        """Starts to track a running process."""
        if (pid, started) not in self._pidfds:
            with contextlib.suppress(OSError):
                self._pidfds[pid, started] = pidfd = os.pidfd_open(pid)
                if not is_alive(pid, started):  # the pid has been reused
                    os.close(pidfd)
                    del self._pidfds[pid, started]

    def forget(self, pid: int, started: float) -> None:
        """Stops tracking a process."""
        if (pidfd := self._pidfds.pop((pid, started), None)) is not None:
            os.close(pidfd)

    def of(self, pid: int, started: float, log: Path) -> str | None:
        """Returns how it ended, such as "was killed by SIGKILL" or "exited with code 1"; None: unknown. Waits up to a
        second."""
        status = None
        if (pidfd := self._pidfds.get((pid, started))) is not None:
            deadline = time.monotonic() + ENDING_S
            while (status := _exit_status(pidfd)) is None and time.monotonic() < deadline:
                time.sleep(LOOK_S)
        if status is not None and os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            known = number in set(signal.Signals)  # others are real-time signals
            return f"was killed by {signal.Signals(number).name if known else f'signal {number}'}"
        named = [match[1] for line in last_words(log) if (match := _SIGNAL.match(line))]
        if named:
            return f"was killed by {named[-1]}"
        return None if status is None else f"exited with code {os.WEXITSTATUS(status)}"


def _exit_status(pidfd: int) -> int | None:
    """Returns the status as ``os.waitpid`` would; None: still running, or not supported by the kernel."""
    buffer = bytearray(64)  # struct pidfd_info: the mask first, the exit status last
    struct.pack_into("=Q", buffer, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, buffer)
    except OSError:
        return None
    mask, status = struct.unpack_from("=Q", buffer, 0)[0], struct.unpack_from("=i", buffer, 60)[0]
    return int(status) if mask & _PIDFD_INFO_EXIT else None


def log_sigterm() -> None:
    """Makes this process log SIGTERM to stderr before its existing handler runs, as Ray's handler does for other
    signals: under Ray it exits, which looks like any other exit from outside. Call it on the main thread."""
    before = signal.getsignal(signal.SIGTERM)

    def note(number: int, frame: FrameType | None) -> None:
        _write(2, f"*** SIGTERM received at time={time.time():.0f} ***\n")
        if callable(before):
            before(number, frame)

    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, note)


def mark_log(descriptor: int) -> None:
    """Writes the line after which ``last_words`` starts to read."""
    _write(descriptor, f"{START_MARK}\n")


def _write(descriptor: int, line: str) -> None:
    with contextlib.suppress(OSError):  # a full disk: continue without the line
        os.write(descriptor, line.encode())


def last_words(path: Path) -> list[str]:
    """Returns the lines that a replica has logged since it started or was ready, at most 400 lines and 64 KiB."""
    lines = _end_of(path)
    start = max((i for i, line in enumerate(lines) if line.startswith(START_MARK)), default=-1)
    return lines[start + 1 :][-LAST_WORDS:]


def _end_of(path: Path) -> list[str]:
    """Returns the lines of the last 64 KiB of a log; empty if there is no log."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []


def log_tail(path: Path, lines: int) -> list[str]:
    """Returns the last ``lines`` lines of a log, from its last 64 KiB. Empty if there is no log."""
    return [line for line in _end_of(path) if line.strip() and not line.startswith(HIDDEN)][-lines:]


def log_part(path: Path, offset: int | None, most: int, lines: int) -> tuple[str, int]:
    """Returns up to ``most`` bytes of a log from ``offset``, or else its last ``lines`` lines; and the next offset.

    A log shorter than ``offset`` has been rotated and is read from its start. The part ends with a line, unless a line
    is longer than ``most``.
    """
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            begin = max(0, size - most) if offset is None else offset if offset <= size else 0
            log.seek(begin)
            data = log.read(most)
    except FileNotFoundError:
        return "", 0
    complete = data[: data.rfind(b"\n") + 1] or (data if len(data) == most else b"")
    shown = [
        line for line in complete.decode(errors="replace").splitlines(keepends=True) if not line.startswith(HIDDEN)
    ]
    return "".join(shown if offset is not None else shown[-lines:]), begin + len(complete)


def command_of(pid: int | None) -> str | None:
    """Returns the command line of a process; None: not readable."""
    if pid is None:
        return None
    try:
        return " ".join(psutil.Process(pid).cmdline()).strip() or None
    except psutil.Error:
        return None
