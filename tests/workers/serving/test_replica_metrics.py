"""The metrics of a replica: sent once, cheaply, and under the names of the Grafana dashboard."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from workers.batching.step_loop import BatcherStats
from workers.serving.replica_metrics import METRICS, REFRESH_S, Metric, Sink, StepMetrics

DASHBOARD = Path(__file__).parents[3] / "orchestrator" / "cluster" / "replica_board.json"
IDLE = BatcherStats(
    slots=4,
    live=0,
    waiting=0,
    prefilling=0,
    steps=0,
    tokens=0,
    step_started_at=None,
    draining=False,
    failed=None,
)


class Recorder:
    """Records the values that the sinks get; its clock is set by hand."""

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


def test_an_idle_replica_sends_its_gauges() -> None:
    """Also before the first request."""
    assert Recorder().record(IDLE) == [("slots", 4), ("requests_running", 0), ("requests_waiting", 0)]


def test_a_step_sends_only_changed_values() -> None:
    """A counter gets its increase. An ordinary decode costs two calls."""
    recorder = Recorder()
    recorder.record(replace(IDLE, live=2, steps=1, tokens=2))
    assert recorder.record(replace(IDLE, live=2, steps=2, tokens=4)) == [
        ("engine_steps_total", 1),
        ("generation_tokens_total", 2),
    ]


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        (
            {"drafted": 4, "accepted": 3},
            [("spec_decode_num_draft_tokens_total", 4), ("spec_decode_num_accepted_tokens_total", 3)],
        ),
        (
            {"prefix_queries": 40, "prefix_hits": 32},
            [("prefix_cache_queries_total", 40), ("prefix_cache_hits_total", 32)],
        ),
    ],
)
def test_drafts_and_prefix_hits_are_counted(changes: dict[str, int], values: list[tuple[str, float]]) -> None:
    recorder = Recorder()
    recorder.record(IDLE)
    assert recorder.record(replace(IDLE, **changes)) == values  # type: ignore[arg-type]


def test_unchanged_gauges_are_sent_again_since_ray_forgets_them() -> None:
    """Counters are not."""
    recorder = Recorder()
    recorder.record(replace(IDLE, steps=1))
    recorder.now = REFRESH_S
    assert recorder.record(replace(IDLE, steps=1)) == [("slots", 4), ("requests_running", 0), ("requests_waiting", 0)]


def test_older_stats_do_not_count_back() -> None:
    """Of two threads that record, the one with the older stats may be last."""
    recorder = Recorder()
    recorder.record(replace(IDLE, steps=5))
    assert recorder.record(replace(IDLE, steps=4)) == []


def test_an_error_of_a_sink_ends_the_recording_only() -> None:
    """The engine goes on, and the sink is not called again."""
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


def test_the_grafana_dashboard_shows_every_metric_and_no_other() -> None:
    """Also its variables use metrics of ours only, by the names that Ray exports."""
    dashboard = json.loads(DASHBOARD.read_text())
    shown = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"[a-z_]+(?=\{)", target["expr"])
    }
    queried = set(re.findall(r"ray_corewright_\w+", json.dumps(dashboard["templating"])))
    exported = {f"ray_{metric.name}" for metric in METRICS}
    assert (shown, queried - exported) == (exported, set())


def test_the_grafana_panels_do_not_overlap() -> None:
    """Ids and places are unique."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len({panel["id"] for panel in panels}) == len(places) == len(panels)
