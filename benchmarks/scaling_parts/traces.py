"""Traces of demand. Every one asks for the same work on the average; they differ in when it comes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from random import Random

from orchestrator.simulate.scenario import Arrival, SimModel

SECONDS = 2400.0
WARM_UP_S = 900.0  # at the beginning, which is not measured
BUSY_CORES = 45.0  # that the mean demand of all models keeps busy if every slot is used
OUTPUT_TOKENS = 150.0  # mean
PROMPT_TOKENS = 400.0  # mean
DAY_S = 1500.0  # of the diurnal trace: 25 minutes, as long as what is measured
ON_S, OFF_S = 300.0, 1200.0  # mean


@dataclass(frozen=True)
class Rate:
    """How much is asked for at a time: a mean that holds from each of the times on."""

    times: tuple[float, ...]
    rates: tuple[float, ...]  # requests a second from times[i] to times[i + 1]


Kind = tuple[Callable[[float, Random], Rate], float]
"""The course of the rate, from its mean, and the coefficient of variation of the arrivals."""


def means(kind: str, models: Sequence[SimModel], seed: int) -> dict[str, float]:
    """Requests a second of each model in the long run. Each has its own share of the work (Zipf, 0.7)."""
    shares = [(1 + rank) ** -0.7 for rank in range(len(models))]
    Random(f"{kind} {seed}").shuffle(shares)
    return {
        model.name: BUSY_CORES * share / sum(shares) / (model.cores / model.slots) / service_s(model)
        for model, share in zip(models, shares, strict=True)
    }


def service_s(model: SimModel) -> float:
    """What a request of mean lengths holds a slot for."""
    return model.service_s(int(PROMPT_TOKENS), int(OUTPUT_TOKENS))


def trace(kind: str, models: Sequence[SimModel], seed: int) -> list[Arrival]:
    """The arrivals of one run."""
    made = [
        list(_arrivals(_KINDS[kind](number), name, mean, Random(f"{kind} {seed} {number}")))
        for number, (name, mean) in enumerate(means(kind, models, seed).items())
    ]
    return list(merge(*made))


def _arrivals(kind: Kind, name: str, mean: float, random: Random) -> Iterator[Arrival]:
    """Gamma arrivals with a coefficient of variation, on a clock that runs as fast as the rate is."""
    rate, cv = kind[0](mean, random), kind[1]
    shape = 1.0 / cv**2
    total = [0.0]
    for i, wanted in enumerate(rate.rates):
        end = rate.times[i + 1] if i + 1 < len(rate.times) else SECONDS
        total.append(total[-1] + wanted * (end - rate.times[i]))
    done = random.random() * random.gammavariate(shape, cv**2)
    while done < total[-1]:
        i = max(0, bisect_left(total, done) - 1)
        at = rate.times[i] + (done - total[i]) / rate.rates[i]
        prompt = 1 + int(random.expovariate(1.0 / PROMPT_TOKENS))
        output = 1 + int(random.expovariate(1.0 / OUTPUT_TOKENS))
        yield Arrival(at, name, min(prompt, 4000), min(output, 2000))
        done += random.gammavariate(shape, cv**2)


def _steady(mean: float, random: Random) -> Rate:
    return Rate((0.0,), (mean,))


def _diurnal(mean: float, random: Random) -> Rate:
    """From a tenth of the mean to 1.9 times, in steps of half a minute; each model has its own noon."""
    noon = random.random() * DAY_S
    times = tuple(30.0 * i for i in range(int(SECONDS / 30)))
    return Rate(times, tuple(mean * (1.0 + 0.9 * math.cos(2 * math.pi * (at - noon) / DAY_S)) for at in times))


def _on_off(mean: float, random: Random) -> Rate:
    """A fifth of the time five times the mean, else nothing."""
    times, rates, at = [], [], 0.0
    on = random.random() < ON_S / (ON_S + OFF_S)
    while at < SECONDS:
        times.append(at)
        rates.append(mean * (ON_S + OFF_S) / ON_S if on else 0.0)
        at += random.expovariate(1.0 / (ON_S if on else OFF_S))
        on = not on
    return Rate(tuple(times), tuple(rates))


def _drift(mean: float, random: Random) -> Rate:
    """Every ten minutes or so another rate, log-normal around the mean."""
    times, rates, at, sigma = [], [], 0.0, 1.2
    while at < SECONDS:
        times.append(at)
        rates.append(mean * random.lognormvariate(-(sigma**2) / 2, sigma))
        at += random.expovariate(1.0 / 600.0)
    return Rate(tuple(times), tuple(rates))


_MIXED: tuple[Kind, ...] = ((_steady, 4.0), (_diurnal, 4.0), (_on_off, 1.0), (_steady, 1.0))

_KINDS: dict[str, Callable[[int], Kind]] = {
    "gamma": lambda number: (_steady, 4.0),
    "diurnal": lambda number: (_diurnal, 4.0),
    "onoff": lambda number: (_on_off, 4.0),
    "mixed": lambda number: _MIXED[number % 4],
    "drift": lambda number: (_drift, 2.0),
}

TUNED = ("gamma", "diurnal", "onoff", "mixed")
HELD_OUT = "drift"
