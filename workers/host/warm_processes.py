"""The warm processes of this host, which are started when a replica's start wants one."""

from __future__ import annotations

import logging
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from workers.host import fork_client
from workers.host.fork_server import ENVIRONMENT, IMPORTS, LEAST_BYTES
from workers.host.host_facts import available_memory

log = logging.getLogger(__name__)

RETRY_S = 60.0  # between two starts of one that ends by itself

SET_BY_RAY = "PYTHONBREAKPOINT"  # in the environment of a running worker of Ray, such as this process

PROGRAM = "import sys; from workers.host.fork_server import main; main(sys.argv[1], int(sys.argv[2]))"


@dataclass
class WarmProcess:
    """A running `fork_server`, and the path of its socket."""

    path: Path
    process: subprocess.Popen[bytes]
    started: float


class WarmProcesses:
    """One process for each engine and interpreter that starts ask for. Thread-safe."""

    def __init__(self, folder: Path, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        """``folder`` is for their sockets, and only this user can enter it. ``environment``: further variables, which
        other processes read of a fork, too, since the kernel shows those of its parent."""
        self._folder = folder
        self._environment = {**environment, **ENVIRONMENT}
        self._lock = threading.Lock()
        self._starts = 0
        self._processes: dict[tuple[str, str], WarmProcess] = {}

    def command(self, engine: str, python: str | None) -> str | None:
        """Returns what to run in place of ``python`` (None: this interpreter), as a shell reads it, and starts the
        warm process if needed. Returns None if a fresh process is to be started."""
        python = python or sys.executable
        with self._lock:
            warm = self._processes.get((engine, python))
            if warm is None or warm.process.poll() is not None:
                too_early = warm is not None and time.monotonic() < warm.started + RETRY_S
                if engine not in IMPORTS or too_early or available_memory() < LEAST_BYTES:
                    return None
                if warm is not None:
                    warm.path.unlink(missing_ok=True)
                warm = self._processes[engine, python] = self._start(engine, python)
        return shlex.join([python, "-I", "-S", fork_client.__file__, str(warm.path)])

    def _start(self, engine: str, python: str) -> WarmProcess:
        self._starts += 1
        path = self._folder / f"warm-{self._starts}.{os.getpid()}"
        path.unlink(missing_ok=True)
        own = {name: value for name, value in os.environ.items() if name != SET_BY_RAY}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(64)
            process = subprocess.Popen(
                [python, "-c", PROGRAM, engine, str(listener.fileno())],
                stdin=subprocess.PIPE,  # its end ends the process
                env={**own, **self._environment},
                cwd="/",  # which -c puts before the packages
                pass_fds=[listener.fileno()],
            )
        log.info("a warm process of the engine %s is started: pid %d", engine, process.pid)
        return WarmProcess(path, process, time.monotonic())
