"""The actor that answers for one host: its processes, their logs, its interpreters and who holds its cores."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import ray

from workers import host as this_host
from workers.claims import held_cores
from workers.device_metrics import DeviceMonitor
from workers.facts.machine import owners
from workers.facts.reading import read_host_facts
from workers.faults import fault_of
from workers.interpreter import Interpreter, Interpreters
from workers.metric_family import MetricFamily
from workers.status import Failure

TOOLS_PERIOD_S = 10.0  # between two runs of the Neuron tools, which take seconds


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=16)
class HostActor:
    """What the controller asks of one host (one for each Ray node)."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[int | None, str | None]] = {}  # by the Neuron tools
        self._reads = False
        self._asking = threading.Lock()
        self._interpreters = Interpreters()
        self._devices = DeviceMonitor()

    def confirm_death(self, pid: int, started: float, deadline_s: float) -> bool:
        return this_host.confirm_death(pid, started, deadline_s)

    def log_tail(self, path: str, lines: int) -> list[str]:
        return this_host.log_tail(Path(path), lines)

    def log_part(self, path: str, offset: int | None, most: int, lines: int) -> tuple[str, int]:
        return this_host.log_part(Path(path), offset, most, lines)

    def fault_in_log(self, path: str) -> Failure | None:
        return fault_of(None, this_host.last_words(Path(path)))

    def interpreter(self, python: str | None) -> Interpreter:
        return self._interpreters.ask(python)

    def device_metrics(self) -> list[MetricFamily]:
        """What the Neuron devices measure: not asked of an emulated host."""
        return self._devices.families()

    def held_cores(self, claims: str | None) -> dict[int, tuple[int | None, str | None]]:
        """The owner's pid and command of each held core; ``claims`` None: of the real ones."""
        if claims is not None:
            return {core: (pid, this_host.command_of(pid)) for core, pid in held_cores(Path(claims)).items()}
        with self._asking:
            if not self._reads:  # the first answer is waited for, later ones are at most a period old
                self._read_tools()
                threading.Thread(target=self._keep_reading, name="neuron tools", daemon=True).start()
                self._reads = True
        return self._told

    def _keep_reading(self) -> None:
        while True:
            time.sleep(TOOLS_PERIOD_S)
            self._read_tools()

    def _read_tools(self) -> None:
        self._told = {core: (owner.pid, owner.command) for core, owner in owners(read_host_facts()).items()}
