"""The service capacity of a model: the requests that a number of replicas would serve in time. Pure.

The number of a model's requests in the system is modelled as log-normal, with the mean a = arrivals per second x
service time, and the variance a x z. For Poisson arrivals z = 1; for bursty ones it is Hayward's *peakedness*: half way
between one and the dispersion of the arrivals (Fredericks, "Congestion in blocking systems", BSTJ 1980).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from orchestrator.scaling.forecast import WINDOW_S, Forecast


@dataclass(frozen=True)
class Rules:
    """The constants of the autoscaler, documented in docs/scaling.md and tuned with benchmarks/scaling.py."""

    horizon_s: float = 150.0  # H: the time over which the requests of a replica count
    horizon_loads: float = 3.0  # minimum of H, in load times
    reluctance: float = 3.0  # how much more a new replica must serve than the one it replaces
    reload: float = 4.0  # load times for which the loss of an idle replica counts, as it can be loaded again
    residency: float = 2.0  # minimum lifetime of a replica, in load times
    warm_up_s: float = 30.0  # time until the measurements of a new replica count
    removals_per_decision: int = 4  # replicas removed for others of their priority in one decision
    least_served: float = 2.0  # requests that one more replica must serve in time within the horizon
    waiting_weight: float = 0.1  # of a request that waits for the first replica
    starved_s: float = 60.0  # after this wait without a replica, a model comes before second replicas of others
    unserved_s: float = 300.0  # the same after requests have arrived for so long, each of which gave up earlier
    step_cores: int = 8  # growth of a model in one decision: several small replicas, or one large one
    first_steps: int = 2  # limit without a ready replica, if larger than step_cores
    slack_s: float = 5.0  # tolerated wait of a request without an objective
    late_share: float = 0.05  # tolerated fraction of late requests when a replica is removed
    keep_paid: float = 1.25  # a replica on priced cores is removed if they cost so much more than it is worth
    fluid: float = 0.25  # weight of slots in use, against requests in time: only it has a slope under overload
    patience: float = 0.35  # fraction of the slack that counts: earlier requests may have waited, too
    ahead: int = 8  # replicas that are evaluated together, since the first of several may serve nothing in time
    tpot_fill: float = 0.8  # fraction of the slots that counts if time per token has an objective


RULES = Rules()
_HALF = math.sqrt(0.5)


class ServiceCapacity:
    """The capacity of one model for any number of its replicas, cached per number."""

    def __init__(self, forecast: Forecast, slots: int, slack_s: float | None, tpot: bool) -> None:
        self._forecast = forecast
        self._slots = slots * (RULES.tpot_fill if tpot else 1.0)
        self._slack_s = RULES.slack_s if slack_s is None else slack_s
        self._z = peakedness(forecast.dispersion)
        self._slack_s *= RULES.patience
        self._all = sum(weight * rate for weight, rate in zip(forecast.weights, forecast.rates, strict=True))
        self._cache: dict[int, float] = {}

    def of(self, replicas: int) -> float:
        """Returns the expected requests per second that so many replicas serve in time."""
        if replicas <= 0:
            return 0.0
        capacity = self._cache.get(replicas)
        if capacity is None:
            capacity = self._cache[replicas] = sum(
                weight * self._served(rate, self._slots * replicas)
                for weight, rate in zip(self._forecast.weights, self._forecast.rates, strict=True)
                if rate > 0.0
            )
        return capacity

    def unserved(self, replicas: int) -> float:
        """Returns the requests per second that so many replicas do not serve in time: the limit of any gain."""
        return self._all - self.of(replicas)

    def gain(self, replicas: int, most: int) -> float:
        """Returns the requests per second that one more replica serves: the best mean over several more, up to
        ``most``."""
        now = self.of(replicas)
        return max(
            ((self.of(replicas + n) - now) / n for n in range(1, min(RULES.ahead, most - replicas) + 1)),
            default=0.0,
        )

    def _served(self, rate: float, slots: float) -> float:
        load, service = rate * self._forecast.service_s, self._forecast.service_s
        in_time = 1.0 - delayed(load, self._z, slots, service, self._slack_s)
        fluid = RULES.fluid
        return rate * (1.0 - fluid) * in_time + fluid * occupied(load, self._z, slots) / service

    def fits(self, replicas: int) -> bool:
        """Returns whether so many replicas serve nearly all requests in time, at the highest shorter-term estimate."""
        late = self._late(max(self._forecast.rates[:3]), self._slots * replicas)
        return late <= RULES.late_share and self._forecast.waiting == 0

    def _late(self, rate: float, slots: float) -> float:
        """Returns the fraction of the requests that would be late."""
        service = self._forecast.service_s
        return delayed(rate * service, self._z, slots, service, self._slack_s)


class EncoderCapacity(ServiceCapacity):
    """The capacity of an encoder, whose replicas are servers without slots.

    Its requests are so short that the arrivals of a window are not one burst, but the requests of a rate that varies
    from window to window.
    """

    def __init__(self, forecast: Forecast, slack_s: float | None) -> None:
        super().__init__(replace(forecast, service_s=forecast.work_s), 1, slack_s, tpot=False)

    def _served(self, rate: float, slots: float) -> float:
        service, fluid = self._forecast.service_s, RULES.fluid
        in_use = sum(share * min(each, slots / service) for share, each in self._varied(rate))
        return rate * (1.0 - fluid) * (1.0 - self._late(rate, slots)) + fluid * in_use

    def _late(self, rate: float, slots: float) -> float:
        service = self._forecast.service_s
        late = sum(
            share * each * delayed(each * service, 1.0, slots, service, self._slack_s)
            for share, each in self._varied(rate)
        )
        return min(1.0, late / rate) if rate else 0.0

    def _varied(self, rate: float) -> tuple[tuple[float, float], ...]:
        """Returns three rates of windows, each with its share. Their variance is that of the arrivals of a window, less
        that of Poisson arrivals."""
        spread = math.sqrt(3.0 * (self._forecast.dispersion - 1.0) * rate / WINDOW_S)
        low = min(spread, rate)
        return (1 / 6, rate - low), (4 / 6, rate), (1 / 6, rate + spread)


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
