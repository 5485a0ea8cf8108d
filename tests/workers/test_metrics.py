"""What a replica counts reaches the sinks once, cheaply, and under the names that the Grafana dashboard asks for."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from workers.batching.batcher_stats import BatcherStats
from workers.serving.replica_metrics import METRICS, REFRESH_S, Kind, Metric, Sink, StepMetrics

DASHBOARD = Path(__file__).parents[2] / "deploy" / "observability" / "ray-dashboard-grafana.json"
IDLE = BatcherStats(
    slots=4,
    live=0,
    waiting=0,
    prefilling=0,
    steps=0,
    tokens=0,
    step_started_at=None,
    last_step_at=None,
    draining=False,
    failed=None,
)


class Told:
    """Sinks that remember what they were told, and a clock that stands still."""

    def __init__(self) -> None:
        self.values: list[tuple[str, float]] = []
        self.now = 0.0
        self.metrics = StepMetrics(self.open, clock=lambda: self.now)

    def open(self, metric: Metric) -> Sink:
        return lambda value: self.values.append((metric.name.removeprefix("corewright_"), value))

    def record(self, stats: BatcherStats) -> list[tuple[str, float]]:
        self.values.clear()
        self.metrics.record(stats)
        return list(self.values)


def test_an_idle_replica_tells_its_gauges() -> None:
    """Before the first request its slots are known already."""
    assert Told().record(IDLE) == [("slots", 4), ("requests_running", 0), ("requests_waiting", 0)]


def test_a_step_tells_only_what_it_changed() -> None:
    """A counter is told its growth, a gauge its new value; an ordinary decode costs two calls."""
    told = Told()
    told.record(replace(IDLE, live=2, steps=1, tokens=2))
    assert told.record(replace(IDLE, live=2, steps=2, tokens=4)) == [
        ("engine_steps_total", 1),
        ("generation_tokens_total", 2),
    ]


def test_drafts_are_counted() -> None:
    """What was guessed, and what of it was kept."""
    told = Told()
    told.record(IDLE)
    assert told.record(replace(IDLE, drafted=4, accepted=3)) == [
        ("spec_decode_num_draft_tokens_total", 4),
        ("spec_decode_num_accepted_tokens_total", 3),
    ]


def test_what_prefixes_save_is_counted() -> None:
    """The tokens of prompts, and those of them that were not read."""
    told = Told()
    told.record(IDLE)
    assert told.record(replace(IDLE, prefix_queries=40, prefix_hits=32)) == [
        ("prefix_cache_queries_total", 40),
        ("prefix_cache_hits_total", 32),
    ]


def test_gauges_are_told_again_since_ray_forgets_them() -> None:
    """Nothing has changed, and yet after a while the gauges come anew; counters do not."""
    told = Told()
    told.record(replace(IDLE, steps=1))
    told.now = REFRESH_S
    assert told.record(replace(IDLE, steps=1)) == [("slots", 4), ("requests_running", 0), ("requests_waiting", 0)]


def test_older_stats_do_not_count_back() -> None:
    """Two threads record: the one with the older reading may come last."""
    told = Told()
    told.record(replace(IDLE, steps=5))
    assert told.record(replace(IDLE, steps=4)) == []


def test_a_fault_of_the_sinks_does_not_reach_the_engine() -> None:
    """It is tried once and no more; requests matter more than their numbers."""
    calls = []

    def open_sink(metric: Metric) -> Sink:
        def fail(value: float) -> None:
            calls.append(value)
            raise OSError("no room")

        return fail

    metrics = StepMetrics(open_sink)
    metrics.record(IDLE)
    metrics.record(IDLE)
    assert calls == [4]


def test_the_names_follow_prometheus() -> None:
    """A counter's name ends in _total, and only a counter's: Ray would add it."""
    assert {m.name for m in METRICS if m.name.endswith("_total")} == {m.name for m in METRICS if m.kind is Kind.COUNTER}


def test_the_grafana_dashboard_asks_for_what_there_is() -> None:
    """Every metric in a panel or a variable is one of ours, as Ray exports it, and every one of ours is shown."""
    dashboard = json.loads(DASHBOARD.read_text())
    shown = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"[a-z_]+(?=\{)", target["expr"])
    }
    asked = set(re.findall(r"ray_corewright_\w+", json.dumps(dashboard["templating"])))
    exported = {f"ray_{metric.name}" for metric in METRICS}
    assert (shown, asked - exported) == (exported, set())


def test_the_grafana_panels_do_not_overlap() -> None:
    """Ids and places are each taken once."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len({panel["id"] for panel in panels}) == len(places) == len(panels)
