"""Identifies processes by pid and start time since boot, which is unique until a reboot.

Seconds since the epoch would not work. The kernel counts a start time from the boot, and the boot time changes whenever
the wall clock is set: after the first NTP correction each process would look like another one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

SLACK_S = 1.0  # tolerance between two readings of one start time
_TICKS = os.sysconf("SC_CLK_TCK")


def since_boot() -> float:
    """Returns the seconds since boot, including time in suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@cache
def boot() -> str:
    """Returns the kernel's boot id; empty if it has none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


@cache
def pid_space() -> str:
    """Returns where pids mean the same processes: a boot of a kernel, and a pid namespace of it; empty if unknown."""
    with contextlib.suppress(OSError):
        return f"{boot()} {Path('/proc/self/ns/pid').readlink()}" if boot() else ""
    return ""


def process_start(pid: int) -> float | None:
    """Returns the start time of a process in seconds since boot; None: it is gone.

    Identifies a process together with its pid, since pids are reused. A zombie counts as gone: the kernel has released
    its resources.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19]) / _TICKS


class Process(NamedTuple):
    """What identifies a process on all machines."""

    pid: int
    started: float
    space: str  # by `pid_space`


def own_process() -> Process:
    """Returns this process."""
    started = process_start(os.getpid())
    assert started is not None
    return Process(os.getpid(), started, pid_space())


def end_process(process: Process) -> None:
    """Kills a process of this machine with SIGKILL, also a stopped one. Does nothing if it is gone, or elsewhere."""
    with contextlib.suppress(ProcessLookupError):
        if process.space == pid_space() and is_alive(process.pid, process.started):
            os.kill(process.pid, signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """Returns whether a process was stopped by a signal, or by a debugger."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t")
    return False


def is_alive(pid: int, started: float) -> bool:
    """Returns whether the process with this pid and start time is still running."""
    current = process_start(pid)
    return current is not None and abs(current - started) < SLACK_S
