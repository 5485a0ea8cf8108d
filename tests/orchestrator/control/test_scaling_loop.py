"""The numbers of replicas follow the demand that gateways tell: the controller's loop on a virtual clock."""

from __future__ import annotations

import asyncio
import itertools
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.control.journal.journal import Journal
from orchestrator.scaling.demand_report import AUTOSCALE_S, DemandReport, DemandWindow, RoutingDecision
from tests.orchestrator.fakes import FakeCluster, Played, play, starting_fleet, virtual
from tests.searches import search
from workers.messages.status import Failure, Phase

HEAD = "version: 1\nhosts: {emulate: inf2.48xlarge}\ndefaults: {engine: echo}\nmodels:\n"
SLEEPER = HEAD + "  m: {tp_degree: 8, replicas: {min: 0, max: 3}, max_batch: 4, scaling: {idle_s: 120}}\n"
PAIR = HEAD + (
    "  low: {tp_degree: 8, replicas: {min: 1, max: 3}, max_batch: 4}\n"
    "  high: {tp_degree: 8, replicas: {min: 0, max: 3}, max_batch: 4, priority: 5, scaling: {idle_s: 120}}\n"
)
GROWING = {"scaled", "ScaledUp", "ScaledDown", "ScaledToZero", "Woken", "HeldBack"}


class Demanding:
    """A gateway that reports once a second what the requests of some models amount to.

    Its requests hold a slot for ``service_s``; those for which no ready replica has one wait.
    """

    def __init__(self, fleet: Played, rates: Mapping[str, float], service_s: float = 5.0, name: str = "g") -> None:
        self.fleet = fleet
        self.rates = dict(rates)
        self.service_s = service_s
        self.name = name
        self.waiting = dict.fromkeys(rates, 0.0)
        self.live = dict.fromkeys(rates, 0.0)
        self._owed = dict.fromkeys(rates, 0.0)
        self._numbers = itertools.count(1)

    async def run(self, seconds: float, step_s: float = 1.0) -> None:
        """So long, on the virtual clock."""
        for _ in range(int(seconds / step_s)):
            await asyncio.sleep(step_s)
            await self.fleet.controller.demand(self.report(step_s))

    def report(self, seconds: float) -> DemandReport:
        models = [self._demand(name, rate, seconds) for name, rate in self.rates.items()]
        return DemandReport(gateway=self.name, number=next(self._numbers), seconds=seconds, models=models)

    def _demand(self, name: str, rate: float, seconds: float) -> DemandWindow:
        self._owed[name] += rate * seconds
        arrived = int(self._owed[name])
        self._owed[name] -= arrived
        ended = self.live[name] * min(1.0, seconds / self.service_s)
        slots = 4 * self.fleet.controller.state.ready(name)
        self.live[name] -= ended
        self.waiting[name] += arrived
        begun = min(self.waiting[name], max(0.0, slots - self.live[name]))
        self.waiting[name] -= begun
        self.live[name] += begun
        return DemandWindow(
            model=name,
            arrived=arrived,
            ended=round(ended),
            slot_s=round(ended) * self.service_s,
            waiting=round(self.waiting[name]),
            live=round(self.live[name]),
            longest_wait_s=1.0 if self.waiting[name] >= 1 else 0.0,
        )


class Encoding(Demanding):
    """The gateway of encoders: each replica serves ``per_s`` requests of four inputs a second, in batches that take 10
    ms. A replica has many more requests in its slots than it encodes at once."""

    def __init__(self, fleet: Played, rates: Mapping[str, float], per_s: float = 50.0) -> None:
        super().__init__(fleet, rates)
        self.per_s = per_s
        self.most_waited_s = 0.0

    def _demand(self, name: str, rate: float, seconds: float) -> DemandWindow:
        self._owed[name] += rate * seconds
        arrived = int(self._owed[name])
        self._owed[name] -= arrived
        capacity = self.per_s * self.fleet.controller.state.ready(name)
        self.live[name] += arrived
        ended = int(min(self.live[name], capacity * seconds))
        self.live[name] -= ended
        waited_s = self.live[name] / capacity if capacity else seconds
        self.most_waited_s = max(self.most_waited_s, waited_s)
        return DemandWindow(
            model=name,
            arrived=arrived,
            ended=ended,
            slot_s=ended * (0.01 + waited_s),
            first_tokens=ended,
            prefill_s=ended * 0.01,
            encoded=ended,
            inputs=4 * ended,
            work_s=ended / self.per_s,
            live=round(self.live[name]),
        )


