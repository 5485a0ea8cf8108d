"""The demand history of each model and the forecast from it. Pure: the time is an argument."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import msgspec

from placements.resources.measured_times import LEAST_TOKENS, PACE, Times, length_class, note

SPANS_S = (30.0, 120.0, 600.0, 3600.0)
"""Time constants of the exponential averages of the arrivals: a burst, a busy period, the last minutes, the hour."""

PEAK_SPAN_S = 3600.0  # time constant of the peak, the highest two-minute average: the demand of a busy period
QUIET_S = 30.0  # quiet time assumed before the first report, so that a few early samples make no forecast
SERVICE_SPAN_S = 1800.0  # time constant of the service time
PRIOR_SERVICE_S = 5.0  # assumed service time before a request has ended
PRIOR_WEIGHT = 3.0  # weight of that prior, in requests
PRIOR_WORK_S = 0.05  # likewise, seconds of an encoder's engine for a request, of one input
WINDOW_S = 30.0  # arrivals are counted in windows of this length to measure burstiness
WINDOWS = 24  # windows with arrivals that are remembered
OUTLIERS = 6  # one window in so many is dropped, the largest first: the edge of a busy period is not a burst
AHEAD = 2  # windows between a prediction and the window that it is judged by: a replica serves after its load
LEAST_EXPECTED = 0.5  # arrivals: an empty window judges no estimates that all expected less
PRIOR_DISPERSION = 4.0  # assumed variance over mean of these counts; Poisson arrivals have 1
PRIOR_WINDOWS = 4  # weight of that prior, in windows
GIVEN_UP_S = 60.0  # after so long without a request, the clients of a model without replicas are assumed gone
LONGER = 3.0  # factor for bursts that are longer than a window, measured for gamma arrivals of CV 4
SILENCE_S = 60.0  # a spell ends after so long without an arrival
BEGINNING_S = 15.0  # added to the length of a spell, so that its first arrivals make no forecast
MEMORY_S = 3600.0  # time constant of the ended spells
PRIOR = (0.24, 0.16, 0.08, 0.26, 0.20, 0.06)
"""Weights before anything was predicted: of the averages over 30, 120, 600 and 3600 s, the spells and the peak."""

PRIOR_PREDICTIONS = 10.0  # weight of PRIOR, in predictions
PREDICTIONS = 400  # that are remembered, of all models together
PASSES = 2  # of the search for the best weights, whenever there is a new prediction

Likelihoods = tuple[float, ...]
"""The likelihood of the arrivals of a window by each estimate, relative to the best of them."""


class Counts(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The counts of one model since the last report: of one gateway, of all gateways, or of the simulator.

    Callers add to the attributes, and start over with a new object. ``times`` do not concern the autoscaler.
    """

    arrived: int = 0  # inference requests, including those rejected by a full queue
    ended: int = 0  # requests that had a slot and have ended
    slot_s: float = 0.0  # seconds that the ended requests held their slots, summed
    first_tokens: int = 0  # requests that have produced their first token
    prefill_s: float = 0.0  # seconds from the slot to the first token, or of the batches, summed over these
    encoded: int = 0  # answered requests of an encoder
    inputs: int = 0  # of these
    work_s: float = 0.0  # seconds of an engine that these need in full batches, summed
    times: dict[str, Times] = {}  # of requests that generate, by the version of the model

    def time(self, version: str, prompt_tokens: int, first_s: float, output_tokens: int, decode_s: float) -> None:
        """Counts the times of a request: ``first_s`` from the slot to the first token, ``decode_s`` from there to the
        last."""
        times = self.times.setdefault(version, {})
        if prompt_tokens:
            note(times, length_class(prompt_tokens), first_s)
        if output_tokens >= LEAST_TOKENS:
            note(times, PACE, decode_s / (output_tokens - 1))

    def add(self, counts: Counts) -> None:
        """Adds the counts of another report, but not its times."""
        for name in SUMMED:
            setattr(self, name, getattr(self, name) + getattr(counts, name))


