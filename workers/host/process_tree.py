"""Ends the processes below a replica with it, such as compilers, which may run for an hour.

The kernel cannot end a whole tree when its root is killed: a parent-death signal is not inherited, and a process can
leave its group. So the root marks itself in the environment of its descendants, by which they are found even after
their parent has changed.

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

import psutil

from workers.host.lifetime import SLACK_S, process_start

MARK = "COREWRIGHT_ROOT"  # "PID@START": the root and its start time (lifetime.py)
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
    started = process_start(pid)
    assert started is not None
    mark = f"{pid}@{started:.2f}"
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
        end_marked(pid, started, END_S)
        raise
    finally:
        del os.environ[MARK]
        watcher.kill()
        watcher.wait()


def end_marked(pid: int, started: float, deadline_s: float) -> bool:
    """Kills the processes with the mark of a root. False: some still exist after ``deadline_s``."""
    deadline = time.monotonic() + deadline_s
    while processes := marked(pid, started):
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if time.monotonic() >= deadline:
            return not marked(pid, started)
        time.sleep(LOOK_S)
    return True


def marked(pid: int, started: float) -> list[psutil.Process]:
    """Returns this user's running processes with the mark, without this process and the root."""
    processes = []
    for other in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            process = psutil.Process(other)
            root, _, began = process.environ().get(MARK, "").partition("@")
            same = root == str(pid) and abs(float(began) - started) < SLACK_S
            if same and other not in (pid, os.getpid()) and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def main(mark: str) -> None:
    """Waits for the end of the root, this process's parent, and ends its tree."""
    pid, _, started = mark.partition("@")
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(int(pid))  # also becomes readable for a zombie, and while others hold its pipes
        if os.getppid() == int(pid):  # else it ended before the call
            waiting = select.poll()
            waiting.register(handle, select.POLLIN)
            waiting.poll()
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < QUIET_S:
        if marked(int(pid), float(started)):
            end_marked(int(pid), float(started), END_S)
            quiet_since = time.monotonic()
        time.sleep(LOOK_S)


if __name__ == "__main__":
    main(sys.argv[1])
