"""The scaling policies of the simulator: production's autoscaler, or fixed numbers of replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from orchestrator.scaling.autoscaler import FleetNow, Targets, autoscale
from orchestrator.scaling.demand_report import AUTOSCALE_S
from orchestrator.scaling.forecast import History, Load


class ScalingPolicy(Protocol):
    """A policy that is called every ``tick_s``, and immediately when a request finds no replica."""

    @property
    def tick_s(self) -> float: ...

    def decide(self, now: float, loads: Mapping[str, Load], fleet: FleetNow) -> Targets:
        """Returns the targets. ``loads`` cover the time since the last call; ``now`` is in seconds of virtual time."""
        ...


class Joint:
    """Production's autoscaler (`orchestrator.scaling.autoscaler`). Keeps the demand history of one run."""

    tick_s = AUTOSCALE_S

    def __init__(self) -> None:
        self._history = History()

    def decide(self, now: float, loads: Mapping[str, Load], fleet: FleetNow) -> Targets:
        self._history = self._history.after(now, loads)
        return autoscale(self._history, fleet, now)


class Fixed:
    """Constant numbers of replicas; only the first request of a model at zero starts one."""

    tick_s = AUTOSCALE_S

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = dict(counts)

    def decide(self, now: float, loads: Mapping[str, Load], fleet: FleetNow) -> Targets:
        return Targets(dict(self._counts), {})
