"""Runs a server as a child, and ends all of its processes: ``python -I keeper.py FOLDER GRACE_S COMMAND...``.

A server has processes of its own, such as vLLM's EngineCore and workers, which survive it when it is killed and keep
their cores. The keeper adopts them (it is a child subreaper), so it can tell when the last one is gone:

- Standard input is a pipe from the replica's actor. When it ends, however the actor ended, the server's processes get
  SIGTERM, and after ``GRACE_S`` seconds SIGKILL.
- When the server's first process ends by itself, the others get SIGKILL: nothing can reach them any more.

The keeper ends after the last of them, with the exit code of the first process (128 + N after signal N). Descriptors
that the actor passes on, such as locks of cores, are held until then. If the keeper is killed, the actor and
`host_facts.confirm_death` find the processes by the name of their working
directory, FOLDER, which the keeper removes in the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time

import psutil

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
POLL_S = 0.02
NOT_FOUND = 127  # the exit code of shells for a command that cannot be started
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def keep(folder: str, grace_s: float, command: list[str]) -> int:
    """Runs the command in ``folder`` until it ends or standard input does. Returns its exit code when no process of it
    is left."""
    os.chdir(folder)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # only the end of the pipe counts
    try:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_default_signals,
        ).pid
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be started: {error.strerror}\n")
        shutil.rmtree(folder, ignore_errors=True)
        return NOT_FOUND
    kill_at = time.monotonic()
    if not _ends_before_input(server):
        _signal_all(signal.SIGTERM)
        kill_at += grace_s
    code = 0
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:  # no child, so no descendant: each orphan would be one
            shutil.rmtree(folder, ignore_errors=True)
            return 128 - code if code < 0 else code
        if pid == server:
            code = os.waitstatus_to_exitcode(status)
        elif pid == 0:
            if time.monotonic() >= kill_at:
                _signal_all(signal.SIGKILL)
            time.sleep(POLL_S)


def _ends_before_input(server: int) -> bool:
    """Waits until the process or standard input ends; returns whether the process did."""
    waiting = select.poll()
    ended = os.pidfd_open(server)
    waiting.register(ended, select.POLLIN)
    waiting.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    while True:
        if ended in (ready := dict(waiting.poll())):
            return True
        if ready and not os.read(sys.stdin.fileno(), 4096):
            return False


def _default_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _signal_all(number: signal.Signals) -> None:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1], float(sys.argv[2]), sys.argv[3:]))