SUMMED = tuple(name for name in Counts.__struct_fields__ if name != "times")


class Load(Counts):
    """The load of one model over some seconds: the counts, and the queue and slots at their end."""

    seconds: float
    waiting: int = 0
    live: int = 0
    longest_wait_s: float = 0.0  # of the waiting requests

    @classmethod
    def of(cls, counts: Counts, seconds: float, *, waiting: int, live: int, longest_wait_s: float) -> Load:
        """Returns the load of these counts over ``seconds``, with the current queue and slots."""
        load = cls(seconds, waiting, live, longest_wait_s)
        load.add(counts)
        return load


@dataclass(frozen=True)
class Spells:
    """The present spell, if there is one, and the sums of the ended ones."""

    began: float | None = None
    last: float = 0.0  # when a request arrived last
    arrived: int = 0  # in the present spell
    past: float = 0.0  # arrivals in ended spells, decaying
    past_s: float = 0.0  # the seconds of these, decaying

    def after(self, now: float, seconds: float, arrived: int) -> Spells:
        """Returns the spells with so many arrivals in the seconds before ``now``."""
        keep = math.exp(-seconds / MEMORY_S)
        past, past_s = self.past * keep, self.past_s * keep
        if arrived:
            began = now - seconds if self.began is None else self.began
            return Spells(began, now, self.arrived + arrived, past, past_s)
        if self.began is not None and now - self.last > SILENCE_S:
            return Spells(past=past + self.arrived, past_s=past_s + self.last - self.began)
        return Spells(self.began, self.last, self.arrived, past, past_s)

    def rate(self, now: float) -> float:
        """Returns the arrivals per second within spells; 0.0 between two of them."""
        if self.began is None:
            return 0.0
        return (self.past + self.arrived) / (self.past_s + now - self.began + BEGINNING_S)


