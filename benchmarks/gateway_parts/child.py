"""A process of the benchmark: started by module, told jobs by lines of JSON, ended by the end of its input."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent.parent
STOP_DEADLINE_S = 20.0


class Child:
    """``python -m MODULE ARGUMENT``: the argument is one JSON value, and the first line of output says it is ready."""

    def __init__(self, module: str, argument: Any, *, python: str = sys.executable, log: Path | None = None) -> None:
        """Returns when it is ready: ``ready`` is what it said. Raises RuntimeError when it ends before."""
        environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT)}
        with contextlib.ExitStack() as stack:
            errors = stack.enter_context(log.open("ab")) if log is not None else None
            self._process = subprocess.Popen(
                [python, "-m", module, json.dumps(argument)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                cwd=ROOT,
                text=True,
            )
        self._module = module
        self.ready = self.hear()

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, job: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Its next line. Raises RuntimeError when it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._module} has ended with {self._process.wait()}")
        said: dict[str, Any] = json.loads(line)
        return said

    def ask(self, job: Any) -> dict[str, Any]:
        self.tell(job)
        return self.hear()

    def close(self) -> None:
        """It and what it started are gone when this returns."""
        family = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.pid).children(recursive=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for left in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        self._process.stdout.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def cpu_s(pids: Sequence[int]) -> float:
    """CPU seconds that the processes have used in all their threads, in user mode and in the kernel.

    Read from the scheduler's clock of each process, because /proc counts in ticks of 10 ms.
    """
    return sum(time.clock_gettime_ns(cpu_clock(pid)) for pid in pids) / 1e9


def cpu_clock(pid: int) -> int:
    """Returns what clock_getcpuclockid(3), which Python has for threads only, returns for a process."""
    return (~pid << 3) | 2


def rss_bytes(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


def family(pid: int) -> list[int]:
    """The process and all that it has started."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def say(value: Any) -> None:
    """To the process that started us."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def argument() -> Any:
    """What we were started with. Also: as many open files as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return json.loads(sys.argv[1])


def wait_for_the_end() -> None:
    sys.stdin.read()
