"""The warm processes of this host, which are started when a replica's start wants one."""

from __future__ import annotations

import contextlib
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

import msgspec

from workers.host import fork_client
from workers.host.fork_server import ENVIRONMENT, IMPORTS, LEAST_BYTES
from workers.host.host_facts import available_memory

log = logging.getLogger(__name__)

SEND_S = 1.0  # deadline of a message to a warm process, which the kernel keeps until it reads it
RETRY_S = 60.0  # between two starts of one that ends by itself

PROGRAM = """\
import sys
from workers.host.fork_server import main
from workers.serving.head_start import begin
main(sys.argv[1], int(sys.argv[2]), begin)
"""


@dataclass
class WarmProcess:
    """A running `fork_server`, and the path of its socket."""

    path: Path
    process: subprocess.Popen[bytes]
    started: float

    @property
    def is_usable(self) -> bool:
        """False once it has ended, or a cleaner of temporary folders has removed its socket."""
        return self.process.poll() is None and self.path.exists()


class Load(msgspec.Struct, frozen=True):
    """What a fork loads ahead."""

    config: str  # a ReplicaConfig as JSON
    environment: dict[str, str]  # the variables of its process that this one does not have


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

    def command(self, start: str, engine: str, python: str | None, load: Load | None = None) -> str | None:
        """Returns what to run in place of ``python`` (None: this interpreter) for a ``start`` of that name, as a shell
        reads it, and starts the warm process if needed. None: a fresh process is to be started. ``load``: a fork begins
        to load it now."""
        python = python or sys.executable
        with self._lock:
            warm = self._processes.get((engine, python))
            if warm is None or not warm.is_usable:
                too_early = warm is not None and time.monotonic() < warm.started + RETRY_S
                if engine not in IMPORTS or too_early or available_memory() < LEAST_BYTES:
                    return None
                if warm is not None:
                    self._end(warm)
                warm = self._processes[engine, python] = self._start(engine, python)
        if load is not None:
            self._begin(warm, start, load)
        return shlex.join([python, "-I", "-S", fork_client.__file__, str(warm.path), start])

    def keep(self, engines: Mapping[str, str | None]) -> None:
        """Starts the processes of these engines, with the Python of each, and ends all others."""
        wanted = {(engine, python or sys.executable) for engine, python in engines.items()}
        with self._lock:
            for key in self._processes.keys() - wanted:
                self._end(self._processes.pop(key))
        for engine, python in engines.items():
            self.command("", engine, python)

    def _end(self, warm: WarmProcess) -> None:
        warm.path.unlink(missing_ok=True)
        warm.process.kill()  # its forks continue
        warm.process.communicate()

    def _begin(self, warm: WarmProcess, start: str, load: Load) -> None:
        """Has a fork load ahead. Without one, the start takes longer."""
        environment = {**os.environ, **self._marks, **load.environment}
        with socket.socket(socket.AF_UNIX) as server, contextlib.suppress(OSError):
            server.settimeout(SEND_S)
            server.connect(str(warm.path))
            fork_client.send(server, {"environment": environment, "start": start, "load": load.config})

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
        return WarmProcess(path, process, time.monotonic())
