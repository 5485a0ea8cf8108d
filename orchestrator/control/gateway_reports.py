"""What gateways report about requests: those in progress, while an operator looks, and the load of the last hour."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec.structs

from orchestrator.messages.gateway_places import GATEWAY_LOST_S
from orchestrator.scaling.demand_report import (
    FIRST_TOKEN_S,
    TOKEN_S,
    DemandReport,
    DemandWindow,
    LiveRequest,
    ModelLoad,
    percentile,
)

WATCHED_S = 10.0  # after the last query, gateways stop reporting their requests
ENDED = 200  # requests that have ended, kept while they are watched


class LiveRequests:
    """The last report of each gateway about its requests, on the controller's event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._watched_until = float("-inf")
        self._open: dict[str, tuple[float, list[LiveRequest]]] = {}  # by gateway
        self._ended: deque[LiveRequest] = deque(maxlen=ENDED)
        self._cancelled: dict[str, set[str]] = {}  # by gateway; sent with the reply to its next report

    @property
    def watched(self) -> bool:
        return self._clock() < self._watched_until

    def receive(self, report: DemandReport) -> dict[str, Any]:
        """Receives a gateway's report. Returns the fields of the reply to it."""
        if not self.watched:
            self._open.clear()
            self._ended.clear()
        else:
            self._open[report.gateway] = self._clock(), [each for each in report.requests if not each.ended]
            self._ended.extend(each for each in report.requests if each.ended)
        return {"watched": self.watched, "cancelled": sorted(self._cancelled.pop(report.gateway, ()))}

    def query(self) -> list[dict[str, Any]]:
        """Returns the open requests, the oldest first, then those that have ended, the last first. Gateways report them
        from now on."""
        now = self._clock()
        self._watched_until = now + WATCHED_S
        heard = [each for at, requests in self._open.values() if now - at < GATEWAY_LOST_S for each in requests]
        shown = [*sorted(heard, key=lambda each: -each.age_s), *reversed(self._ended)]
        return [_as_dict(each) for each in shown]

    def cancel(self, request: str) -> bool:
        """Has a request cancelled by its gateway with its next report; returns False if no gateway has it."""
        gateways = [
            name for name, (_, requests) in self._open.items() if any(each.request == request for each in requests)
        ]
        for name in gateways:
            self._cancelled.setdefault(name, set()).add(request)
        return bool(gateways)


def _as_dict(request: LiveRequest) -> dict[str, Any]:
    decision = request.decision
    fields = msgspec.structs.asdict(request)
    return {**fields, "decision": None if decision is None else msgspec.structs.asdict(decision)}


SAMPLE_S = 10.0
SAMPLES = 360  # one hour
RECENT = 6  # samples of which percentiles are taken: a minute
NEW_REPORTS = 3  # a gateway with a number up to this has just started, so that all it has counted is new
FIGURES = ("queue", "running", "tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "gap_p50_ms", "gap_p99_ms")


@dataclass
class _Counted:
    """What was counted in one sample."""

    tokens: int = 0
    first: list[int] = field(default_factory=lambda: [0] * (len(FIRST_TOKEN_S) + 1))
    gaps: list[int] = field(default_factory=lambda: [0] * (len(TOKEN_S) + 1))

    def add(self, later: ModelLoad, earlier: ModelLoad | None) -> None:
        """Adds what a gateway has counted between two reports; None: since its start."""
        before = earlier or ModelLoad(model=later.model)
        self.tokens += max(0, later.tokens - before.tokens)
        _add(self.first, later.first, before.first)
        _add(self.gaps, later.gaps, before.gaps)


def _add(sums: list[int], later: list[int], earlier: list[int]) -> None:
    for place in range(min(len(sums), len(later))):
        sums[place] += max(0, later[place] - (earlier[place] if earlier else 0))


class LoadHistory:
    """Samples of one controller, on its event loop. A restarted controller begins anew."""

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock = clock
        self._wall = wall
        self._heard: dict[str, tuple[float, DemandReport]] = {}  # by gateway
        self._counted: dict[str, _Counted] = {}  # by model, since the last sample
        self._recent: deque[Mapping[str, _Counted]] = deque(maxlen=RECENT)
        self._samples: deque[tuple[float, Mapping[str, Mapping[str, float | None]]]] = deque(maxlen=SAMPLES)
        self._sampled_at = clock()

    def receive(self, report: DemandReport) -> None:
        """Receives a gateway's report."""
        last = self._heard.get(report.gateway)
        earlier = {} if last is None else {load.model: load for load in last[1].loads}
        if last is not None or report.number <= NEW_REPORTS:
            for load in report.loads:
                self._counted.setdefault(load.model, _Counted()).add(load, earlier.get(load.model))
        self._heard[report.gateway] = self._clock(), report

    def round(self) -> None:
        """Takes a sample if it is due."""
        now = self._clock()
        seconds = now - self._sampled_at
        if seconds < SAMPLE_S:
            return
        self._sampled_at = now
        self._heard = {name: heard for name, heard in self._heard.items() if now - heard[0] <= GATEWAY_LOST_S}
        self._recent.append(self._counted)
        counted, self._counted = self._counted, {}
        windows: dict[str, list[DemandWindow]] = {}
        for _, report in self._heard.values():
            for window in report.models:
                windows.setdefault(window.model, []).append(window)
        sample = {model: self._figures(model, each, counted, seconds) for model, each in windows.items()}
        self._samples.append((self._wall(), sample))

    def _figures(
        self, model: str, windows: list[DemandWindow], counted: Mapping[str, _Counted], seconds: float
    ) -> dict[str, float | None]:
        recent = [each[model] for each in self._recent if model in each]
        first = [sum(counts) for counts in zip(*(each.first for each in recent), strict=True)]
        gaps = [sum(counts) for counts in zip(*(each.gaps for each in recent), strict=True)]
        tokens = counted[model].tokens if model in counted else 0
        values = (
            sum(window.waiting for window in windows),
            sum(window.live for window in windows),
            round(tokens / seconds, 2),
            *(_ms(percentile(first, FIRST_TOKEN_S, percent)) for percent in (50, 99)),
            *(_ms(percentile(gaps, TOKEN_S, percent)) for percent in (50, 99)),
        )
        return dict(zip(FIGURES, values, strict=True))

    def now(self) -> Mapping[str, Mapping[str, float | None]]:
        """Returns the figures of each model in the last sample; of latencies those of the last minute."""
        return self._samples[-1][1] if self._samples else {}

    def as_columns(self) -> dict[str, Any]:
        """Returns {at, models: {name: {figure: [...]}}}: the figures of the last hour, with None where there are none.
        ``at`` is in seconds since the epoch."""
        names = dict.fromkeys(name for _, sample in self._samples for name in sample)
        return {
            "at": [round(at, 1) for at, _ in self._samples],
            "models": {
                name: {
                    figure: [sample[name][figure] if name in sample else None for _, sample in self._samples]
                    for figure in FIGURES
                }
                for name in names
            },
        }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)
