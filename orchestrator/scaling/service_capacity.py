"""What replicas of one model are worth: how many requests they would serve in time. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.scaling.forecast import Forecast
from orchestrator.scaling.queueing_model import delayed, occupied, peakedness


@dataclass(frozen=True)
class Rules:
    """The numbers of the autoscaler; docs/scaling.md says what each is for. Tuned by benchmarks/scaling.py."""

    horizon_s: float = 150.0  # H: what a replica serves is counted for so long
    horizon_loads: float = 3.0  # and for so many load times at least
    reluctance: float = 2.5  # what a replica has to serve more than the one that ends for it
    reload: float = 4.0  # load times for which the loss of an idle replica counts: it can be loaded again
    residency: float = 2.0  # load times that a replica stays at least
    warm_up_s: float = 30.0  # of a new replica, whose measurements say nothing yet
    ends_a_tick: int = 2  # replicas that end for others of their priority, in one decision
    weights: tuple[float, ...] = (0.3, 0.2, 0.1, 0.32, 0.08)  # of the forecasts: those of SPANS_S, and the peak
    least_served: float = 2.0  # requests that a replica more must serve in time within the horizon
    waiting_weight: float = 0.1  # of a request that waits for the first replica
    starved_s: float = 60.0  # after so long without a replica a request goes before second ones of others
    unserved_s: float = 300.0  # and so do requests that came for so long, each of which gave up before
    step_cores: int = 8  # by which a model may grow in one decision: several small replicas, or one large one
    first_steps: int = 2  # replicas of a model that wakes, or those of step_cores, until the first is ready
    slack_s: float = 5.0  # what a request may wait where no objective says it
    late_share: float = 0.05  # of the requests that may be late where a replica fewer is tried
    keep_paid: float = 1.25  # a replica on cores that cost goes when it is worth so much less than they cost
    fluid: float = 0.25  # part of the worth that counts slots in use, not requests in time: overload has no other slope
    patience: float = 0.35  # of the slack, what is counted on: those before may have waited too
    ahead: int = 8  # replicas that are looked at together, since the first ones of several may serve nothing in time
    tpot_fill: float = 0.8  # part of the slots that is used where time per token has an objective


RULES = Rules()


class ServiceCapacity:
    """Of one model, for any number of its replicas; each number is computed once."""

    def __init__(self, forecast: Forecast, slots: int, slack_s: float | None, tpot: bool, rules: Rules) -> None:
        self._forecast = forecast
        self._rules = rules
        self._slots = slots * (rules.tpot_fill if tpot else 1.0)
        self._slack_s = rules.slack_s if slack_s is None else slack_s
        self._z = peakedness(forecast.dispersion)
        self._slack_s *= rules.patience
        self._all = sum(weight * rate for weight, rate in zip(rules.weights, forecast.rates, strict=True))
        self._known: dict[int, float] = {}

    def of(self, replicas: int) -> float:
        """Requests a second that so many replicas serve in time, on the average of what is expected."""
        if replicas <= 0:
            return 0.0
        known = self._known.get(replicas)
        if known is None:
            known = self._known[replicas] = sum(
                weight * self._served(rate, self._slots * replicas)
                for weight, rate in zip(self._rules.weights, self._forecast.rates, strict=True)
                if rate > 0.0
            )
        return known

    def most_more(self, replicas: int) -> float:
        """What any number of replicas more could serve at most: no model has more than all of its requests."""
        return self._all - self.of(replicas)

    def more(self, replicas: int, most: int) -> float:
        """Requests a second that one replica more serves: the best mean of several, as many as there may be."""
        now = self.of(replicas)
        return max(
            ((self.of(replicas + n) - now) / n for n in range(1, min(self._rules.ahead, most - replicas) + 1)),
            default=0.0,
        )

    def _served(self, rate: float, slots: float) -> float:
        load, service = rate * self._forecast.service_s, self._forecast.service_s
        in_time = 1.0 - delayed(load, self._z, slots, service, self._slack_s)
        fluid = self._rules.fluid
        return rate * (1.0 - fluid) * in_time + fluid * occupied(load, self._z, slots) / service

    def fits(self, replicas: int) -> bool:
        """Whether nearly all would be served in time by so many, at the highest of the nearer forecasts."""
        service = self._forecast.service_s
        load = max(self._forecast.rates[:3]) * service
        late = delayed(load, self._z, self._slots * replicas, service, self._slack_s)
        return late <= self._rules.late_share and self._forecast.waiting == 0