def counts(fleet: Played) -> dict[str, int]:
    state = fleet.controller.state
    return {model.name: state.counts.desired(model) for model in state.current.spec.models}


def changes(fleet: Played) -> list[str]:
    """The reasons of the events about numbers of replicas."""
    return [reason for reason in fleet.happened() if reason in GROWING - {"HeldBack"}]


@starting_fleet(SLEEPER, load_s=5.0)
async def test_a_burst_onto_a_model_at_zero_starts_it_and_more_of_it(fleet: Played) -> None:
    """The first at once, not at the next decision."""
    gateway = Demanding(fleet, {"m": 0.0})
    await gateway.run(3)
    assert counts(fleet) == {"m": 0}
    gateway.rates["m"] = 3.0
    await gateway.run(2)
    assert counts(fleet)["m"] >= 1
    await gateway.run(120)
    assert counts(fleet)["m"] >= 2
    assert len(fleet.ready("m")) == counts(fleet)["m"]
    assert changes(fleet)[0] == "Woken"


ENCODER = """\
version: 1
hosts: {{emulate: inf2.48xlarge, price_per_core_hour: 1}}
models:
  m: {{engine: echo, kind: embedding, replicas: {{min: 1, max: 9}}, max_batch: 32, objectives: {objectives}}}
"""


@starting_fleet(ENCODER.format(objectives="{queue_ms: 1000}"), load_s=5.0)
async def test_an_encoder_follows_its_demand_by_what_its_replicas_encode(fleet: Played) -> None:
    """Its slots are as good as free until the engine is busy all the time, and requests would wait by then."""
    await fleet.settled()
    gateway = Encoding(fleet, {"m": 10.0})
    for rate in range(10, 121, 5):
        gateway.rates["m"] = rate
        await gateway.run(30)
    assert 3 <= counts(fleet)["m"] <= 4
    assert gateway.most_waited_s < 1.0
    assert fleet.model("m")["scaling"]["demand"]["items_per_s_of_replica"] == 200.0
    gateway.rates["m"] = 10.0
    await gateway.run(1800)
    assert counts(fleet)["m"] == 1
    grown = next(event.message for event in fleet.journal.events() if event.reason == "ScaledUp")
    assert re.search(r"requests per second, of which a replica serves (49|50)\.", grown)


@starting_fleet(ENCODER.format(objectives="{items_per_second: 750}"), load_s=5.0)
async def test_an_encoder_keeps_the_replicas_that_its_items_per_s_need(fleet: Played) -> None:
    """Once requests have shown what one replica encodes, whatever the demand."""
    gateway = Encoding(fleet, {"m": 1.0})
    await gateway.run(1200)
    assert counts(fleet)["m"] == 4
    grown = next(event.message for event in fleet.journal.events() if event.reason == "ScaledUp")
    assert grown == "1 to 4: items_per_second 750 needs 4; a replica encodes 200.0 per second"


@starting_fleet(SLEEPER, load_s=5.0)
async def test_a_request_for_a_model_without_replicas_is_decided_at_once(fleet: Played) -> None:
    """It does not wait for the next report."""
    gateway = Demanding(fleet, {"m": 0.0})
    await gateway.run(1)
    await fleet.controller.wake("m")
    await asyncio.sleep(0.1)
    assert counts(fleet) == {"m": 1}
    assert [event.message.startswith("0 to 1: ") for event in fleet.journal.events() if event.reason == "Woken"] == [
        True
    ]


