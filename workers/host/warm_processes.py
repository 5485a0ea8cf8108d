"""The warm processes of this host, which are started when a replica's start wants one."""

from __future__ import annotations

import json
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

from placements.engines.registry import ENGINES
from workers.host import fork_client
from workers.host.fork_server import ENVIRONMENT, LEAST_BYTES, refusal
from workers.host.host_facts import available_memory
from workers.host.lifetime import Process, end_process, is_alive, is_stopped, pid_space, process_start

log = logging.getLogger(__name__)

HANDED_OVER = "COREWRIGHT_WARM_PROCESSES"
"""The variable with the processes that `up` has started for its only host, while Ray was starting."""

QUIET_S = 3.0  # for the starts in progress, before Ray starts a spare worker; four at once take 3 s on two CPUs
RETRY_S = 60.0  # between two starts of one that ends by itself

PROGRAM = "import sys; from workers.host.fork_server import main; main(sys.argv[1], int(sys.argv[2]))"


@dataclass
class WarmProcess:
    """A running `fork_server`, the path of its socket, and what to run as a Python that is its fork."""

    path: Path
    pid: int
    born: float  # by `lifetime.process_start`
    command: str  # as a shell reads it
    started: float  # or taken over, on the monotonic clock
    last_start: float  # its own, or that of the last replica that asked for the command
    child: subprocess.Popen[bytes] | None  # None: of another process

    @property
    def is_usable(self) -> bool:
        """False once it has ended or was stopped, or a cleaner of temporary folders has removed its socket."""
        return is_alive(self.pid, self.born) and not is_stopped(self.pid) and self.path.exists()

    def end(self) -> None:
        """Its forks continue."""
        self.path.unlink(missing_ok=True)
        end_process(Process(self.pid, self.born, pid_space()))
        if self.child is not None:
            self.child.communicate()


class WarmProcesses:
    """One process for each engine and interpreter that starts ask for. Thread-safe."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str] = MappingProxyType({}), output: int | None = None
    ) -> None:
        """``folder`` is for their sockets, and only this user can enter it. ``environment``: further variables, which
        other processes read of a fork, too, since the kernel shows those of its parent. ``output``: a descriptor; None:
        as this process's."""
        self._folder = folder
        self._output = output
        self._marks = environment
        self._lock = threading.Lock()
        self._starts = 0
        self._processes: dict[tuple[str, str], WarmProcess] = {}

    def handed_over(self) -> str:
        """Returns what `adopt` needs. This process does not use them any more, but they end with it."""
        for warm in self._processes.values():
            if warm.child is not None:  # its thread keeps the pipe open, and an ended one does not stay as a zombie
                threading.Thread(target=warm.child.wait, daemon=True).start()
        return json.dumps([[*key, str(warm.path), warm.pid, warm.born] for key, warm in self._processes.items()])

    def adopt(self, handed_over: str) -> None:
        """Takes over those that another process of this host has handed over and that have not ended."""
        for engine, python, path, pid, born in json.loads(handed_over):
            if is_alive(pid, born):  # its pid may be another process's
                self._processes[engine, python] = _warm_process(python, Path(path), pid, born)

    def command(self, engine: str, python: str | None, variables: Mapping[str, str]) -> str | None:
        """Returns what to run in place of ``python`` (None: this interpreter), as a shell reads it, and starts the warm
        process if needed. None: a fresh process is to be started. ``variables``: those that its process will set."""
        own = {**os.environ, **self._marks}
        reason = refusal({**own, **variables}, {**own, **ENVIRONMENT})
        if reason is None:
            with self._lock:
                warm = self._warm(engine, python or sys.executable)
                if isinstance(warm, WarmProcess):
                    warm.last_start = time.monotonic()
                    return warm.command
            reason = warm
        log.info("a replica on the engine %s starts as a fresh process: %s", engine, reason)
        return None

    def keep(self, engines: Mapping[str, str | None]) -> None:
        """Starts the processes of these engines, with the Python of each, and ends all others."""
        wanted = {(engine, python or sys.executable) for engine, python in engines.items()}
        with self._lock:
            for key in self._processes.keys() - wanted:
                self._processes.pop(key).end()
            for engine, python in wanted:
                self._warm(engine, python)

    def quiet(self) -> dict[str, int]:
        """Returns the pids by command of those of which no replica's start asked for ``QUIET_S``."""
        with self._lock:
            quiet = [warm for warm in self._processes.values() if time.monotonic() >= warm.last_start + QUIET_S]
            return {warm.command: warm.pid for warm in quiet if warm.is_usable}

    def _warm(self, engine: str, python: str) -> WarmProcess | str:
        """Returns the process, which is started if needed, or why there is none."""
        key = engine, python
        warm = self._processes.get(key)
        if warm is not None and warm.is_usable:
            return warm
        if engine not in ENGINES or not ENGINES[engine].imports_long:
            return "the engine has no warm process"
        if warm is not None and time.monotonic() < warm.started + RETRY_S:
            return f"its warm process has ended, and another one is started {RETRY_S:.0f} s after its start"
        if available_memory() < LEAST_BYTES:
            return f"less than {LEAST_BYTES / 2**30:.0f} GiB of memory are available"
        if warm is not None:
            warm.end()
        try:
            started = self._processes[key] = self._start(engine, python)
        except OSError as error:
            return f"its warm process cannot be started: {error}"
        return started

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
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,  # so that Ctrl+C does not end it
                env={**os.environ, **self._marks, **ENVIRONMENT},
                cwd="/",  # which -c puts before the packages
                pass_fds=[listener.fileno()],
            )
        log.info("a warm process of the engine %s is started: pid %d", engine, process.pid)
        return _warm_process(python, path, process.pid, process_start(process.pid) or 0.0, process)


def _warm_process(
    python: str, path: Path, pid: int, born: float, child: subprocess.Popen[bytes] | None = None
) -> WarmProcess:
    command, now = shlex.join([python, "-I", "-S", fork_client.__file__, str(path)]), time.monotonic()
    return WarmProcess(path, pid, born, command, now, now, child)
