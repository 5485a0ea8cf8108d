"""Who decides how many replicas there are: on the virtual clock as in the fleet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from orchestrator.scaling.autoscaler import FleetNow, Targets, autoscale
from orchestrator.scaling.demand_report import AUTOSCALE_S
from orchestrator.scaling.forecast import History, Load


class ScalingPolicy(Protocol):
    """Asked every ``tick_s``, and at once when a request finds no replica."""

    @property
    def tick_s(self) -> float: ...

    def decide(self, now: float, loads: Mapping[str, Load], fleet: FleetNow) -> Targets:
        """``loads`` tell of the time since it was asked last; ``now`` in seconds of the virtual clock."""
        ...


class Joint:
    """Production's: `orchestrator.scaling.autoscaler`. One for each run: it remembers the demand."""

    tick_s = AUTOSCALE_S

    def __init__(self) -> None:
        self._history = History()

    def decide(self, now: float, loads: Mapping[str, Load], fleet: FleetNow) -> Targets:
        self._history = self._history.after(now, loads)
        return autoscale(self._history, fleet, now)


class Fixed:
    """Always the same counts: no scaling, but for a model at zero, which its first request starts."""

    tick_s = AUTOSCALE_S

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = dict(counts)

    def decide(self, now: float, loads: Mapping[str, Load], fleet: FleetNow) -> Targets:
        return Targets(dict(self._counts), {})