@starting_fleet(SLEEPER, load_s=5.0)
async def test_without_demand_reports_a_request_starts_one_replica_and_nothing_stops_it(fleet: Played) -> None:
    """As in a fleet without an autoscaler."""
    await fleet.controller.wake("m")
    await asyncio.sleep(3600)
    assert counts(fleet) == {"m": 1}
    assert changes(fleet) == ["Woken"]


@starting_fleet(SLEEPER, load_s=5.0)
async def test_after_idle_s_a_model_of_min_0_goes_to_zero(fleet: Played) -> None:
    """Not before: the time starts when its first replica is ready, and at its last request."""
    gateway = Demanding(fleet, {"m": 0.0})
    await gateway.run(1)
    await fleet.controller.wake("m")
    await gateway.run(60)
    gateway.rates["m"] = 1.0
    await gateway.run(10)
    gateway.rates["m"] = 0.0
    await gateway.run(110)
    assert counts(fleet)["m"] >= 1
    await gateway.run(60)
    assert counts(fleet) == {"m": 0}
    model = fleet.model("m")
    assert model["state"] == "unloaded"
    assert model["reason"] == (
        f"parked on {model['parked']['host']}: a start takes about {model['parked']['start_s']} s"
    )
    assert changes(fleet)[-1] == "ScaledToZero"


@starting_fleet(SLEEPER, load_s=290.0)
async def test_a_slow_load_is_not_idle_time(fleet: Played) -> None:
    """It takes longer than idle_s until the first replica is ready."""
    gateway = Demanding(fleet, {"m": 0.0})
    await gateway.run(1)
    await fleet.controller.wake("m")
    await gateway.run(300)
    assert len(fleet.ready("m")) == 1


@starting_fleet(PAIR, load_s=5.0)
async def test_a_model_of_higher_priority_takes_needed_cores_from_a_lower_one(fleet: Played) -> None:
    """The lower one uses all cores, and gets some again when the other needs them no longer."""
    gateway = Demanding(fleet, {"low": 6.0, "high": 0.0})
    await gateway.run(300)
    assert counts(fleet) == {"low": 3, "high": 0}
    gateway.rates["high"] = 6.0
    await gateway.run(300)
    assert counts(fleet)["high"] >= 2
    assert len(fleet.ready("high")) == counts(fleet)["high"]
    assert len(fleet.ready("low")) == 3 - counts(fleet)["high"]
    gateway.rates["high"] = 0.0
    gateway.waiting["high"] = 0.0
    await gateway.run(600)
    assert counts(fleet)["high"] == 0
    assert len(fleet.ready("low")) == counts(fleet)["low"] >= 2
    assert "ScaledDown" in changes(fleet)


@pytest.mark.parametrize("end", ["requests", "manual", "gateway"])
@starting_fleet(
    HEAD
    + "  pinned: {tp_degree: 24, cores: [0-23]}\n"
    + "  m: {tp_degree: 8, replicas: {min: 0, max: 1}, max_batch: 4, scaling: {idle_s: 10}}\n",
    load_s=5.0,
)
async def test_a_shortage_is_the_reason_only_while_it_lasts(fleet: Played, end: str) -> None:
    """It ends when the requests are gone, when the model is scaled manually, and when no gateway reports any more."""

    def why() -> str | None:
        reason: str | None = fleet.model("m")["scaling"]["why"]
        return reason

    gateway = Demanding(fleet, {"m": 1.0})
    await gateway.run(60)
    assert "held back: no cores" in (why() or "")
    gateway.rates["m"] = gateway.waiting["m"] = 0.0
    if end == "manual":
        await fleet.operator.scale("m", 0, "tester")
    if end == "gateway":
        await asyncio.sleep(30)
    else:
        await gateway.run(30)
    assert why() is None


def scheduled(more: str, least: int) -> str:
    schedule = f'{{start: "10 * * * *", end: "30 * * * *", min: {least}}}'
    return f"{HEAD}  m: {{{more}replicas: {{min: 1, max: 3}}, scaling: {{schedules: [{schedule}]}}}}\n"


