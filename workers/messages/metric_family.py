"""Metrics as plain values that cross processes; they are converted to Prometheus' forms at the end."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeVar

import msgspec

from workers.messages.actor_message import actor_message

K = TypeVar("K", bound=tuple[str, ...])
FamilyKind = Literal["gauge", "counter", "histogram"]


class Point(msgspec.Struct, frozen=True, array_like=True):
    """One series of a family: a value, or the sum and the counts of a histogram."""

    labels: tuple[str, ...]  # the values, in the order of the family's labels
    value: float  # of a histogram: the sum of all observations
    counts: tuple[int, ...] = ()  # of a histogram: observations in each bucket, not cumulative; the last: above all


@actor_message
class MetricFamily(msgspec.Struct, frozen=True, kw_only=True):
    """One metric with all its series. A counter's name has no ``_total``: Prometheus' format adds it."""

    name: str
    kind: FamilyKind
    help: str
    labels: tuple[str, ...] = ()
    points: tuple[Point, ...] = ()
    buckets: tuple[float, ...] = ()  # of a histogram: the upper bounds, ascending, without +Inf


class Histogram:
    """Observations by bucket. Cheap enough for every token: a bisection and two additions."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Add an observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Iterable[float]) -> None:
        """Add one observation of each value, at a fraction of the cost of a call for each."""
        ordered = sorted(values)
        below = 0
        for bucket, bound in enumerate(self.bounds):
            up_to = bisect_right(ordered, bound)
            self.counts[bucket] += up_to - below
            below = up_to
        self.counts[-1] += len(ordered) - below
        self.sum += sum(ordered)

    def point(self, *labels: str) -> Point:
        return Point(labels, self.sum, tuple(self.counts))


def gauge(name: str, help: str, value: float) -> MetricFamily:
    """Returns a family of one series without labels."""
    return MetricFamily(name=name, kind="gauge", help=help, points=(Point((), float(value)),))


def by_label(
    name: str,
    kind: Literal["gauge", "counter"],
    help: str,
    labels: Sequence[str],
    values: Mapping[K, float],
) -> MetricFamily:
    """Returns a family from values keyed by its label values, in the order of ``labels``."""
    points = tuple(Point(key, float(value)) for key, value in values.items())
    return MetricFamily(name=name, kind=kind, help=help, labels=tuple(labels), points=points)


def labelled(family: MetricFamily, label: str, value: str) -> MetricFamily:
    """Returns the family with one more label, the same for all its series."""
    points = tuple(Point((*point.labels, value), point.value, point.counts) for point in family.points)
    return msgspec.structs.replace(family, labels=(*family.labels, label), points=points)


def joined(families: Sequence[MetricFamily]) -> list[MetricFamily]:
    """Returns one family for each name, with all its series.

    Families of the same name must have the same kind, labels and buckets; one that differs from the first, as from
    another version of corewright, is left out.
    """
    by_name: dict[str, MetricFamily] = {}
    for family in families:
        first = by_name.get(family.name)
        if first is None:
            by_name[family.name] = family
        elif (first.labels, first.buckets, first.kind) == (family.labels, family.buckets, family.kind):
            by_name[family.name] = msgspec.structs.replace(first, points=(*first.points, *family.points))
    return list(by_name.values())
