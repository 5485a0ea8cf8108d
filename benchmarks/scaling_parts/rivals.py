"""What others decide by, written from their documentation; each looks at one model at a time, as they do.

A target that finds no cores waits until some are free, as a pod or an actor that is pending; the planner gives them
out.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.scaling_parts.traces import service_s
from orchestrator.scaling.autoscaler import FleetNow, Load, ModelNow, Targets
from orchestrator.simulate.scenario import SimModel

_TICK_S = 2.0  # KPA's; Ray Serve's loop is faster, its metrics come every 10 s


def static_split(models: Sequence[SimModel], means: Mapping[str, float], cores: int) -> dict[str, int]:
    """Replicas in proportion to the mean work of each model, by the requests a second that it has in the long run.

    One after the other goes to the model with the most work for a slot, where half a replica more than it has is
    counted (Webster's way to round shares), as long as there are cores.
    """
    work = {model.name: means[model.name] * service_s(model) for model in models}
    by_name = {model.name: model for model in models}
    counts = {model.name: 0 for model in models}
    line = [(-work[model.name] / (0.5 * model.slots), model.name) for model in models]
    heapq.heapify(line)
    while line:
        _, name = heapq.heappop(line)
        model = by_name[name]
        if model.cores > cores or counts[name] >= model.spec.replicas.max:
            continue
        cores -= model.cores
        counts[name] += 1
        heapq.heappush(line, (-work[name] / ((counts[name] + 0.5) * model.slots), name))
    return counts


class Static:
    """The split stands."""

    tick_s = 600.0

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = dict(counts)

    def decide(self, now: float, loads: Mapping[str, Load], fleet: FleetNow) -> Targets:
        return Targets(self._counts)


@dataclass
class _Samples:
    """Requests of a model, in the queue and in slots, as they were seen lately."""

    seen: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, now: float, load: Load, keep_s: float) -> None:
        self.seen.append((now, load.waiting + load.live))
        while self.seen[0][0] <= now - keep_s:
            self.seen.popleft()

    def mean(self, since: float) -> float:
        counts = [count for at, count in self.seen if at > since]
        return sum(counts) / len(counts) if counts else 0.0


@dataclass
class _Delay:
    """Since when one direction is wanted."""

    up: bool | None = None
    since: float = 0.0

    def over(self, up: bool, now: float, delay_s: float) -> bool:
        if self.up != up:
            self.up, self.since = up, now
        if now - self.since >= delay_s:
            self.up = None
            return True
        return False


class RayServe:
    """Ray Serve's policy at its defaults (docs.ray.io, Serve, "Ray Serve Autoscaling" and the advanced guide).

    1. desired = requests, averaged over 30 s (`look_back_period_s`) / 2 (`target_ongoing_requests`), rounded up
    2. from zero it goes up at once
    3. else up when that is more for 30 s on end (`upscale_delay_s`), and down when it is less for 600 s on end
       (`downscale_delay_s`); to zero only from one
    """

    tick_s = _TICK_S

    def __init__(self) -> None:
        self._samples: dict[str, _Samples] = {}
        self._delays: dict[str, _Delay] = {}

    def decide(self, now: float, loads: Mapping[str, Load], fleet: FleetNow) -> Targets:
        return Targets({model.name: self._one(model, loads[model.name], now) for model in fleet.models})

    def _one(self, model: ModelNow, load: Load, now: float) -> int:
        samples = self._samples.setdefault(model.name, _Samples())
        samples.add(now, load, 30.0)
        ongoing = load.waiting + load.live
        delay = self._delays.setdefault(model.name, _Delay())
        desired = max(model.min, min(model.max, math.ceil(samples.mean(now - 30.0) / 2.0)))  # 1
        if model.target == 0:
            return max(1, desired) if ongoing else 0  # 2
        if desired > model.target:  # 3
            return desired if delay.over(True, now, 30.0) else model.target
        if desired < model.target:
            desired = desired if model.target == 1 else max(1, desired)
            return desired if delay.over(False, now, 600.0) else model.target
        delay.up = None
        return model.target


@dataclass
class _Panic:
    until: float = -math.inf
    most: int = 0


class Knative:
    """Knative's pod autoscaler at its defaults (knative.dev, Serving, "Additional autoscaling configuration for KPA").

    1. desired = requests, averaged over 60 s (`stable-window`) / (slots x 70 %,
       `container-concurrency-target-percentage`), rounded up
    2. the same over 6 s (`panic-window-percentage`): at twice the ready replicas (`panic-threshold-percentage`) it
       panics: up to what that says, and not down, until there was no reason for it for 60 s
    3. down by half at most (`max-scale-down-rate`), to zero after 60 s without a request, and the last replica stays
       for 30 s more (`scale-to-zero-grace-period`)
    """

    tick_s = _TICK_S

    def __init__(self) -> None:
        self._samples: dict[str, _Samples] = {}
        self._panics: dict[str, _Panic] = {}
        self._zero_since: dict[str, float] = {}

    def decide(self, now: float, loads: Mapping[str, Load], fleet: FleetNow) -> Targets:
        return Targets({model.name: self._one(model, loads[model.name], now) for model in fleet.models})

    def _one(self, model: ModelNow, load: Load, now: float) -> int:
        samples = self._samples.setdefault(model.name, _Samples())
        panic = self._panics.setdefault(model.name, _Panic())
        samples.add(now, load, 60.0)
        target = 0.7 * model.slots
        stable = math.ceil(samples.mean(now - 60.0) / target)  # 1
        quick = math.ceil(samples.mean(now - 6.0) / target)
        ready = max(1, model.ready)
        stable = max(stable, math.floor(ready / 2.0)) if stable else 0
        if quick >= 2.0 * ready:  # 2
            panic.until = now + 60.0
        if now < panic.until:
            panic.most = max(panic.most, quick, stable, ready if model.ready else 0)
            desired = panic.most
        else:
            panic.most = 0
            desired = stable
        desired = max(model.min, min(model.max, desired))
        if desired:
            self._zero_since.pop(model.name, None)
            return desired
        if not model.target:
            return 0
        since = self._zero_since.setdefault(model.name, now)  # 3
        return 0 if now - since >= 30.0 else 1
