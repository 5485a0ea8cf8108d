"""The processes below a replica: compilers, which work on for an hour, and must not outlive whom they work for.

Nothing of the kernel ends a whole tree when its root is killed: a parent-death signal is not inherited, a process group
can be left. So the root writes itself into the environment that its children get, and theirs: by that mark each is
found, whoever has become its parent.

1. While a root compiles, a process of its own watches it (``watched``), and ends the tree when the root dies.
2. Whoever must know that a replica is dead ends its tree by the same mark (``host.confirm_death``).
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

MARK = "COREWRIGHT_ROOT"  # "PID@START": the root, and when it began in seconds since the epoch
PR_SET_PDEATHSIG = 1  # linux/prctl.h
QUIET_S = 0.2  # so long no process of the tree may have been found, for one that was just being started
LOOK_S = 0.02  # between two looks
END_S = 2.0  # for killed processes to be gone


def end_with(parent: int) -> None:
    """Be killed when ``parent`` ends, however it ends: the kernel sees to it. Says nothing of this one's children."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """What is started meanwhile ends with this process, however it ends; and with what is done here, if that fails."""
    pid = os.getpid()
    started = process_start(pid)
    assert started is not None
    mark = f"{pid}@{started:.2f}"
    watcher = subprocess.Popen(
        [sys.executable, "-m", "workers.host.process_tree", mark],
        stdin=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name != MARK},
        start_new_session=True,  # Ctrl-C, and whoever ends the group of this process, do not reach it
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
    """Kill the processes that bear the mark of that root. False: some are there still after ``deadline_s``."""
    deadline = time.monotonic() + deadline_s
    while found := marked(pid, started):
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if time.monotonic() >= deadline:
            return not marked(pid, started)
        time.sleep(LOOK_S)
    return True


def marked(pid: int, started: float) -> list[psutil.Process]:
    """Those of this user that live, this one excepted."""
    found = []
    for other in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            process = psutil.Process(other)
            root, _, began = process.environ().get(MARK, "").partition("@")
            same = root == str(pid) and abs(float(began) - started) < SLACK_S
            if same and other not in (pid, os.getpid()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def main(mark: str) -> None:
    """Wait for the end of the root, which is this one's parent, and end its tree."""
    pid, _, started = mark.partition("@")
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(int(pid))  # tells the end of a zombie too, and of one that others hold pipes of
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
