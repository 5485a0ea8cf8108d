"""Arrivals that are made up: of a seed, the same each time."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from random import Random
from types import MappingProxyType
from typing import Literal, get_args

from orchestrator.bench.lengths import Lengths
from orchestrator.simulate.simulated_request import Arrival

Kind = Literal["poisson", "gamma", "diurnal", "onoff", "mixed"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MIX: tuple[Kind, ...] = ("poisson", "gamma", "diurnal", "onoff")  # of `mixed`, in turn

DAY_S = 86_400.0
SWING = 0.8  # of the rate, in a diurnal load: from a fifth of the mean to nine fifths
ON_S, OFF_S = 300.0, 900.0  # mean lengths of the spells of an on/off load
STEPS = 1440  # of a period in which a diurnal rate is taken as constant
GAMMA_CV = 4.0  # of `gamma` when nothing is said


@dataclass(frozen=True)
class Workload:
    """Requests to several models for ``seconds``, together ``rate`` a second on average.

    ``poisson``: independent requests. ``gamma``: bursts, as gaps have a coefficient of variation of ``cv``.
    ``diurnal``: the rate goes up and down once in ``period_s``, each model at another time of the day. ``onoff``: each
    model is asked in spells of ON_S, with pauses of OFF_S between them. ``mixed``: the models take these kinds in turn.
    ``cv`` is that of the gaps within a kind; 1 is Poisson's.
    """

    kind: Kind
    models: tuple[str, ...]
    rate: float
    seconds: float
    seed: int = 0
    cv: float | None = None  # None: GAMMA_CV for gamma, 1 for the others
    lengths: Mapping[str, Lengths] = field(default_factory=lambda: MappingProxyType({}))  # by model; none: chat
    shares: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))  # by model, against 1.0
    period_s: float = DAY_S
    begins: float | None = None

    def __iter__(self) -> Iterator[Arrival]:
        chat = Lengths.parse("chat")
        total = sum(self.shares.get(model, 1.0) for model in self.models)
        streams = [
            self._stream(i, model, self.rate * self.shares.get(model, 1.0) / total, self.lengths.get(model, chat).pairs)
            for i, model in enumerate(self.models)
            if self.shares.get(model, 1.0) > 0
        ]
        return iter(merge(*streams))

    def kind_of(self, number: int) -> Kind:
        """Of the model of that number: one of MIX, if it is mixed."""
        return MIX[number % len(MIX)] if self.kind == "mixed" else self.kind

    def _stream(self, number: int, model: str, rate: float, pairs: Sequence[tuple[int, int]]) -> Iterator[Arrival]:
        """Of one model, in order."""
        kind = self.kind_of(number)
        draw = Random(f"{self.seed} {kind} {model}")
        clock = self._clock(kind, number, model)
        cv = self.cv if self.cv is not None else GAMMA_CV if kind == "gamma" else 1.0
        gap = _gaps(draw, cv, rate)
        random, count, seconds = draw.random, len(pairs), self.seconds
        at = -gap() * random()  # so that it does not begin with a request
        while True:
            at += gap()
            if at < 0.0:
                continue
            when = at if clock is None else clock(at)
            if when >= seconds:
                return
            prompt, output = pairs[int(random() * count)]
            yield Arrival(when, model, prompt, output)

    def _clock(self, kind: Kind, number: int, model: str) -> Callable[[float], float] | None:
        """From a time in which the rate is constant to the time in which it is not."""
        if kind == "diurnal":
            return _diurnal(self.period_s, self.seconds, number / max(1, len(self.models)))
        if kind == "onoff":
            return _onoff(Random(f"{self.seed} spells {model}"), self.seconds)
        return None


def _gaps(draw: Random, cv: float, rate: float) -> Callable[[], float]:
    """Seconds between requests, ``rate`` a second on average."""
    if cv == 1.0:
        expovariate = draw.expovariate
        return lambda: expovariate(rate)
    if cv <= 0.0:
        return lambda: 1.0 / rate
    shape = 1.0 / (cv * cv)
    scale, gammavariate = cv * cv / rate, draw.gammavariate
    return lambda: gammavariate(shape, scale)


def _diurnal(period_s: float, seconds: float, phase: float) -> Callable[[float], float]:
    """A sine around the mean; the peak of phase 0 is at half of the period."""
    step = period_s / STEPS
    times, sums = [0.0], [0.0]
    while times[-1] < seconds:
        middle = times[-1] + step / 2
        rate = 1.0 - SWING * math.cos(2 * math.pi * (middle / period_s - phase))
        times.append(times[-1] + step)
        sums.append(sums[-1] + rate * step)
    return _through(times, sums)


def _onoff(draw: Random, seconds: float) -> Callable[[float], float]:
    """Spells and pauses of random length, exponential; the mean rate stays."""
    peak = (ON_S + OFF_S) / ON_S
    times, sums = [0.0], [0.0]
    on = draw.random() < 1.0 / peak
    while times[-1] < seconds:
        spell = draw.expovariate(1.0 / (ON_S if on else OFF_S))
        times.append(times[-1] + spell)
        sums.append(sums[-1] + (spell * peak if on else 0.0))
        on = not on
    return _through(times, sums)


def _through(times: Sequence[float], sums: Sequence[float]) -> Callable[[float], float]:
    """When so much of the load has come: linear between the points, infinite behind the last."""

    def when(amount: float) -> float:
        at = bisect_right(sums, amount)
        if at >= len(sums):
            return math.inf
        share = (amount - sums[at - 1]) / (sums[at] - sums[at - 1])
        return times[at - 1] + share * (times[at] - times[at - 1])

    return when