@starting_fleet(scheduled("tp_degree: 2, ", 2), load_s=5.0)
async def test_a_schedule_raises_min_and_its_end_stops_no_running_request(fleet: Played) -> None:
    """The virtual clock starts at midnight UTC: from ten past to half past, at least two."""
    await asyncio.sleep(590)
    assert counts(fleet) == {"m": 1}
    await asyncio.sleep(20)
    assert counts(fleet) == {"m": 2}
    assert fleet.model("m")["scaling"]["min"] == 2
    await asyncio.sleep(1170)
    assert counts(fleet) == {"m": 2}
    await asyncio.sleep(30)
    assert counts(fleet) == {"m": 1}
    assert changes(fleet) == ["ScaledUp", "ScaledDown"]
    messages = [event.message for event in fleet.journal.events() if event.reason == "ScaledUp"]
    assert messages == ["1 to 2: by schedule at least 2 and at most 3; it was 1 and 3"]


@starting_fleet(scheduled("", 0), load_s=5.0)
async def test_a_schedule_of_min_0_lets_a_request_start_the_model(fleet: Played) -> None:
    """Its routes show this to the gateway, as long as the schedule is active."""
    await asyncio.sleep(30)
    assert not fleet.controller.routes().models[0].loads_on_request
    await asyncio.sleep(600)
    assert counts(fleet) == {"m": 0}
    assert fleet.controller.routes().models[0].loads_on_request
    await fleet.controller.wake("m")
    await asyncio.sleep(30)
    assert counts(fleet) == {"m": 1}


@starting_fleet(SLEEPER, load_s=5.0)
async def test_manual_scaling_precedes_the_autoscaler(fleet: Played) -> None:
    """Once reverted, the autoscaler starts from the running replicas: none with work is stopped."""
    gateway = Demanding(fleet, {"m": 2.0})
    await gateway.run(120)
    assert counts(fleet)["m"] > 1
    await fleet.operator.scale("m", 1, "tester")
    await gateway.run(60)
    assert counts(fleet) == {"m": 1}
    await fleet.operator.scale("m", 3, "tester")
    await gateway.run(60)
    assert counts(fleet) == {"m": 3}
    await fleet.operator.scale("m", None, "tester")
    assert counts(fleet) == {"m": 3}
    await fleet.operator.unload("m", "tester")
    await gateway.run(60)
    assert counts(fleet) == {"m": 0}


@starting_fleet(HEAD + "  m: {tp_degree: 8, replicas: {min: 1, max: 3}, scaling: {auto: false}}\n", load_s=5.0)
async def test_without_auto_the_number_stays_at_min(fleet: Played) -> None:
    """For any demand."""
    await Demanding(fleet, {"m": 10.0}).run(300)
    assert counts(fleet) == {"m": 1}
    assert changes(fleet) == []


@starting_fleet(PAIR, tick_s=5.0, load_s=5.0)
async def test_an_hour_of_constant_demand_changes_nothing(fleet: Played) -> None:
    """Once the numbers are settled, they do not oscillate."""
    gateway = Demanding(fleet, {"low": 1.0, "high": 0.8})
    await gateway.run(900, 5.0)
    before, starts = counts(fleet), len(fleet.cluster.started)
    seen = set()
    for _ in range(60):
        await gateway.run(60, 5.0)
        seen.add(tuple(sorted(counts(fleet).items())))
    assert seen == {tuple(sorted(before.items()))}
    assert len(fleet.cluster.started) == starts


@starting_fleet(SLEEPER, load_s=5.0)
async def test_two_gateways_are_summed_and_a_silent_one_is_forgotten(fleet: Played) -> None:
    """Its waiting requests no longer count."""
    first, other = (
        DemandReport(gateway=name, number=1, seconds=1.0, models=[DemandWindow(model="m", waiting=2, live=1)])
        for name in "ab"
    )
    await fleet.controller.demand(first)
    await fleet.controller.demand(other)
    assert demand(fleet)["waiting"] == 4
    for number in range(2, 15):
        await asyncio.sleep(1.0)
        await fleet.controller.demand(
            DemandReport(gateway="a", number=number, seconds=1.0, models=[DemandWindow(model="m", waiting=2, live=1)])
        )
    assert (demand(fleet)["waiting"], demand(fleet)["live"]) == (2, 1)
    await asyncio.sleep(20)
    assert fleet.model("m")["scaling"]["demand"] is None


