"""Measures the benchmark client itself: its CPU use and delays, which could distort the results."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from orchestrator.bench.statistics import percentile

TICK_S = 0.005
MAX_CPU = 0.9  # of one CPU: the client is one process with one thread
MAX_LAG_S = 0.01
MAX_LATE_S = 0.05


@dataclass(frozen=True)
class ClientLoad:
    """The load of the client. ``cpu``: fraction of one CPU. ``lag_p99_s``: delay of the event loop. ``late_p99_s``:
    delay of sending a request; None in a closed loop."""

    cpu: float
    lag_p99_s: float
    late_p99_s: float | None

    @property
    def limits(self) -> tuple[str, ...]:
        """The reasons why the client, not the server, may have been the bottleneck; empty if it was not."""
        limits = []
        if self.cpu > MAX_CPU:
            limits.append(f"it used {self.cpu:.0%} of a CPU")
        if self.lag_p99_s > MAX_LAG_S:
            limits.append(f"its event loop was up to {self.lag_p99_s * 1000:.0f} ms late (p99)")
        if self.late_p99_s is not None and self.late_p99_s > MAX_LATE_S:
            limits.append(f"it sent requests up to {self.late_p99_s * 1000:.0f} ms late (p99)")
        return tuple(limits)

    def as_dict(self) -> dict[str, Any]:
        """Returns the JSON of the client in a report."""
        return {
            "cpu": round(self.cpu, 3),
            "lag_p99_ms": round(self.lag_p99_s * 1000, 3),
            "late_p99_ms": None if self.late_p99_s is None else round(self.late_p99_s * 1000, 3),
            "limits": list(self.limits),
        }


class LagMeter:
    """Measures the client's load from ``__enter__`` on."""

    def __init__(self) -> None:
        self._late: list[float] = []

    def __enter__(self) -> LagMeter:
        self._loop = asyncio.get_running_loop()
        self._cpu, self._began = time.process_time(), time.monotonic()
        self._plan()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def load(self, late_s: list[float] | None) -> ClientLoad:
        """Returns the load so far; ``late_s`` is the send delay of each request in an open loop."""
        wall = max(time.monotonic() - self._began, 1e-9)
        cpu = (time.process_time() - self._cpu) / wall
        lag = percentile(self._late, 99) if self._late else 0.0
        return ClientLoad(cpu, lag, percentile(late_s, 99) if late_s else None)

    def _plan(self) -> None:
        self._due = self._loop.time() + TICK_S
        self._timer = self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        self._late.append(max(0.0, self._loop.time() - self._due))
        self._plan()
