"""The last hour of each model's load: rates and percentiles from what gateways count."""

from __future__ import annotations

from bisect import bisect_left

import pytest

from orchestrator.control.gateway_reports import SAMPLE_S, SAMPLES, LoadHistory
from orchestrator.scaling.demand_report import FIRST_TOKEN_S, TOKEN_S, DemandReport, DemandWindow, ModelLoad, percentile


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def counts(bounds: tuple[float, ...], *observed: float) -> list[int]:
    buckets = [0] * (len(bounds) + 1)
    for value in observed:
        buckets[bisect_left(bounds, value)] += 1
    return buckets


def report(
    number: int, tokens: int, *first: float, gateway: str = "g", live: int = 0, waiting: int = 0
) -> DemandReport:
    load = ModelLoad(model="chat", tokens=tokens, first=counts(FIRST_TOKEN_S, *first), gaps=counts(TOKEN_S, *first))
    window = DemandWindow(model="chat", live=live, waiting=waiting)
    return DemandReport(gateway=gateway, number=number, seconds=1.0, models=[window], loads=[load])


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def history(clock: Clock) -> LoadHistory:
    return LoadHistory(clock, clock)


def after(clock: Clock, history: LoadHistory, *reports: DemandReport) -> dict[str, float | None]:
    """The sample that is taken ``SAMPLE_S`` later, of reports that come just before."""
    clock.now += SAMPLE_S
    for each in reports:
        history.receive(each)
    history.round()
    return dict(history.now()["chat"])


def test_a_percentile_is_linear_within_its_bucket() -> None:
    assert percentile([0, 10, 0], (1.0, 2.0), 50) == 1.5
    assert percentile([10, 0, 10], (1.0, 2.0), 99) == 2.0  # above all bounds: the last one
    assert percentile([0, 0, 0], (1.0, 2.0), 50) is None


def test_rates_are_the_differences_of_two_samples(clock: Clock, history: LoadHistory) -> None:
    """Of all gateways together, and also after a report was lost."""
    first = after(clock, history, report(1, 100, 0.05, live=2), report(1, 50, 0.05, gateway="h", waiting=1))
    assert (first["tokens_per_s"], first["running"], first["queue"]) == (15.0, 2, 1)
    second = after(clock, history, report(9, 160, 0.05), report(9, 50, 0.05, gateway="h"))
    assert second["tokens_per_s"] == 6.0


def test_a_restarted_gateway_counts_from_zero(clock: Clock, history: LoadHistory) -> None:
    """Another gateway with the same name never gives a negative rate, and a known one after a restart of the controller
    gives no peak."""
    assert after(clock, history, report(500, 1_000_000, 0.05))["tokens_per_s"] == 0.0
    assert after(clock, history, report(1, 20, 0.05))["tokens_per_s"] == 0.0
    assert after(clock, history, report(2, 40, 0.05), report(1, 30, 0.05, gateway="new"))["tokens_per_s"] == 5.0


def test_percentiles_are_those_of_the_last_minute(clock: Clock, history: LoadHistory) -> None:
    assert after(clock, history, report(1, 1, 0.09))["ttft_p50_ms"] == pytest.approx(90.0)
    for number in range(2, 7):
        assert after(clock, history, report(number, 1, 0.09))["ttft_p50_ms"] is not None
    assert after(clock, history, report(7, 1, 0.09))["ttft_p50_ms"] is None


def test_an_hour_is_kept(clock: Clock, history: LoadHistory) -> None:
    for number in range(1, SAMPLES + 11):
        after(clock, history, report(number, 10 * number))
    columns = history.as_columns()
    assert len(columns["at"]) == SAMPLES
    assert columns["at"][-1] == clock.now
    assert {len(values) for values in columns["models"]["chat"].values()} == {SAMPLES}
    assert columns["models"]["chat"]["tokens_per_s"][-1] == 1.0


def test_a_silent_gateway_has_no_requests_any_more(clock: Clock, history: LoadHistory) -> None:
    after(clock, history, report(1, 10, live=3))
    clock.now += 2 * SAMPLE_S
    history.round()
    assert "chat" not in history.now()
