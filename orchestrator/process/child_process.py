"""Runs work in a child process that may exit at any time, as a process that uses Ray may.

Ray's own code calls `_exit` when its raylet is gone, and no `finally` runs. The parent then reports the end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

from workers.host.process_tree import end_with


class Ended(NamedTuple):
    """The end of the child."""

    marks: bytes  # all marks that it has sent
    code: int  # its exit code, or the signal that killed it as a negative number


def apart(work: Callable[[Callable[[bytes], object]], int], signals: Collection[int]) -> Ended:
    """Run ``work`` in a child process, which ends with this one, and wait for it. Must be called on the main thread.

    ``work`` gets a function that sends marks to this process, and returns the exit code. ``signals`` of this process
    are forwarded to the child, which has the same handlers and its own process group, so that Ctrl-C does not reach it
    twice. They are forwarded until the caller sets other handlers.
    """
    reading, writing = os.pipe()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # so that no signal is lost between two handlers
    parent = os.getpid()
    _flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            end_with(parent)
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a terminal with `stty tostop` would stop it
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            code = work(partial(os.write, writing))
        except BaseException:  # noqa: BLE001 - it must not become a second copy of the caller
            with contextlib.suppress(OSError):
                traceback.print_exc()
        finally:
            try:
                _flush()
            finally:  # even if the streams fail
                os._exit(code)
    os.close(writing)
    process = os.pidfd_open(child)

    def forward(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ends just now
            signal.pidfd_send_signal(process, number)

    for number in signals:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _, status = os.waitpid(child, 0)
    for number in signals:  # the child is gone
        signal.signal(number, signal.SIG_IGN)
    os.set_blocking(reading, False)  # a process that the child has started may hold the other end
    try:
        marks = os.read(reading, 4096)
    except BlockingIOError:
        marks = b""
    os.close(reading)
    os.close(process)
    return Ended(marks, os.waitstatus_to_exitcode(status))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # they may be files on a full disk
            stream.flush()
