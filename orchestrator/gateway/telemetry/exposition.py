"""Renders metric families as the `/metrics` page, in Prometheus' text format or OpenMetrics.

Not prometheus_client (0.26): it writes a name with a colon in two ways into one OpenMetrics page, `vllm:x` in the
declaration and `vllm_x` in the samples, and takes twelve times as long.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from workers.messages.metric_family import MetricFamily, Point, joined, labelled

GATEWAY = "gateway"
PLAIN = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
_HELP_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n"})
PAUSES = 9  # pause between pages, in multiples of the last page's time: pages take at most a tenth of the time


def page(families: Sequence[MetricFamily], openmetrics: bool = False) -> tuple[bytes, str]:
    """Returns the page and its content type. Families of the same name are merged."""
    lines = [line for family in joined(families) for line in _lines(family, openmetrics)]
    if openmetrics:
        lines.append("# EOF")
    return "\n".join([*lines, ""]).encode(), OPENMETRICS if openmetrics else PLAIN


def merge(pages: Mapping[str, Sequence[MetricFamily]]) -> list[MetricFamily]:
    """Merges the families of several gateways; each series gets the label ``gateway``.

    Prometheus adds the series up. A sum made here would go down when a gateway leaves, which a counter must not do; a
    separate series ends, or restarts at zero, and `rate` handles both.
    """
    every = [labelled(family, GATEWAY, name) for name, families in sorted(pages.items()) for family in families]
    return joined(every)


def wants_openmetrics(accept: str) -> bool:
    """Returns whether an Accept header prefers OpenMetrics 1.0 to the text format."""
    weights = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for part in accept.split(","):
        kind, *parameters = (piece.strip() for piece in part.split(";"))
        options = dict(parameter.partition("=")[::2] for parameter in parameters)
        if kind in weights and options.get("version", "1.0.0") in ("1.0.0", "0.0.4"):
            weights[kind] = max(weights[kind], _weight(options.get("q", "1")))
    return 0 < weights["application/openmetrics-text"] >= weights["text/plain"]


def _weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _lines(family: MetricFamily, openmetrics: bool) -> Iterable[str]:
    counter = family.kind == "counter"
    sample = f"{family.name}_total" if counter else family.name
    declared = family.name if openmetrics else sample
    yield f"# HELP {declared} {_escaped_help(family.help, openmetrics)}"
    yield f"# TYPE {declared} {family.kind}"
    if family.kind == "histogram":
        bounds = [_number(bound) for bound in (*family.buckets, math.inf)]
        for point in family.points:
            yield from _histogram(family, point, bounds)
        return
    for point in family.points:
        labels = _labels(family, point)
        yield f"{sample}{{{labels}}} {_number(point.value)}" if labels else f"{sample} {_number(point.value)}"


def _histogram(family: MetricFamily, point: Point, bounds: Sequence[str]) -> Iterable[str]:
    labels = _labels(family, point)
    begin = f'{family.name}_bucket{{{labels}{"," if labels else ""}le="'
    total = 0
    for bound, count in zip(bounds, point.counts, strict=True):
        total += count
        yield f'{begin}{bound}"}} {total}'
    end = f"{{{labels}}}" if labels else ""
    yield f"{family.name}_count{end} {total}"
    yield f"{family.name}_sum{end} {_number(point.value)}"


def _labels(family: MetricFamily, point: Point) -> str:
    pairs = zip(family.labels, point.labels, strict=True)
    return ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in pairs)


def _escaped_help(text: str, openmetrics: bool) -> str:
    return text.translate(_ESCAPES if openmetrics else _HELP_ESCAPES)


def _number(value: float) -> str:
    """Returns the number in Go's notation, whole numbers with ``.0``."""
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(float(value))


MIN_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0
Page = tuple[bytes, str]  # body and content type


class Scrapes:
    """Makes pages one at a time, with pauses, so that many scrapes cannot stall streams. A page is never older than the
    scrape that it answers. Used from one event loop."""

    def __init__(self, make: Callable[[bool], Awaitable[Page]]) -> None:
        """``make`` returns the page in OpenMetrics (True) or in Prometheus' text format."""
        self._make = make
        self._next: dict[bool, asyncio.Task[Page]] = {}  # by format: the page that is next, not started yet
        self._turn = asyncio.Lock()
        self._not_before = 0.0

    async def page(self, openmetrics: bool) -> Page:
        """Returns the next page of that format. Raises what ``make`` raises."""
        task = self._next.get(openmetrics)
        if task is None:
            task = self._next[openmetrics] = asyncio.get_running_loop().create_task(self._in_turn(openmetrics))
        return await asyncio.shield(task)  # other scrapes still wait for it

    async def _in_turn(self, openmetrics: bool) -> Page:
        async with self._turn:
            await asyncio.sleep(self._not_before - time.monotonic())
            del self._next[openmetrics]
            began = time.monotonic()
            try:
                return await self._make(openmetrics)
            finally:
                ended = time.monotonic()
                pause = max(MIN_PAUSE_S, min(PAUSES * (ended - began), MAX_PAUSE_S))
                self._not_before = ended + pause
