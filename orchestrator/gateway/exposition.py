"""From families to the page of `/metrics`: Prometheus' text format, or OpenMetrics where the client asks for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from workers.metric_family import MetricFamily, joined, labelled

GATEWAY = "gateway"


def page(families: Sequence[MetricFamily], accept: str = "") -> tuple[bytes, str]:
    """The page and its content type. Families of one name are one family, whoever told them."""
    encode, content_type = choose_encoder(accept)
    return encode(_Families(families)), content_type


def merge(pages: Mapping[str, Sequence[MetricFamily]]) -> list[MetricFamily]:
    """The families of several gateways as those of all, each series with the label ``gateway``.

    Prometheus adds them up. None of them is added up here: a sum that a gateway leaves would go down, which a counter
    must not; a series of its own ends, or begins anew at zero, and `rate` knows both.
    """
    every = [labelled(family, GATEWAY, name) for name, families in sorted(pages.items()) for family in families]
    return joined(every)


class _Families(Collector):
    def __init__(self, families: Sequence[MetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return map(_metric, joined(self._families))


def _metric(family: MetricFamily) -> Metric:
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(family.name, family.help, labels=family.labels)
        bounds = [*map(floatToGoString, family.buckets), "+Inf"]
        for point in family.points:
            total, buckets = 0, []
            for bound, count in zip(bounds, point.counts, strict=True):
                total += count
                buckets.append((bound, float(total)))
            histogram.add_metric(point.labels, buckets, point.value)
        return histogram
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = kind(family.name, family.help, labels=family.labels)
    for point in family.points:
        metric.add_metric(point.labels, point.value)
    return metric
