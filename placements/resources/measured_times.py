"""The times that requests took on replicas of one shape, as counts that add up in any order, and their speeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Times = dict[int, dict[int, int]]
"""Numbers of requests by what was measured and by the class of the time: of PACE the seconds from token to token, of a
class of lengths (`length_class`) those to the first token of such prompts."""

PACE = 0
LEAST_REQUESTS = 20  # of a measurement that replaces the estimate of its own shape
RATIO = 1.05  # between two classes of times, so that a time is within 2.5 % of its class
CLASSES = range(-240, 240)  # 8 us to 34 hours
LEAST_TOKENS = 8  # output tokens of a request whose pace counts
LOW = 0.2
"""The quantile of the times that counts as undisturbed. A prefill of another request stalls all decodes, and a prompt
waits for the current step: most measured times are longer than the undisturbed one, and none is much shorter."""
LEAST_OF_LENGTH = 5  # requests of a class of lengths, whose quantile LOW is then not the least of all
SPREAD = 2.0  # minimum ratio of the lengths of the longest and the shortest group of prompts, to fit a line


def length_class(tokens: int) -> int:
    """Returns the class of a prompt's length, 1 or more; two classes are an octave."""
    return 1 + round(2 * math.log2(max(1, tokens)))


def note(times: Times, measured: int, seconds: float) -> None:
    """Counts a request."""
    if seconds > 0.0:
        number = min(max(round(math.log(seconds, RATIO)), CLASSES[0]), CLASSES[-1])
        counts = times.setdefault(measured, {})
        counts[number] = counts.get(number, 0) + 1


def merge(into: Times, times: Times) -> None:
    """Adds the counts of ``times``."""
    for measured, counts in times.items():
        own = into.setdefault(measured, {})
        for number, count in counts.items():
            own[number] = own.get(number, 0) + count


def speeds_of(times: Times) -> tuple[dict[str, float], int]:
    """Returns the speeds in the fields of `calibration.FIELDS`, and the number of requests.

    1. step_ms: the undisturbed pace, of LEAST_REQUESTS or more.
    2. prefill_base_ms and prefill_token_ms: a line through the undisturbed times to the first token of each class of
       lengths; omitted if all prompts had about the same length.
    """
    speeds, paces = {}, times.get(PACE, {})
    if sum(paces.values()) >= LEAST_REQUESTS:
        speeds["step_ms"] = round(1000 * _low(paces), 4)
    firsts = {number: counts for number, counts in times.items() if number != PACE}
    prompts = sum(sum(counts.values()) for counts in firsts.values())
    if prompts >= LEAST_REQUESTS:
        usual = sorted(number for number, counts in firsts.items() if sum(counts.values()) >= LEAST_OF_LENGTH)
        fitted = _line([2 ** ((number - 1) / 2) for number in usual], [1000 * _low(firsts[number]) for number in usual])
        if fitted is not None:
            speeds |= {"prefill_base_ms": round(fitted[0], 4), "prefill_token_ms": round(fitted[1], 6)}
    return speeds, max(sum(paces.values()), prompts)


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float] | None:
    """Fits a line (base, slope) by least squares; neither is negative. ``xs`` are sorted lengths. None if they are too
    similar, or longer prompts took no longer: such a line does not extrapolate."""
    if not xs or xs[-1] < SPREAD * xs[0]:
        return None
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    if slope <= 0.0:
        return None
    base = mean_y - slope * mean_x
    return (base, slope) if base >= 0 else (0.0, sum(ys) / sum(xs))


def _low(counts: Mapping[int, int]) -> float:
    rest = int(sum(counts.values()) * LOW)
    for number, count in sorted(counts.items()):
        rest -= count
        if rest < 0:
            return float(RATIO**number)
    raise ValueError("no times")
