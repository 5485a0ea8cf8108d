"""The input of the autoscaler and the reports of its decisions, with a fake autoscaler."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from orchestrator.api.schemas import OperationRefused
from orchestrator.gateway.telemetry.exposition import page
from orchestrator.scaling.autoscaler import FleetNow, History, Targets
from orchestrator.scaling.demand_report import DemandReport, DemandWindow
from placements.planner.host_pool import HostPool
from tests.orchestrator.fakes import Played, play, settled_fleet
from tests.orchestrator.promql import Page

SPEC = """\
version: 1
hosts:
  - {emulate: inf2.24xlarge, price_per_core_hour: 0.5, reserve: {cores: [11]}}
  - {emulate: inf2.48xlarge, count: 2}
defaults: {engine: echo}
models:
  a:
    tp_degree: 4
    max_batch: 8
    replicas: {min: 1, max: 3}
    priority: 7
    objectives: {ttft_ms: 800, queue_ms: 250}
    scaling: {worth_per_1000: 2.5}
  b: {replicas: {min: 0, max: 2}, scaling: {idle_s: 30}}
  fixed: {tp_degree: 2, scaling: {auto: false}}
"""


class Decider:
    """A fake `autoscale`: returns the given targets, and records its calls."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.reasons: dict[str, str] = {}
        self.calls: list[tuple[History, FleetNow, float]] = []

    def __call__(self, history: History, fleet: FleetNow, now: float) -> Targets:
        self.calls.append((history, fleet, now))
        return Targets({**{model.name: model.target for model in fleet.models}, **self.counts}, self.reasons)

    @property
    def last(self) -> FleetNow:
        return self.calls[-1][1]


@pytest.fixture
def decider(monkeypatch: pytest.MonkeyPatch) -> Decider:
    decider = Decider()
    monkeypatch.setattr("orchestrator.control.scaling_loop.autoscale", decider)
    return decider


async def report(fleet: Played, first: int, last: int, *models: DemandWindow, gateway: str = "g") -> None:
    """The reports of those numbers, one a second."""
    for number in range(first, last + 1):
        await asyncio.sleep(1.0)
        demand = DemandReport(gateway=gateway, number=number, seconds=1.0, models=list(models))
        await fleet.controller.demand(demand)


CORDONED, OTHER = "inf2.48xlarge/0", "inf2.48xlarge/1"


def usable(pool: HostPool) -> list[tuple[str, int, float]]:
    """The name, the number of usable cores and the price of each host."""
    rows = zip(pool.hosts, pool.allowed, pool.prices, strict=True)
    return [(host.name, cores.bit_count(), price) for host, cores, price in rows]


def messages(fleet: Played, reason: str) -> list[str]:
    return [event.message for event in fleet.journal.events() if event.reason == reason]


@settled_fleet(SPEC, load_s=2.0)
async def test_the_autoscaler_gets_hosts_prices_and_usable_cores(fleet: Played, decider: Decider) -> None:
    """Reserved, cordoned and foreign cores are excluded; a lost host is absent."""
    await fleet.operator.cordon("inf2.48xlarge/0", "0-7", True, "tester")
    await report(fleet, 1, 7)
    assert usable(decider.last.pool) == [("inf2.24xlarge/0", 11, 0.5), (CORDONED, 16, 0.0), (OTHER, 24, 0.0)]
    await fleet.cluster.lose("inf2.24xlarge/0")
    await report(fleet, 8, 20)
    assert usable(decider.last.pool) == [(CORDONED, 16, 0.0), (OTHER, 24, 0.0)]


@settled_fleet(SPEC, load_s=2.0)
async def test_the_autoscaler_gets_the_wishes_and_the_state_of_each_model(fleet: Played, decider: Decider) -> None:
    """The spec's settings, the measurements, and the placements of the replicas."""
    await report(fleet, 1, 7)
    a, b, fixed = decider.last.models
    assert (a.name, a.cores, a.slots, a.min, a.max, a.priority) == ("a", 4, 8, 1, 3, 7)
    assert (a.objectives.ttft_ms, a.objectives.tpot_ms, a.objectives.queue_ms) == (800, None, 250)
    assert (a.worth_per_1000, a.load_s, a.target, a.ready, a.starting, a.reachable) == (2.5, 2.0, 1, 1, 0, 1)
    assert (a.override, a.first_ready_at, a.since) == (None, 2.0, 2.0)
    assert a.places == ((0, 0),)
    assert (b.idle_s, b.ready, b.since, b.first_ready_at, b.load_s) == (30.0, 0, None, None, 6.0)
    assert fixed.override == 1
    await fleet.operator.scale("a", 2, "tester")
    await report(fleet, 8, 9)
    await report(fleet, 10, 16)
    assert (decider.last.models[0].override, decider.last.models[0].ready) == (2, 2)


