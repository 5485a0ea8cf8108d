"""The queueing model: formulas for the part of a demand that a number of slots serves in time. Pure.

The number of a model's requests in the system is modelled as log-normal, with the mean a = arrivals per second x
service time, and the variance a x z. For Poisson arrivals z = 1; for bursty ones it is Hayward's *peakedness*: half way
between one and the dispersion of the arrivals (Fredericks, "Congestion in blocking systems", BSTJ 1980).
"""

from __future__ import annotations

import math


def peakedness(dispersion: float) -> float:
    """Returns z for the variance over the mean of the arrivals."""
    return 1.0 + (max(1.0, dispersion) - 1.0) / 2.0


def occupied(load: float, z: float, slots: float) -> float:
    """Returns E[min(X, slots)]: the mean number of slots in use, i.e. of requests that get one immediately."""
    if load <= 0.0 or slots <= 0.0:
        return 0.0
    variance = math.log1p(z / load)  # of the logarithm
    spread = math.sqrt(variance)
    far = math.log(slots / load)
    return load * _normal((far - variance / 2.0) / spread) + slots * _normal(-(far + variance / 2.0) / spread)


def delayed(load: float, z: float, slots: float, service_s: float, slack_s: float) -> float:
    """Returns the fraction of the requests that wait longer than ``slack_s``; 1.0 if the load exceeds the slots.

    M/M/c with Hayward's z: (load, slots) / z in place of (load, slots); the probability of waiting is Sakasegawa's
    approximation of Erlang's C.
    """
    if load <= 0.0:
        return 0.0
    if load >= slots:
        return 1.0
    waits = math.pow(load / slots, math.sqrt(2.0 * (slots / z + 1.0)) - 1.0)
    return min(1.0, waits * math.exp(-(slots - load) * slack_s / (max(service_s, 1e-3) * z)))


def _normal(x: float) -> float:
    """Returns the standard normal distribution function."""
    return 0.5 * math.erfc(-x * _HALF)


_HALF = math.sqrt(0.5)
