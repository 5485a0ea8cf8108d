"""Synthetic workloads: arrivals generated from a seed, identical for the same seed."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from importlib import resources
from random import Random
from typing import Literal, get_args

from orchestrator.simulate.scenario import Arrival

Kind = Literal["poisson", "gamma", "diurnal", "onoff", "mixed"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MIX: tuple[Kind, ...] = ("poisson", "gamma", "diurnal", "onoff")  # of `mixed`, in turn

DAY_S = 86_400.0
SWING = 0.8  # amplitude of a diurnal load: from a fifth of the mean rate to nine fifths
ON_S, OFF_S = 300.0, 900.0  # mean lengths of the busy periods and pauses of an on/off load
STEPS = 1440  # steps of constant rate per period of a diurnal load
GAMMA_CV = 4.0  # default of `gamma`
NAMES = ("chat",)  # of lengths


@dataclass(frozen=True)
class Lengths:
    """Pairs of prompt and output tokens to draw from. ``capped``: how many pairs were cut to fit the model."""

    name: str
    pairs: tuple[tuple[int, int], ...]
    capped: int = 0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Parses a name, or ``PROMPT:OUTPUT`` for a constant length of each. Raises ValueError."""
        if text in NAMES:
            read = json.loads(resources.files("orchestrator.simulate").joinpath(f"{text}.json").read_text())
            return cls(text, tuple((prompt, output) for prompt, output in read["pairs"]))
        prompt, colon, output = text.partition(":")
        if not (colon and prompt.isascii() and prompt.isdecimal() and output.isascii() and output.isdecimal()):
            raise ValueError(f"{text!r} is neither {' nor '.join(NAMES)} nor PROMPT:OUTPUT, like 512:128")
        if not (0 < int(prompt) < 2**31 and 0 < int(output) < 2**31):
            raise ValueError(f"{text!r}: both lengths must be at least 1")
        return cls(text, ((int(prompt), int(output)),))

    def within(self, max_len: int) -> Lengths:
        """Returns the lengths cut to ``max_len`` tokens (at least 2) of prompt and output together: first the output
        down to half of them, then the prompt."""
        cut = tuple(cut_pair(pair, max_len) for pair in self.pairs)
        capped = sum(1 for old, new in zip(self.pairs, cut, strict=True) if old != new)
        return Lengths(self.name, cut, capped)


def cut_pair(pair: tuple[int, int], max_len: int) -> tuple[int, int]:
    """Cuts prompt and output tokens to ``max_len`` (at least 2) together: first the output down to half of them."""
    prompt, output = pair
    if prompt + output <= max_len:
        return pair
    output = min(output, max_len // 2)
    return min(prompt, max_len - output), output


@dataclass(frozen=True)
class Workload:
    """Requests to several models for ``seconds``, with a mean total of ``rate`` per second.

    ``poisson``: independent requests. ``gamma``: bursts, from gaps with a coefficient of variation of ``cv``.
    ``diurnal``: the rate rises and falls once per ``period_s``, for each model with another phase. ``onoff``: each
    model has busy periods of ON_S with pauses of OFF_S. ``mixed``: these kinds in turn, one per model. ``cv`` applies
    to the gaps of every kind; 1 is Poisson.
    """

    kind: Kind
    models: tuple[str, ...]
    rate: float
    seconds: float
    seed: int = 0
    cv: float | None = None  # None: GAMMA_CV for gamma, 1 for the others
    lengths: Lengths = field(default_factory=lambda: Lengths.parse("chat"))
    limits: Mapping[str, int] = field(default_factory=dict)  # by model: the tokens that longer requests are cut to
    shares: Mapping[str, float] = field(default_factory=dict)  # by model, relative to 1.0
    period_s: float = DAY_S

    def __iter__(self) -> Iterator[Arrival]:
        shares = {model: self.shares.get(model, 1.0) for model in self.models}
        total = sum(shares.values())
        streams = [
            self._stream(i, model, self.rate * share / total)
            for i, (model, share) in enumerate(shares.items())
            if share > 0
        ]
        return iter(merge(*streams))

    def kind_of(self, number: int) -> Kind:
        """Returns the kind of the model with that number: one of MIX for a mixed load."""
        return MIX[number % len(MIX)] if self.kind == "mixed" else self.kind

    def _stream(self, number: int, model: str, rate: float) -> Iterator[Arrival]:
        """Yields the arrivals of one model, in order."""
        pairs = (self.lengths.within(self.limits[model]) if model in self.limits else self.lengths).pairs
        kind = self.kind_of(number)
        draw = Random(f"{self.seed} {kind} {model}")
        clock = self._clock(kind, number, model)
        cv = self.cv if self.cv is not None else GAMMA_CV if kind == "gamma" else 1.0
        gap = _gaps(draw, cv, rate)
        random, count, seconds = draw.random, len(pairs), self.seconds
        at = -gap() * random()  # so that the first request is not at 0
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
        """Returns the map from a time with a constant rate to the real time."""
        if kind == "diurnal":
            return _diurnal(self.period_s, self.seconds, number / max(1, len(self.models)))
        if kind == "onoff":
            return _onoff(Random(f"{self.seed} spells {model}"), self.seconds)
        return None


def _gaps(draw: Random, cv: float, rate: float) -> Callable[[], float]:
    """Returns a generator of the seconds between requests, with a mean of ``rate`` requests per second."""
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
    """Busy periods and pauses of exponential length, with an unchanged mean rate."""
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
    """Returns the time by which an amount of the load has arrived: linear interpolation, infinite after the last."""

    def when(amount: float) -> float:
        at = bisect_right(sums, amount)
        if at >= len(sums):
            return math.inf
        share = (amount - sums[at - 1]) / (sums[at] - sums[at - 1])
        return times[at - 1] + share * (times[at] - times[at - 1])

    return when