@settled_fleet(SPEC, load_s=2.0)
async def test_reports_of_all_gateways_between_two_decisions_are_one_load(fleet: Played, decider: Decider) -> None:
    """Counts are summed, gauges are the latest of each gateway."""
    demand = DemandWindow(model="a", arrived=3, ended=2, slot_s=8.0, waiting=4, live=5, longest_wait_s=1.5)
    await report(fleet, 1, 1, gateway="other")
    for number in range(1, 5):
        for gateway in ("g", "h"):
            sent = DemandReport(gateway=gateway, number=number, seconds=1.0, models=[demand])
            await fleet.controller.demand(sent)
    await asyncio.sleep(5.0)
    load = decider.calls[0][0].course("a").last
    assert (load.arrived, load.ended, load.slot_s) == (24, 16, 64.0)
    assert (load.waiting, load.live, load.longest_wait_s) == (8, 10, 1.5)
    assert load.seconds == pytest.approx(5.0, abs=1.1)


@settled_fleet(SPEC, load_s=2.0)
async def test_each_change_is_an_event_with_its_reason(fleet: Played, decider: Decider) -> None:
    """In the status, and counted for /metrics."""
    decider.counts, decider.reasons = {"a": 3, "b": 1}, {"a": "1 to 3: high demand", "b": "a request waits"}
    await report(fleet, 1, 7, DemandWindow(model="b", waiting=1, live=2))
    decider.reasons = {}
    await report(fleet, 8, 20)
    decider.counts, decider.reasons = {"a": 2, "b": 0}, {"a": "3 to 2: low demand"}
    await report(fleet, 21, 27)
    shown = fleet.model("a")["scaling"]
    assert (shown["target"], shown["why"], shown["min"], shown["max"]) == (2, "3 to 2: low demand", 1, 3)
    assert shown["demand"] == {"arrivals_per_s": 0.0, "waiting": 0, "live": 0}
    metrics = Page.read(page(await fleet.controller.metrics())[0].decode())
    assert metrics.value("corewright_target_replicas", model="a") == 2
    assert metrics.value("corewright_scaling_decisions_total", model="a", kind="ScaledUp") == 1
    assert metrics.value("corewright_replicas_max", model="a") == 3
    assert metrics.value("corewright_demand_requests", model="a", state="waiting") == 0
    assert messages(fleet, "ScaledUp") == ["1 to 3: high demand"]
    assert messages(fleet, "Woken") == ["0 to 1: a request waits"]
    assert messages(fleet, "ScaledDown") == ["3 to 2: low demand"]
    assert messages(fleet, "ScaledToZero") == ["1 to 0"]


def test_a_held_back_model_is_reported_at_the_start_then_rarely(tmp_path: Path, decider: Decider) -> None:
    """Twenty-five minutes of it are three events, not three hundred."""

    async def story(fleet: Played) -> None:
        await fleet.settled()
        decider.reasons = {"a": "held back: no cores"}
        await report(fleet, 1, 1500)
        decider.reasons = {}
        await report(fleet, 1501, 1600)
        decider.reasons = {"a": "held back: again"}
        await report(fleet, 1601, 1610)
        assert messages(fleet, "HeldBack") == ["held back: no cores"] * 3 + ["held back: again"]

    play(tmp_path, SPEC, story, load_s=2.0)


@settled_fleet(SPEC, load_s=2.0)
async def test_the_status_and_clients_see_what_holds_a_model_back(fleet: Played, decider: Decider) -> None:
    """As at the start, since the figures change with each decision; clients get no figures."""

    def reasons() -> tuple[str | None, str | None]:
        routes = fleet.controller.routes().models
        return fleet.model("b")["reason"], next(route.reason for route in routes if route.name == "b")

    decider.reasons = {"b": "held back: no cores; 0.1 requests a second"}
    await report(fleet, 1, 10)
    decider.reasons = {"b": "held back: no cores; 0.2 requests a second"}
    await report(fleet, 11, 20)
    assert reasons() == ("held back: no cores; 0.1 requests a second", "held back: no cores")
    decider.reasons = {}
    await report(fleet, 21, 30)
    assert reasons() == (None, None)


@settled_fleet(SPEC, load_s=2.0)
async def test_a_decision_outside_the_autoscalers_scope_is_ignored(fleet: Played, decider: Decider) -> None:
    """For a manually scaled model, one without auto, and numbers out of bounds."""
    await fleet.operator.scale("b", 1, "tester")
    decider.counts = {"a": 9, "b": 0, "fixed": 0}
    await report(fleet, 1, 7)
    state = fleet.controller.state
    assert [state.counts.desired(model) for model in state.current.spec.models] == [3, 1, 1]


