"""What is asked of a host itself: its facts, the death of a process, the end of a log. No Ray inside."""

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
from pathlib import Path
from types import FrameType

import psutil

from workers.host.facts.cpu_list import parse_cpulist
from workers.host.lifetime import is_alive as is_alive
from workers.host.lifetime import process_start as process_start
from workers.host.process_tree import end_marked

log = logging.getLogger(__name__)

LOG_TAIL_BYTES = 64 * 1024
MAX_LOG_BYTES = 64 * 2**20  # then what it holds is set aside
MARKS = (":job_id:", ":actor_name:", ":task_name:")  # lines that Ray writes for its own log reader
DMI_PRODUCT = "sys/devices/virtual/dmi/id/product_name"  # the instance type on EC2
ROOT_VARIABLE = "COREWRIGHT_HOST_ROOT"
START_MARK = ":corewright_start:"  # a line that a replica writes when it starts, and when it is ready
HIDDEN = (*MARKS, START_MARK)
LAST_WORDS = 400  # lines
CGROUP = Path("/sys/fs/cgroup")  # of version 2
LOOK_S = 0.01  # between two looks at processes that were killed
ENDING_S = 1.0  # for a process whose connection has ended to be dead
_SIGNAL = re.compile(r"\*\*\* (SIG[A-Z]+) received at ", re.ASCII)
_PIDFD_INFO_EXIT = 1 << 3  # linux/pidfd.h
_PIDFD_GET_INFO = 3 << 30 | 64 << 16 | 0xFF << 8 | 11


def host_root() -> Path:
    """Where the host's own /dev, /sys and /opt/aws/neuron are: COREWRIGHT_HOST_ROOT in a container into which the host
    is mounted, else "/"."""
    return Path("/") / os.environ.get(ROOT_VARIABLE, "")


def usable_cpus() -> tuple[int, ...]:
    """The CPU ids that this process may use, ascending: the affinity mask, cut to the cgroup's quota where one is set.

    Not ``os.cpu_count()``, which counts the machine and not the container.
    """
    cpus = sorted(os.sched_getaffinity(0))
    quota = _cgroup_cpu_quota()
    return tuple(cpus[: max(1, quota)] if quota is not None else cpus)


def pin_to(cpus: str | None) -> None:
    """Set the CPU mask of this process (a list as in "0-7,16"), for all threads that exist and are to come.

    A plan for an instance type is for all of its CPUs; a container may have fewer. With none of them the mask stays.
    """
    if cpus is None:
        return
    mask = set(parse_cpulist(cpus) or ()) & os.sched_getaffinity(0)
    if not mask:
        log.warning("this process may use none of the CPUs that were planned for it (%s): it keeps what it has", cpus)
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
    """Bytes that processes may still take: what the machine has free, cut to what the cgroup's limit leaves.

    Pages of files that nobody has read lately count as free in both: the kernel drops them.
    """
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):
        limit = int((cgroup / "memory.max").read_text())  # "max" without one
        told = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        used = int((cgroup / "memory.current").read_text()) - int(told.get("inactive_file", 0))
        free = min(free, limit - used)
    return max(0, int(free))


def instance_type(dev: Path | None = None, product: Path | None = None) -> str | None:
    """The EC2 instance type when this machine has Neuron devices, else None."""
    dev, product = dev or host_root() / "dev", product or host_root() / DMI_PRODUCT
    if not any(dev.glob("neuron[0-9]*")):
        return None
    try:
        return product.read_text().strip() or None
    except OSError:
        return None


def confirm_death(pid: int, started: float, deadline_s: float) -> bool:
    """Kill that very process if it lives, with all that it has started, and wait until they are gone.

    Compilers too that it left behind when it died. False when some of them are still there at the deadline.
    """
    deadline = time.monotonic() + deadline_s
    left: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        if is_alive(pid, started):
            process = psutil.Process(pid)
            left = [process, *process.children(recursive=True)]
    for one in left:  # the root first: it would start others
        with contextlib.suppress(psutil.Error):
            one.kill()
    while any(map(_lives, left)) and time.monotonic() < deadline:  # a zombie is dead, though nobody may ask for it
        time.sleep(LOOK_S)
    return end_marked(pid, started, max(0.0, deadline - time.monotonic())) and not any(map(_lives, left))


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def cut_log(path: Path, most: int = MAX_LOG_BYTES) -> None:
    """Set the content of a log that is too large aside, as `NAME.log.1`, and begin it anew. The log itself stays, since
    descriptors of processes that know nothing of this append to it. Raises OSError."""
    if path.stat().st_size <= most:
        return
    aside = path.with_name(f"{path.name}.1")
    aside.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+b") as log:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as copy:
            shutil.copyfileobj(log, copy)
        os.ftruncate(log.fileno(), 0)