@dataclass(frozen=True)
class Course:
    """The demand of one model so far."""

    began: float  # the first report
    at: float  # the last report
    rates: tuple[float, ...] = (0.0,) * len(SPANS_S)  # arrivals per second, averaged over SPANS_S, without correction
    peak: float = 0.0  # the highest value of the second average, decaying
    ended: float = 0.0  # requests in `slot_s`, decaying
    slot_s: float = 0.0
    encoded: float = 0.0  # requests in `work_s`, decaying
    inputs: float = 0.0  # of these
    work_s: float = 0.0
    window: tuple[float, int] = (0.0, 0)  # seconds and arrivals of the current window
    spells: Spells = field(default_factory=Spells)
    predicted: tuple[Forecast, ...] = ()  # at the ends of the last windows
    judged: Likelihoods | None = None  # the earliest of these, by the window that has just ended
    misses: tuple[float, ...] = ()  # per window: squared difference from the expected count, over the count
    asked_at: float | None = None  # the last time with an arriving, waiting or running request
    unserved_since: float | None = None  # arrival of the first unserved request; None: there is none
    last: Load = field(default_factory=lambda: Load(0.0))

    def after(self, now: float, load: Load) -> Course:
        """Returns the course with the load of the seconds before ``now``."""
        seconds = max(load.seconds, 1e-3)
        rate = load.arrived / seconds
        rates = tuple(
            old + (1.0 - math.exp(-seconds / span)) * (rate - old)
            for old, span in zip(self.rates, SPANS_S, strict=True)
        )
        keep = math.exp(-seconds / SERVICE_SPAN_S)
        busy = load.arrived or load.waiting or load.live or load.ended
        length, count = self.window[0] + seconds, self.window[1] + load.arrived
        course = replace(
            self._counted(length, count),
            at=now,
            rates=rates,
            peak=max(self.peak * math.exp(-seconds / PEAK_SPAN_S), rates[1]),
            ended=self.ended * keep + load.ended,
            slot_s=self.slot_s * keep + load.slot_s,
            encoded=self.encoded * keep + load.encoded,
            inputs=self.inputs * keep + load.inputs,
            work_s=self.work_s * keep + load.work_s,
            spells=self.spells.after(now, seconds, load.arrived),
            asked_at=now if busy else self.asked_at,
            unserved_since=self._unserved_since(now, load),
            judged=None,
            last=load,
        )
        return course if length < WINDOW_S else course._predict(length, count)

    def _unserved_since(self, now: float, load: Load) -> float | None:
        """A request may leave because of its client or `hold_s`; the wait then continues with the next one."""
        if load.live or load.ended:
            return None
        if load.waiting or load.arrived:
            first = now - max(load.longest_wait_s, 0.0)
            return first if self.unserved_since is None else min(first, self.unserved_since)
        given_up = self.asked_at is None or now - self.asked_at > GIVEN_UP_S
        return None if given_up else self.unserved_since

    def _counted(self, length: float, count: int) -> Course:
        """Returns the course with this window; a full one records the forecast's error."""
        if length < WINDOW_S:
            return replace(self, window=(length, count))
        expected = self.rates[0] * length
        if count == 0 and expected < 1.0:
            return replace(self, window=(0.0, 0))
        miss = (count - expected) ** 2 / max(count, expected)
        return replace(self, window=(0.0, 0), misses=(*self.misses[1 - WINDOWS :], miss))

    def _predict(self, length: float, count: int) -> Course:
        """Returns the course after a full window, which judges an earlier forecast, with the present one."""
        predicted = (*self.predicted, self.forecast())
        if len(predicted) <= AHEAD + 1:
            return replace(self, predicted=predicted)
        first = predicted[0]
        expected = [rate * length for rate in first.rates]
        judged = likelihoods(count, expected, first.dispersion) if count or max(expected) > LEAST_EXPECTED else None
        return replace(self, predicted=predicted[1:], judged=judged)

    def unserved_s(self, now: float) -> float:
        """Returns for how long requests have arrived without one being served; 0.0 if there are none."""
        return 0.0 if self.unserved_since is None else now - self.unserved_since

    def forecast(self) -> Forecast:
        """Returns the forecast.

        A shorter average counts as far as its difference from the longer one exceeds chance: with the difference d and
        the variance v = dispersion x rate / span of such an average, the fraction d^2 / (d^2 + v) of the difference.
        """
        observed_s = max(self.at - self.began, QUIET_S)
        service = (self.slot_s + PRIOR_WEIGHT * PRIOR_SERVICE_S) / (self.ended + PRIOR_WEIGHT)
        work_s = self.work_s + PRIOR_WEIGHT * PRIOR_WORK_S
        dispersion = self.dispersion
        estimates: list[float] = []
        for rate, span in zip(reversed(self.rates), reversed(SPANS_S), strict=True):
            rate /= 1.0 - math.exp(-observed_s / span)
            if estimates:
                difference = rate - estimates[-1]
                square = difference * difference
                variance = dispersion * max(rate, estimates[-1]) / min(span, observed_s)
                rate = estimates[-1] + square * difference / (square + variance) if difference else rate
            estimates.append(rate)
        estimates.insert(0, self.spells.rate(self.at))
        estimates.insert(0, max(self.peak, *estimates[1:3]))
        return Forecast(
            tuple(reversed(estimates)),
            service,
            dispersion,
            self.last.waiting,
            self.last.live,
            work_s / (self.encoded + PRIOR_WEIGHT),
            self.work_s / self.inputs if self.inputs else None,
        )

    @property
    def dispersion(self) -> float:
        """Variance over mean of the arrivals per window, without outliers; at least 1, that of Poisson arrivals."""
        misses = sorted(self.misses)[: len(self.misses) - len(self.misses) // OUTLIERS]
        total = sum(misses) + PRIOR_WINDOWS * PRIOR_DISPERSION
        return 1.0 + LONGER * max(0.0, total / (len(misses) + PRIOR_WINDOWS) - 1.0)


@dataclass(frozen=True)
class Forecast:
    """The expected demand of one model.

    ``rates`` are alternative estimates of the arrivals per second: one for each of SPANS_S, that of the spells, and the
    peak. ``weights`` are the fractions with which they count.
    ``service_s`` is the time that a request holds a slot; ``dispersion`` is the variance over the mean of the arrivals
    in WINDOW_S. Of an encoder, ``work_s`` is the time of the engine that a request needs in full batches, and
    ``input_s`` that of one input, None if it was never measured.
    """

    rates: tuple[float, ...]
    service_s: float
    dispersion: float
    waiting: int
    live: int
    work_s: float = PRIOR_WORK_S
    input_s: float | None = None
    weights: tuple[float, ...] = PRIOR


@dataclass(frozen=True)
class EstimateWeights:
    """The weights with which a mixture of the estimates predicts best (expectation maximization)."""

    predictions: tuple[Likelihoods, ...] = ()
    weights: tuple[float, ...] = PRIOR

    def after(self, judged: Iterable[Likelihoods]) -> EstimateWeights:
        """Returns the weights with further predictions."""
        new = tuple(judged)
        if not new:
            return self
        predictions = (*self.predictions, *new)[-PREDICTIONS:]
        weights = self.weights
        for _ in range(PASSES):
            weights = _improved(weights, predictions)
        return EstimateWeights(predictions, weights)


def _improved(weights: Sequence[float], predictions: Sequence[Likelihoods]) -> tuple[float, ...]:
    """Returns the mean share of each estimate in the predictions, beginning with PRIOR."""
    sums = [PRIOR_PREDICTIONS * weight for weight in PRIOR]
    for likelihoods in predictions:
        parts = [weight * likelihood for weight, likelihood in zip(weights, likelihoods, strict=True)]
        total = sum(parts)
        for i, part in enumerate(parts):
            sums[i] += part / total
    total = len(predictions) + PRIOR_PREDICTIONS
    return tuple(each / total for each in sums)


def likelihoods(count: int, expected: Sequence[float], dispersion: float) -> Likelihoods:
    """Returns the likelihoods of so many arrivals, where each estimate expected another number.

    Counts have a negative binomial distribution with that variance over mean.
    """
    logs = [_log_likelihood(count, max(mean, 1e-3), max(dispersion, 1.05)) for mean in expected]
    best = max(logs)
    return tuple(math.exp(each - best) for each in logs)


def _log_likelihood(count: int, mean: float, dispersion: float) -> float:
    """Without the terms that are the same for every mean."""
    size = mean / (dispersion - 1.0)
    return math.lgamma(count + size) - math.lgamma(size) - size * math.log(dispersion)


@dataclass(frozen=True)
class History:
    """The demand of all models so far. Immutable: `after` returns the next one."""

    courses: Mapping[str, Course] = field(default_factory=lambda: MappingProxyType({}))
    learned: EstimateWeights = field(default_factory=EstimateWeights)

    def after(self, now: float, loads: Mapping[str, Load]) -> History:
        """Returns the history with the loads until ``now``, in seconds of a monotonic clock.

        Each load gives the seconds that it covers. Models without a load keep their course.
        """
        courses = {
            name: self.courses.get(name, Course(began=now - load.seconds, at=now)).after(now, load)
            for name, load in loads.items()
        }
        judged = [course.judged for course in courses.values() if course.judged is not None]
        return History(MappingProxyType({**self.courses, **courses}), self.learned.after(judged))

    def without(self, name: str) -> History:
        """Returns the history without this model."""
        kept = {model: course for model, course in self.courses.items() if model != name}
        return replace(self, courses=MappingProxyType(kept))

    def course(self, name: str) -> Course:
        """Returns the demand of a model; zero if it was never reported."""
        return self.courses.get(name, Course(began=0.0, at=0.0))

    def forecast(self, name: str) -> Forecast:
        """Returns the forecast of a model, with the learned weights."""
        return replace(self.course(name).forecast(), weights=self.learned.weights)