def demand(fleet: Played) -> dict[str, Any]:
    demand: dict[str, Any] = fleet.model("m")["scaling"]["demand"]
    return demand


@starting_fleet(SLEEPER, load_s=5.0)
async def test_a_repeated_report_counts_once(fleet: Played) -> None:
    """The gateway resends it without a response."""
    report = DemandReport(gateway="g", number=1, seconds=1.0, models=[DemandWindow(model="m", arrived=100)])
    for _ in range(10):
        await fleet.controller.demand(report)
    await asyncio.sleep(AUTOSCALE_S + 1)
    once = demand(fleet)["arrivals_per_s"]
    assert 0 < once < 10


@starting_fleet(SLEEPER, load_s=5.0)
async def test_a_sample_of_the_requests_is_an_event_at_most_once_a_minute_for_each_model(fleet: Played) -> None:
    """With its replica and the reason."""
    sample = RoutingDecision(
        request="r1",
        model="m",
        queue_ms=12.0,
        candidates=2,
        replica="m/1",
        slot=3,
        slots=4,
        cold=True,
        affinity="session",
    )
    for number in range(1, 121):
        await asyncio.sleep(1.0)
        report = DemandReport(gateway="g", number=number, seconds=1.0, decisions=[sample, sample])
        await fleet.controller.demand(report)
    messages = [event.message for event in fleet.journal.events() if event.reason == "Routed"]
    assert (
        messages
        == [
            "r1 waited 12 ms, 2 had a free slot, m/1 took it as 3 of 4, for its session, "
            "no replica was ready when it came"
        ]
        * 2
    )


@pytest.mark.parametrize("up", ["f", "another"])
@virtual
async def test_a_restarted_controller_keeps_the_numbers_and_a_new_fleet_does_not(tmp_path: Path, up: str) -> None:
    """Replicas above min are not stopped although the history is lost."""
    cluster, journal = FakeCluster(), Journal(None, clock=asyncio.get_running_loop().time)
    cluster.load_s = 5.0
    fleet = Played(tmp_path, cluster, PAIR, journal=journal)
    async with fleet:
        await fleet.controller.settled()
        await Demanding(fleet, {"low": 6.0, "high": 0.0}).run(300)
        assert counts(fleet) == {"low": 3, "high": 0}
    again = Played(tmp_path, cluster, PAIR, journal=journal, fleet=up)
    async with again:
        await again.controller.settled()
        await asyncio.sleep(30)
        assert counts(again) == {"low": 3 if up == "f" else 1, "high": 0}


@starting_fleet(PAIR, load_s=5.0)
async def test_a_rollout_does_not_wait_for_replicas_of_the_autoscaler(fleet: Played) -> None:
    """The numbers keep changing while it is paused, and it completes with the spec's own number."""
    gateway = Demanding(fleet, {"low": 6.0, "high": 0.0})
    await gateway.run(30)
    await fleet.apply(PAIR.replace("max_batch: 4", "max_batch: 8", 1))
    await fleet.operator.pause("tester")
    await gateway.run(120)
    assert counts(fleet)["low"] == 3
    await fleet.operator.resume("tester")
    await gateway.run(300)
    assert fleet.operator.rollout().state == "complete"
    assert len(fleet.ready("low")) == counts(fleet)["low"] == 3


def test_a_fault_in_the_autoscaler_leaves_the_numbers_and_the_repairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A dead replica is started again all the same."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("orchestrator.control.scaling_loop.autoscale", broken)

    async def story(fleet: Played) -> None:
        gateway = Demanding(fleet, {"low": 6.0, "high": 0.0})
        await gateway.run(20)
        await fleet.cluster.find("low/0").die("killed")
        await gateway.run(20)
        assert len(fleet.ready("low")) == 1

    play(tmp_path, PAIR, story)
    assert "autoscaling failed" in caplog.text


