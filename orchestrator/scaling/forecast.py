"""What is known of the demand of each model, and what is expected of it. Pure: the time is an argument."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

SPANS_S = (30.0, 120.0, 600.0, 3600.0)
"""Of the exponential averages of the arrivals: a burst, a spell of work, the last minutes, the hour."""

PEAK_SPAN_S = 3600.0  # how long the highest average of two minutes is remembered: what it asks for when it is at work
QUIET_S = 30.0  # before the first report it counts as quiet for so long: a few early samples make no forecast
SERVICE_SPAN_S = 1800.0  # how long what a request holds a slot is remembered
PRIOR_SERVICE_S = 5.0  # what a request holds a slot for, before one has ended
PRIOR_WEIGHT = 3.0  # requests that the prior counts for
WINDOW_S = 30.0  # in which arrivals are counted to see how bursty they are
WINDOWS = 24  # of the last ones in which something came, so many are remembered
OUTLIERS = 6  # one of so many is left out, the largest first: where a spell of work begins or ends is no burst
PRIOR_DISPERSION = 4.0  # variance over mean of such counts before any were seen; Poisson arrivals have 1
PRIOR_WINDOWS = 4  # that the prior counts for
GIVEN_UP_S = 60.0  # without another request nobody is taken to wait any more for a model that serves none
LONGER = 3.0  # what bursts over longer times than a window add to the dispersion, measured for gamma arrivals of CV 4


@dataclass(frozen=True)
class Load:
    """One model during some seconds: what has happened in them, and what is there at their end."""

    seconds: float
    arrived: int = 0
    ended: int = 0  # that had a slot
    slot_s: float = 0.0  # seconds that those that ended have held their slots
    waiting: int = 0
    live: int = 0
    longest_wait_s: float = 0.0  # of those that wait


@dataclass(frozen=True)
class Course:
    """The demand of one model so far."""

    began: float  # when it was first reported
    at: float  # the last report
    rates: tuple[float, ...] = (0.0,) * len(SPANS_S)  # arrivals a second, averaged over SPANS_S; not yet corrected
    peak: float = 0.0  # the highest of the second of these, slowly forgotten
    ended: float = 0.0  # requests that `slot_s` is the sum of, the old ones forgotten
    slot_s: float = 0.0
    window: tuple[float, int] = (0.0, 0)  # seconds and arrivals of the window that is not full yet
    misses: tuple[float, ...] = ()  # of each window, how far it was off what was expected: squared, over the count
    asked_at: float | None = None  # when a request was there last: it came, it waited or it was answered
    unserved_since: float | None = None  # when the first one came of those that nobody serves; None: none is there
    last: Load = field(default_factory=lambda: Load(0.0))

    def after(self, now: float, load: Load) -> Course:
        """With what the seconds before ``now`` brought."""
        seconds = max(load.seconds, 1e-3)
        rate = load.arrived / seconds
        rates = tuple(
            old + (1.0 - math.exp(-seconds / span)) * (rate - old)
            for old, span in zip(self.rates, SPANS_S, strict=True)
        )
        keep = math.exp(-seconds / SERVICE_SPAN_S)
        busy = load.arrived or load.waiting or load.live or load.ended
        return replace(
            self._counted(seconds, load.arrived),
            at=now,
            rates=rates,
            peak=max(self.peak * math.exp(-seconds / PEAK_SPAN_S), rates[1]),
            ended=self.ended * keep + load.ended,
            slot_s=self.slot_s * keep + load.slot_s,
            asked_at=now if busy else self.asked_at,
            unserved_since=self._unserved_since(now, load),
            last=load,
        )

    def _unserved_since(self, now: float, load: Load) -> float | None:
        """A request may leave after a while, as its client or `hold_s` has it: the next one waits on in its place."""
        if load.live or load.ended:
            return None
        if load.waiting or load.arrived:
            first = now - max(load.longest_wait_s, 0.0)
            return first if self.unserved_since is None else min(first, self.unserved_since)
        given_up = self.asked_at is None or now - self.asked_at > GIVEN_UP_S
        return None if given_up else self.unserved_since

    def _counted(self, seconds: float, arrived: int) -> Course:
        """With the window that these seconds belong to; a full one tells how far off the forecast was."""
        length, count = self.window[0] + seconds, self.window[1] + arrived
        if length < WINDOW_S:
            return replace(self, window=(length, count))
        expected = self.rates[0] * length
        if count == 0 and expected < 1.0:
            return replace(self, window=(0.0, 0))
        miss = (count - expected) ** 2 / max(count, expected)
        return replace(self, window=(0.0, 0), misses=(*self.misses[1 - WINDOWS :], miss))

    def forecast(self) -> Forecast:
        """What is expected, from what was.

        A shorter average is believed as far as it is off the longer one by more than chance: with the difference d and
        the variance v = dispersion x rate / span of such an average, the part d^2 / (d^2 + v) of the difference.
        """
        seen = max(self.at - self.began, QUIET_S)
        service = (self.slot_s + PRIOR_WEIGHT * PRIOR_SERVICE_S) / (self.ended + PRIOR_WEIGHT)
        dispersion = self.dispersion
        believed: list[float] = []
        for rate, span in zip(reversed(self.rates), reversed(SPANS_S), strict=True):
            rate /= 1.0 - math.exp(-seen / span)
            if believed:
                off = rate - believed[-1]
                chance = dispersion * max(rate, believed[-1]) / min(span, seen)
                rate = believed[-1] + off * off * off / (off * off + chance) if off else rate
            believed.append(rate)
        believed.insert(0, max(self.peak, *believed[:2]))
        return Forecast(tuple(reversed(believed)), service, dispersion, self.last.waiting, self.last.live)

    @property
    def dispersion(self) -> float:
        """Variance over mean of the arrivals in a window, without the outliers; at least that of Poisson arrivals."""
        known = sorted(self.misses)[: len(self.misses) - len(self.misses) // OUTLIERS]
        total = sum(known) + PRIOR_WINDOWS * PRIOR_DISPERSION
        return 1.0 + LONGER * max(0.0, total / (len(known) + PRIOR_WINDOWS) - 1.0)


@dataclass(frozen=True)
class Forecast:
    """What is expected of one model.

    ``rates`` are arrivals a second, one for each of SPANS_S, and the peak: each is a guess, and nobody knows which is
    right.
    ``service_s`` is what a request holds a slot for; ``dispersion`` variance over mean of the arrivals in WINDOW_S.
    """

    rates: tuple[float, ...]
    service_s: float
    dispersion: float
    waiting: int
    live: int


NOTHING = Forecast((0.0,) * (len(SPANS_S) + 1), PRIOR_SERVICE_S, PRIOR_DISPERSION, 0, 0)


@dataclass(frozen=True)
class History:
    """What all models were asked for. A value: `after` gives the next one."""

    courses: Mapping[str, Course] = field(default_factory=lambda: MappingProxyType({}))

    def after(self, now: float, loads: Mapping[str, Load]) -> History:
        """With what happened until ``now``, in seconds of any clock that only grows.

        Each load says how many seconds it covers. A model that is not named keeps what is known of it.
        """
        known = self.courses
        new = {
            name: known.get(name, Course(began=now - load.seconds, at=now)).after(now, load)
            for name, load in loads.items()
        }
        return History(MappingProxyType({**known, **new}))

    def without(self, name: str) -> History:
        """As if the model had never been."""
        return History(MappingProxyType({one: course for one, course in self.courses.items() if one != name}))

    def forecast(self, name: str) -> Forecast:
        """What is expected of a model; nothing, of one that was never reported."""
        course = self.courses.get(name)
        return NOTHING if course is None else course.forecast()

    def asked_at(self, name: str) -> float | None:
        """When a request for it was there last; None when none ever was."""
        course = self.courses.get(name)
        return None if course is None else course.asked_at

    def unserved_s(self, name: str, now: float) -> float:
        """For how long requests have come without one being served; 0.0 when none is there."""
        course = self.courses.get(name)
        since = None if course is None else course.unserved_since
        return 0.0 if since is None else now - since

    def last(self, name: str) -> Load:
        """What was reported of it last."""
        course = self.courses.get(name)
        return Load(0.0) if course is None else course.last
