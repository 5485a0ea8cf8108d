"""Means and percentiles of measured values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Summary:
    """The mean and the percentiles of a list of numbers, in their unit."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary | None:
        """Returns the summary; None for an empty list."""
        if not values:
            return None
        ordered = sorted(values)
        mean = math.fsum(ordered) / len(ordered)
        return cls(len(ordered), mean, *(_at(ordered, percent) for percent in PERCENTILES))

    def as_dict(self) -> dict[str, float | int]:
        figures = {f"p{percent}": round(getattr(self, f"p{percent}"), 3) for percent in PERCENTILES}
        return {"count": self.count, "mean": round(self.mean, 3), **figures}


def _at(ordered: Sequence[float], percent: float) -> float:
    """Returns the percentile with linear interpolation, like numpy's default."""
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    value = ordered[low] + (ordered[high] - ordered[low]) * (position - low)
    return min(max(value, ordered[low]), ordered[high])  # rounding must not exceed the neighbours