@given(
    minimums=st.lists(st.integers(0, 2), min_size=3, max_size=3),
    priorities=st.lists(st.sampled_from([0, 0, 5]), min_size=3, max_size=3),
    phases=st.lists(st.lists(st.sampled_from([0.0, 0.3, 2.0, 8.0]), min_size=3, max_size=3), min_size=1, max_size=4),
    load_s=st.sampled_from([0.5, 7.0, 40.0]),
)
@search(5, cost=10)
def test_no_demand_causes_a_double_claim_or_breaks_a_min_of_equal_priority(
    minimums: list[int], priorities: list[int], phases: list[list[float]], load_s: float
) -> None:
    """Three models on the cores of six replicas: at each second of any course of demand. The fake cluster records
    every start on cores that another process still holds.
    """
    names = ["a", "b", "c"]
    lines = [
        f"  {name}: {{tp_degree: 4, max_batch: 4, replicas: {{min: {least}, max: 5}}, priority: {priority}}}\n"
        for name, least, priority in zip(names, minimums, priorities, strict=True)
    ]

    async def story(fleet: Played) -> None:
        gateway = Demanding(fleet, dict.fromkeys(names, 0.0))
        for phase in phases:
            gateway.rates = dict(zip(names, phase, strict=True))
            for _ in range(60):
                await gateway.run(1)
                assert fleet.cluster.violations == []
                check_classes(fleet)
        for host in fleet.controller.status().hosts:
            assert host.leased + host.free == host.cores

    with tempfile.TemporaryDirectory() as home:
        play(Path(home), HEAD + "".join(lines), story, load_s=load_s)


def check_classes(fleet: Played) -> None:
    """No model lacks a replica of its min while one of the same priority has a place for more than its own."""
    state = fleet.controller.state
    placed = Counter(target.model for target in state.goal.targets)
    for model in state.current.spec.models:
        if placed[model.name] < model.replicas.min:
            for other in state.current.spec.models:
                beyond = other.priority == model.priority and placed[other.name] > other.replicas.min
                assert not beyond, f"{model.name} lacks its min, and {other.name} has {placed[other.name]}"


@starting_fleet(PAIR, load_s=5.0)
async def test_a_growing_model_is_ready_and_one_with_a_failed_extra_replica_degraded(fleet: Played) -> None:
    """A replica added for the demand is not an error while it loads or has no place."""
    gateway = Demanding(fleet, {"low": 6.0, "high": 0.0})
    await fleet.settled()
    fleet.cluster.loads = False
    await gateway.run(60)
    assert counts(fleet)["low"] >= 2
    assert (len(fleet.ready("low")), fleet.model("low")["state"]) == (1, "ready")
    assert {c["type"]: c["status"] for c in fleet.model("low")["conditions"]}["Placed"]
    await fleet.cluster.find("low/1").report(phase=Phase.FAILED, failure=Failure("engine-failed", "it is broken"))
    await asyncio.sleep(0.5)
    assert fleet.model("low")["state"] == "degraded"


@starting_fleet(SLEEPER, load_s=20.0)
async def test_gateways_learn_when_a_model_that_starts_will_be_ready(fleet: Played) -> None:
    """Before its first start by the estimate for its engine, then by what its starts take."""

    def route() -> tuple[float | None, float | None]:
        (model,) = fleet.controller.routes().models
        wall = fleet.controller.state.wall()
        return model.start_s, None if model.ready_at is None else model.ready_at - wall

    gateway = Demanding(fleet, {"m": 0.0})
    await gateway.run(3)
    estimate_s, none = route()
    assert (estimate_s, none) == (6.0, None)
    gateway.rates["m"] = 1.0
    await gateway.run(2)
    assert 3.0 <= (route()[1] or 0.0) <= 6.0
    await gateway.run(40)
    assert route() == (pytest.approx(20.0, abs=0.5), None)
    gateway.rates["m"] = 0.0
    await gateway.run(400)
    assert counts(fleet) == {"m": 0}
    gateway.rates["m"] = 1.0
    await gateway.run(12)
    start_s, left_s = route()
    assert start_s == pytest.approx(20.0, abs=0.5)
    assert 7.0 <= (left_s or 0.0) <= 12.0
