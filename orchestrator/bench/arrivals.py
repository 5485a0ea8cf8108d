"""The arrival times of a benchmark's load."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """A load: an open loop with a rate or a closed loop with a concurrency, until ``requests`` were sent or
    ``duration_s`` is over, whichever comes first."""

    rate: float | None  # requests/s, a Poisson process
    concurrency: int | None  # concurrent requests
    requests: int | None
    duration_s: float | None
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.concurrency is None):
            raise ValueError("a load needs either a rate or a concurrency")
        if self.requests is None and self.duration_s is None:
            raise ValueError("a load needs a number of requests, a duration, or both")

    def times(self) -> tuple[float, ...]:
        """Returns when each request of an open loop is sent, in seconds after the start, in order."""
        assert self.rate is not None
        return poisson(self.rate, self.requests, self.duration_s, self.seed)


def poisson(rate: float, requests: int | None, duration_s: float | None, seed: int) -> tuple[float, ...]:
    """Returns the arrivals of a Poisson process of ``rate`` per second; the first is at 0, as in vLLM and guidellm.

    The same seed gives the same gaps, whatever the rate: twice the rate halves every time.
    """
    draw = random.Random(f"arrivals {seed}")
    times: list[float] = []
    at = 0.0
    while (requests is None or len(times) < requests) and (duration_s is None or at < duration_s):
        times.append(at)
        at += draw.expovariate(1.0) / rate
    return tuple(times)
