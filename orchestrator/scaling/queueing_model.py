"""How much of a demand some slots serve in time. Formulas, pure.

The requests of a model that are in the system at once are taken as log-normal, with the mean a = arrivals a second x
service time, and the variance a x z. For Poisson arrivals z = 1; for bursty ones Hayward's *peakedness*: half
way between one and the dispersion of the arrivals (Fredericks, "Congestion in blocking systems", BSTJ 1980).
"""

from __future__ import annotations

import math


def peakedness(dispersion: float) -> float:
    """z, from the variance over the mean of the arrivals."""
    return 1.0 + (max(1.0, dispersion) - 1.0) / 2.0


def occupied(load: float, z: float, slots: float) -> float:
    """E[min(X, slots)]: how many of the slots are in use on the average, which is how many requests get one at once."""
    if load <= 0.0 or slots <= 0.0:
        return 0.0
    variance = math.log1p(z / load)  # of the logarithm
    spread = math.sqrt(variance)
    far = math.log(slots / load)
    return load * _normal((far - variance / 2.0) / spread) + slots * _normal(-(far + variance / 2.0) / spread)


def delayed(load: float, z: float, slots: float, service_s: float, slack_s: float) -> float:
    """The part of the requests that waits longer than ``slack_s`` with so many slots.

    M/M/c with Hayward's z: (load, slots) / z in place of (load, slots); the chance to wait at all by Sakasegawa's
    approximation of Erlang's C. 1.0 where the load is more than the slots.
    """
    if load <= 0.0:
        return 0.0
    if load >= slots:
        return 1.0
    waits = math.pow(load / slots, math.sqrt(2.0 * (slots / z + 1.0)) - 1.0)
    return min(1.0, waits * math.exp(-(slots - load) * slack_s / (max(service_s, 1e-3) * z)))


def _normal(x: float) -> float:
    """The normal distribution function."""
    return 0.5 * math.erfc(-x * _HALF)


_HALF = math.sqrt(0.5)
