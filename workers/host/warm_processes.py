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
from workers.host.fork_server import ENVIRONMENT, IMPORTS, LEAST_BYTES, refusal
from workers.host.host_facts import available_memory

log = logging.getLogger(__name__)

RETRY_S = 60.0  # between two starts of one that ends by itself

PROGRAM = "import sys; from workers.host.fork_server import main; main(sys.argv[1], int(sys.argv[2]))"


@dataclass
class WarmProcess:
    """A running `fork_server`, the path of its socket, and what to run as a Python that is its fork."""

    path: Path
    process: subprocess.Popen[bytes]
    command: str  # as a shell reads it
    started: float

    @property
    def is_usable(self) -> bool:
        """False once it has ended, or a cleaner of temporary folders has removed its socket."""
        return self.process.poll() is None and self.path.exists()


class WarmProcesses:
    """One process for each engine and interpreter that starts ask for. Thread-safe."""

    def __init__(self, folder: Path, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        """``folder`` is for their sockets, and only this user can enter it. ``environment``: further variables, which
        other processes read of a fork, too, since the kernel shows those of its parent."""
        self._folder = folder
        self._marks = environment
        self._lock = threading.Lock()
        self._starts = 0
        self._processes: dict[tuple[str, str], WarmProcess] = {}

    def command(self, engine: str, python: str | None, variables: Mapping[str, str]) -> str | None:
        """Returns what to run in place of ``python`` (None: this interpreter), as a shell reads it, and starts the warm
        process if needed. None: a fresh process is to be started. ``variables``: those that its process will set."""
        own = {**os.environ, **self._marks}
        reason = refusal({**own, **variables}, {**own, **ENVIRONMENT})
        if reason is None:
            with self._lock:
                warm = self._warm(engine, python or sys.executable)
            if isinstance(warm, WarmProcess):
                return warm.command
            reason = warm
        log.info("a replica on the engine %s starts as a fresh process: %s", engine, reason)
        return None

    def keep(self, engines: Mapping[str, str | None]) -> None:
        """Starts the processes of these engines, with the Python of each, and ends all others."""
        wanted = {(engine, python or sys.executable) for engine, python in engines.items()}
        with self._lock:
            for key in self._processes.keys() - wanted:
                self._end(self._processes.pop(key))
            for engine, python in wanted:
                self._warm(engine, python)

    def running(self) -> dict[str, int]:
        """Returns their pids by command."""
        with self._lock:
            return {warm.command: warm.process.pid for warm in self._processes.values() if warm.is_usable}

    def _warm(self, engine: str, python: str) -> WarmProcess | str:
        """Returns the process, which is started if needed, or why there is none."""
        key = engine, python
        warm = self._processes.get(key)
        if warm is not None and warm.is_usable:
            return warm
        if engine not in IMPORTS:
            return "the engine has no warm process"
        if warm is not None and time.monotonic() < warm.started + RETRY_S:
            return f"its warm process has ended, and another one is started {RETRY_S:.0f} s after its start"
        if available_memory() < LEAST_BYTES:
            return f"less than {LEAST_BYTES / 2**30:.0f} GiB of memory are available"
        if warm is not None:
            self._end(warm)
        try:
            started = self._processes[key] = self._start(engine, python)
        except OSError as error:
            return f"its warm process cannot be started: {error}"
        return started

    def _end(self, warm: WarmProcess) -> None:
        warm.path.unlink(missing_ok=True)
        warm.process.kill()  # its forks continue
        warm.process.communicate()

    def _start(self, engine: str, python: str) -> WarmProcess:
        self._starts += 1
        path = self._folder / f"warm-{self._starts}.{os.getpid()}"
        path.unlink(missing_ok=True)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(64)
            process = subprocess.Popen(
                [python, "-c", PROGRAM, engine, str(listener.fileno())],
                stdin=subprocess.PIPE,  # its end ends the process
                env={**os.environ, **self._marks, **ENVIRONMENT},
                cwd="/",  # which -c puts before the packages
                pass_fds=[listener.fileno()],
            )
        log.info("a warm process of the engine %s is started: pid %d", engine, process.pid)
        command = shlex.join([python, "-I", "-S", fork_client.__file__, str(path)])
        return WarmProcess(path, process, command, time.monotonic())
