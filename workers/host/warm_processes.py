"""The warm processes of this host: each is started when a start wants it, and ended when memory is short."""

from __future__ import annotations

import logging
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from workers.host import fork_client
from workers.host.fork_server import ENVIRONMENT, IMPORTS

log = logging.getLogger(__name__)

LEAST_GIB = 2.0
"""The available memory without which there is no warm process. One takes 0.45 GiB (measured with torch 2.13 and
transformers 5.23), which its forks share."""

RETRY_S = 60.0  # between two starts of one that ends by itself

SET_BY_RAY = "PYTHONBREAKPOINT"  # in the environment of its running workers, such as this process


@dataclass
class WarmProcess:
    """A running `fork_server`, and the path of its socket."""

    path: Path
    process: subprocess.Popen[bytes]
    started: float


class WarmProcesses:
    """One process for each engine and interpreter that starts ask for. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is for their sockets, and only this user can enter it."""
        self._folder = folder
        self._lock = threading.Lock()
        self._processes: dict[tuple[str, str], WarmProcess] = {}

    def command(self, engine: str, python: str | None) -> str | None:
        """Returns what to run in place of ``python`` (None: this interpreter), as a shell reads it, and starts the
        warm process if needed. Returns None if a fresh process is to be started."""
        python = python or sys.executable
        with self._lock:
            if psutil.virtual_memory().available < LEAST_GIB * 2**30:
                self._end_all()
                return None
            warm = self._processes.get((engine, python))
            if warm is None or warm.process.poll() is not None:
                if engine not in IMPORTS or (warm is not None and time.monotonic() < warm.started + RETRY_S):
                    return None
                warm = self._processes[engine, python] = self._start(engine, python)
        return shlex.join([python, "-I", "-S", fork_client.__file__, str(warm.path)])

    def end(self) -> None:
        """Ends all of them; their forks continue."""
        with self._lock:
            self._end_all()

    def _start(self, engine: str, python: str) -> WarmProcess:
        path = self._folder / f"warm-{len(self._processes)}.{os.getpid()}"
        path.unlink(missing_ok=True)
        environment = {name: value for name, value in os.environ.items() if name != SET_BY_RAY}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(64)
            process = subprocess.Popen(
                [python, "-c", f"from workers.host.fork_server import main; main({engine!r}, {listener.fileno()})"],
                stdin=subprocess.PIPE,  # its end ends the process
                env={**environment, **ENVIRONMENT},
                cwd="/",  # which -c puts before the packages
                pass_fds=[listener.fileno()],
            )
        log.info("a warm process of the engine %s is started: pid %d", engine, process.pid)
        return WarmProcess(path, process, time.monotonic())

    def _end_all(self) -> None:
        for warm in self._processes.values():
            warm.path.unlink(missing_ok=True)
            warm.process.kill()  # it may be importing
            warm.process.wait()
            assert warm.process.stdin is not None
            warm.process.stdin.close()
        self._processes.clear()
