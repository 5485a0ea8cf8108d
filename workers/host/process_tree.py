"""Ends the processes below a replica with it, such as compilers, which may run for an hour.

The kernel cannot end a whole tree when its root is killed: a parent-death signal is not inherited, and a process can
leave its group. So the root marks itself in the environment of its descendants, or in the name of their working
directory, by which they are found even after their parent has changed. The directory is for programs that overwrite
their environment with a title, as vLLM's processes do.

1. While a root compiles, a watcher process (``watched``) ends the tree when the root dies.
2. ``host_facts.confirm_death`` ends the tree of a dead replica by the same mark.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from workers.host.lifetime import SLACK_S, process_start

MARK = "COREWRIGHT_ROOT"  # "PID@START" or "PID@START+GRACE": see ``mark_of``
PR_SET_PDEATHSIG = 1  # linux/prctl.h
QUIET_S = 0.2  # time without a process of the tree before it counts as ended, for one that is just starting
LOOK_S = 0.02  # interval of the search
END_S = 2.0  # for killed processes to be gone


def end_with(parent: int) -> None:
    """Makes the kernel kill this process when ``parent`` ends. Does not cover this process's children."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Ends processes that are started inside the context when this process dies, or when the context raises."""
    pid = os.getpid()
    mark = mark_of(pid)
    watcher = subprocess.Popen(
        [sys.executable, "-m", "workers.host.process_tree", mark],
        stdin=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name != MARK},
        start_new_session=True,  # not reached by Ctrl-C or a kill of this process's group
    )
    os.environ[MARK] = mark
    try:
        yield
    except BaseException:
        end_marked(pid, _started(mark), END_S)
        raise
    finally:
        del os.environ[MARK]
        watcher.kill()
        watcher.wait()


def mark_of(pid: int, grace_s: float = 0.0) -> str:
    """Returns the mark of a living root's descendants: its pid and start time (lifetime.py), and the seconds that they
    have to end by themselves after it."""
    return f"{pid}@{process_start(pid):.2f}" + (f"+{grace_s:g}" if grace_s else "")


def _started(mark: str) -> float:
    return float(mark.partition("@")[2].partition("+")[0])


def end_marked(pid: int, started: float, deadline_s: float) -> bool:
    """Kills the processes with the mark of a root, after the grace in it. False: some still exist after
    ``deadline_s``."""
    begun, known = time.monotonic(), dict[psutil.Process, float]()
    while True:
        known |= dict(marked(pid, started))  # a dying one has no mark any more, but may still have its files open
        known = {process: grace_s for process, grace_s in known.items() if exists(process)}
        if not known:
            return True
        waited_s = time.monotonic() - begun
        for process, grace_s in known.items():
            if waited_s >= grace_s:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        if waited_s >= deadline_s:
            return False
        time.sleep(LOOK_S)


def exists(process: psutil.Process) -> bool:
    """Returns whether a process has not ended, with all its threads; a zombie has."""
    try:
        return process.is_running() and (process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
    except psutil.NoSuchProcess:
        return False


def marked(pid: int, started: float) -> list[tuple[psutil.Process, float]]:
    """Returns this user's running processes with the mark, and their grace, without this process and the root."""
    processes = []
    for other in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            process = psutil.Process(other)
            mark = process.environ().get(MARK) or Path(process.cwd()).name
            root, _, rest = mark.partition("@")
            if root != str(pid) or other in (pid, os.getpid()):
                continue
            began, _, grace_s = rest.partition("+")
            if abs(float(began) - started) < SLACK_S and exists(process):
                processes.append((process, float(grace_s or 0.0)))
    return processes


def main(mark: str) -> None:
    """Waits for the end of the root, this process's parent, and ends its tree."""
    pid, _, _ = mark.partition("@")
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(int(pid))  # also becomes readable for a zombie, and while others hold its pipes
        if os.getppid() == int(pid):  # else it ended before the call
            waiting = select.poll()
            waiting.register(handle, select.POLLIN)
            waiting.poll()
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < QUIET_S:
        if marked(int(pid), _started(mark)):
            end_marked(int(pid), _started(mark), END_S)
            quiet_since = time.monotonic()
        time.sleep(LOOK_S)


if __name__ == "__main__":
    main(sys.argv[1])
