"""When a process began, by a clock that nobody sets: with its pid that names it until the machine is started again.

Seconds since the epoch would not do. The kernel counts a start from the boot, and the time of the boot moves whenever
the wall clock is set: each process would seem to be another one after the first correction by NTP.
"""

from __future__ import annotations

import contextlib
import os
import time
from functools import cache
from pathlib import Path

SLACK_S = 1.0  # between two readings of one start
_TICKS = os.sysconf("SC_CLK_TCK")


def since_boot() -> float:
    """Seconds since the machine was started, those in which it was suspended too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@cache
def boot() -> str:
    """The id of this run of the kernel; empty where it tells none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def process_start(pid: int) -> float | None:
    """When the process began, in seconds since the machine was started, or None when it is gone. With the pid it names
    a process, since pids are used again. A zombie is gone: the kernel has released all that it held."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19]) / _TICKS


def is_alive(pid: int, started: float) -> bool:
    """Whether that very process still lives."""
    found = process_start(pid)
    return found is not None and abs(found - started) < SLACK_S