class Endings:
    """How processes of this host ended, also those that are no children of this process.

    The kernel tells it who has held a pidfd of the process since before (Linux 6.15 and later). Else the log may: Ray's
    handler writes the name of a signal that the process itself has caused.
    """

    def __init__(self) -> None:
        self._pidfds: dict[tuple[int, float], int] = {}

    def attend(self, pid: int, started: float) -> None:
        """Begin with a process that lives."""
        if (pid, started) not in self._pidfds:
            with contextlib.suppress(OSError):
                self._pidfds[pid, started] = pidfd = os.pidfd_open(pid)
                if not is_alive(pid, started):  # the pid is another's by now
                    os.close(pidfd)
                    del self._pidfds[pid, started]

    def forget(self, pid: int, started: float) -> None:
        """It is dead, and nobody asks how it ended."""
        if (pidfd := self._pidfds.pop((pid, started), None)) is not None:
            os.close(pidfd)

    def of(self, pid: int, started: float, log: Path) -> str | None:
        """Such as "was killed by SIGKILL" or "exited with code 1"; None where nothing tells. Waits for a second."""
        status = None
        if (pidfd := self._pidfds.get((pid, started))) is not None:
            deadline = time.monotonic() + ENDING_S
            while (status := _exit_status(pidfd)) is None and time.monotonic() < deadline:
                time.sleep(LOOK_S)
        if status is not None and os.WIFSIGNALED(status):
            return f"was killed by {_signal_name(os.WTERMSIG(status))}"
        named = [match[1] for line in last_words(log) if (match := _SIGNAL.match(line))]
        if named:
            return f"was killed by {named[-1]}"
        return None if status is None else f"exited with code {os.WEXITSTATUS(status)}"


def _exit_status(pidfd: int) -> int | None:
    """As of ``os.waitpid``; None while the process lives, and where the kernel does not tell."""
    told = bytearray(64)  # struct pidfd_info: the mask first, the exit status last
    struct.pack_into("=Q", told, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, told)
    except OSError:
        return None
    mask, status = struct.unpack_from("=Q", told, 0)[0], struct.unpack_from("=i", told, 60)[0]
    return int(status) if mask & _PIDFD_INFO_EXIT else None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time one


def log_sigterm() -> None:
    """Have this process name SIGTERM on stderr, as Ray's handler does with other signals, before what it does already
    at that signal: under Ray it exits, which from outside looks like any other exit. Call it on the main thread."""
    before = signal.getsignal(signal.SIGTERM)

    def note(number: int, frame: FrameType | None) -> None:
        _write(2, f"*** SIGTERM received at time={time.time():.0f} ***\n")
        if callable(before):
            before(number, frame)

    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, note)


def mark_log(descriptor: int) -> None:
    """Write the line from which ``last_words`` reads on."""
    _write(descriptor, f"{START_MARK}\n")


def _write(descriptor: int, line: str) -> None:
    with contextlib.suppress(OSError):  # a log on a full disk: without the line the process goes on, or ends
        os.write(descriptor, line.encode())


def last_words(path: Path) -> list[str]:
    """What the replica of that log has written since it started, or was ready: at most 400 lines and 64 KiB."""
    try:
        lines = _end_of(path).splitlines()
    except FileNotFoundError:
        return []
    start = max((i for i, line in enumerate(lines) if line.startswith(START_MARK)), default=-1)
    return lines[start + 1 :][-LAST_WORDS:]


def _end_of(path: Path) -> str:
    with path.open("rb") as log:
        log.seek(0, os.SEEK_END)
        log.seek(max(0, log.tell() - LOG_TAIL_BYTES))
        return log.read().decode(errors="replace")


def log_tail(path: Path, lines: int) -> list[str]:
    """The last ``lines`` lines of a log, without reading more than its last 64 KiB. Empty when there is no log."""
    try:
        text = _end_of(path)
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip() and not line.startswith(HIDDEN)][-lines:]


def log_part(path: Path, offset: int | None, most: int, lines: int) -> tuple[str, int]:
    """At most ``most`` bytes of a log from ``offset`` on, or without one its last ``lines`` lines; and the next offset.

    A log that is shorter than ``offset`` was begun anew, and is read from its start. Ends at a line's end, unless one
    line is longer than ``most``.
    """
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            begin = max(0, size - most) if offset is None else offset if offset <= size else 0
            log.seek(begin)
            data = log.read(most)
    except FileNotFoundError:
        return "", 0
    whole = data[: data.rfind(b"\n") + 1] or (data if len(data) == most else b"")
    shown = [line for line in whole.decode(errors="replace").splitlines(keepends=True) if not line.startswith(HIDDEN)]
    return "".join(shown if offset is not None else shown[-lines:]), begin + len(whole)


def command_of(pid: int | None) -> str | None:
    """What that process was started as, or calls itself; None when it cannot be found out."""
    if pid is None:
        return None
    try:
        return " ".join(psutil.Process(pid).cmdline()).strip() or None
    except psutil.Error:
        return None