@settled_fleet(SPEC, load_s=2.0)
async def test_reports_of_a_restarted_gateway_are_accepted(fleet: Played, decider: Decider) -> None:
    """Its numbers start at one again."""
    await report(fleet, 1, 7, DemandWindow(model="a", arrived=1))
    await report(fleet, 1, 1, DemandWindow(model="a", arrived=100))
    await report(fleet, 2, 6)
    assert sum(history.course("a").last.arrived for history, _, _ in decider.calls) == 107


@settled_fleet(SPEC, load_s=2.0)
async def test_a_removed_model_is_forgotten(fleet: Played, decider: Decider) -> None:
    """Its target and its history; a report that still has it is not an error."""
    decider.counts = {"a": 3}
    await report(fleet, 1, 7, DemandWindow(model="a", arrived=1))
    await fleet.apply(SPEC.replace("  a:\n", "  other:\n"))
    decider.counts = {}
    await report(fleet, 8, 14, DemandWindow(model="a", arrived=1))
    assert fleet.journal.state().targets == {}
    assert decider.calls[-1][0].course("a").asked_at is None
    assert fleet.model("other")["wanted"] == 1


def test_a_trace_is_read_in_pages_with_the_measured_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown cursor is rejected."""
    folder = tmp_path / "traces"
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path))

    async def story(fleet: Played) -> None:
        await fleet.settled()
        empty = await fleet.operator.trace("", 10)
        speeds = empty.pop("speeds")
        assert empty == {"requests": [], "next": "", "more": False}
        assert {name: speed["load_s"] for name, speed in speeds.items() if speed["load_s"]} == {"a": 2.0, "fixed": 2.0}
        assert speeds["a"]["shape"]["machine"].startswith("emulated")
        with pytest.raises(OperationRefused) as refused:
            await fleet.operator.trace("no place", 10)
        assert (refused.value.status, refused.value.problem.id) == (400, "trace-cursor-wrong")

        assert not folder.exists()

    play(tmp_path, SPEC, story, load_s=2.0)


@settled_fleet(SPEC, load_s=2.0)
async def test_a_lower_min_stops_no_replica_by_itself(fleet: Played, decider: Decider) -> None:
    """Running replicas continue until the autoscaler removes them; a change of the process is an update as usual."""
    more = SPEC.replace("replicas: {min: 1, max: 3}", "replicas: {min: 2, max: 3}")
    none = SPEC.replace("replicas: {min: 1, max: 3}", "replicas: {min: 0, max: 3}").replace(
        "max_batch: 8", "max_batch: 4"
    )
    await fleet.apply(more)
    await fleet.settled()
    await report(fleet, 1, 7)
    await fleet.apply(none)
    state, least = fleet.controller.state, 2
    for number in range(8, 40):
        await report(fleet, number, number)
        least = min(least, state.ready("a"))
    assert least == 2
    decider.counts = {"a": 1}
    await report(fleet, 40, 46)
    assert state.counts.desired(state.current.spec.models[0]) == 1
    assert messages(fleet, "ScaledDown") == ["2 to 1"]


@settled_fleet(SPEC, load_s=2.0)
async def test_the_longest_wait_of_all_gateways_counts(fleet: Played, decider: Decider) -> None:
    """Not that of the gateway with the latest request."""
    for number in range(1, 8):
        await asyncio.sleep(1.0)
        for gateway, waited in (("g", 90.0), ("h", 1.0)):
            waits = DemandWindow(model="a", waiting=1, longest_wait_s=waited)
            sent = DemandReport(gateway=gateway, number=number, seconds=1.0, models=[waits])
            await fleet.controller.demand(sent)
    assert decider.calls[-1][0].course("a").last.longest_wait_s == 90.0


@settled_fleet(SPEC, load_s=2.0)
async def test_the_idle_time_of_a_model_restarts_after_zero_replicas(fleet: Played, decider: Decider) -> None:
    """When its next replica is ready, not when one was first ready an hour ago."""
    decider.counts = {"b": 1}
    await report(fleet, 1, 20)
    first = decider.last.models[1].first_ready_at
    decider.counts = {"b": 0}
    await report(fleet, 21, 40)
    assert decider.last.models[1].first_ready_at is None
    decider.counts = {"b": 1}
    await report(fleet, 41, 60)
    again = decider.last.models[1].first_ready_at
    assert first is not None
    assert again is not None
    assert again > first + 20


@settled_fleet(SPEC, load_s=2.0)
async def test_a_model_that_cannot_be_started_triggers_only_one_immediate_decision(
    fleet: Played, decider: Decider
) -> None:
    """Its waiting requests do not trigger a decision each second."""
    decider.counts = {"b": 0}
    await report(fleet, 1, 60, DemandWindow(model="b", waiting=1))
    assert 12 <= len(decider.calls) <= 26
