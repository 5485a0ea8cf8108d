"""The simulator with the planner and a policy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scaling_parts.scenarios import scenario_of, sim_model
from orchestrator.scaling.autoscaler import FleetNow, Targets
from orchestrator.scaling.forecast import Load
from orchestrator.simulate.run import Fixed, Joint, Outcome, simulate
from orchestrator.simulate.scenario import Arrival, SimModel
from orchestrator.simulate.simulated_fleet import SimulatedPhase
from orchestrator.simulate.workload import Workload
from tests.searches import search


class Scripted:
    """A policy with scripted decisions, one for each tick."""

    def __init__(self, script: list[dict[str, int]], tick_s: float = 10.0) -> None:
        self.tick_s = tick_s
        self.seen: list[FleetNow] = []
        self._script = script

    def decide(self, now: float, loads: Mapping[str, Load], fleet: FleetNow) -> Targets:
        self.seen.append(fleet)
        at = min(int(now / self.tick_s) - 1, len(self._script) - 1)
        return Targets(self._script[max(0, at)], {})


OBJECTIVES = {"ttft_ms": 2000.0}
LOADING, READY, DRAINING, GONE = SimulatedPhase


def model(name: str, cores: int = 8, **more: Any) -> SimModel:
    return sim_model(name, cores=cores, **{"slots": 2, "step_s": 0.1, "load_s": 15.0, "least": 0, "most": 9, **more})


def held(outcome: Outcome) -> list[tuple[float, dict[tuple[str, int], str]]]:
    """Returns after every change which replica holds which core. Fails on a core that is held twice."""
    cores: dict[tuple[str, int], str] = {}
    steps = []
    for change in outcome.changes:
        placement = change.placement
        mine = {(placement.host, core) for core in placement.cores or ()}
        id = f"{placement.model}/{placement.replica}"
        if change.phase is LOADING:
            assert not mine & set(cores), f"{id} at {change.at}"
            cores |= dict.fromkeys(mine, id)
        elif change.phase is GONE:
            assert {cores.pop(core) for core in mine} == {id}
        steps.append((change.at, dict(cores)))
    return steps


def kinds(outcome: Outcome, name: str) -> list[tuple[float, SimulatedPhase]]:
    return [(change.at, change.phase) for change in outcome.changes if change.placement.model == name]


def test_a_replica_is_ready_when_it_has_loaded() -> None:
    """Decided at the first tick, ready load_s later."""
    arrivals = [Arrival(5.0, "a", 10, 2), Arrival(60.0, "a", 10, 2)]
    outcome = simulate(scenario_of([model("a")], hosts=1), arrivals, Scripted([{"a": 1}]), record=True)
    assert kinds(outcome, "a") == [(5.0, LOADING), (20.0, READY)]


def test_the_first_request_of_a_model_at_zero_is_decided_at_once() -> None:
    """And it is answered when the replica is ready: nothing is lost."""
    outcome = simulate(scenario_of([model("a")], hosts=1), [Arrival(1.0, "a", 10, 2)], Joint())
    measured = outcome.measured["a"]
    assert (measured.answered, round(measured.ttfts[0], 3), outcome.loads["a"]) == (1, 15.016, 1)


def test_cores_are_free_before_they_are_used_again() -> None:
    """Shrink before grow: b starts when a's last request has ended, not at the decision."""
    arrivals = [Arrival(9.0, "a", 10, 101)]
    scenario = scenario_of([model("a", 24), model("b", 24)], hosts=1)
    outcome = simulate(scenario, arrivals, Scripted([{"a": 0, "b": 1}]), initial={"a": 1}, record=True)
    assert held(outcome)
    assert kinds(outcome, "a")[2:] == [(10.0, DRAINING), (pytest.approx(19.016), GONE)]
    assert kinds(outcome, "b")[0] == (pytest.approx(19.016), LOADING)


def test_a_draining_replica_is_ended_at_its_deadline() -> None:
    """300 s by default; its requests are lost, and counted."""
    outcome = simulate(
        scenario_of([model("a")], hosts=1), [Arrival(9.0, "a", 10, 10_000)], Scripted([{"a": 0}]), initial={"a": 1}
    )
    assert (outcome.measured["a"].lost, outcome.measured["a"].open) == (1, 0)


def test_an_unwanted_replica_stops_loading() -> None:
    """Its cores are free at once."""
    arrivals = [Arrival(1.0, "b", 10, 1), Arrival(40.0, "b", 10, 1)]
    script = Scripted([{"a": 1, "b": 1}, {"a": 0, "b": 1}])
    outcome = simulate(scenario_of([model("a", load_s=30.0), model("b")], hosts=1), arrivals, script, record=True)
    assert kinds(outcome, "a") == [(1.0, LOADING), (20.0, GONE)]


def test_requests_wait_for_a_first_replica_up_to_hold_s() -> None:
    """There is no room for the model."""
    arrivals = [Arrival(1.0, "a", 10, 1), Arrival(100.0, "a", 10, 1)]
    outcome = simulate(scenario_of([model("a", scaling={"hold_s": 30.0})], hosts=1), arrivals, Scripted([{"a": 0}]))
    assert outcome.measured["a"].refused == 2


def test_core_hours_count_from_the_start_to_the_end() -> None:
    """Loading and draining replicas hold their cores too."""
    arrivals = [Arrival(5.0, "a", 10, 1), Arrival(104.0, "a", 10, 1)]
    outcome = simulate(scenario_of([model("a")], hosts=1), arrivals, Scripted([{"a": 1}]), record=True)
    ended = outcome.seconds
    assert outcome.core_s["a"] == pytest.approx(8 * (ended - 5.0))


def test_a_host_joins_for_a_replica_and_is_given_back_when_none_needs_it() -> None:
    """It joins a minute after its request, and leaves when it was spare for as long; idle hosts are not requested."""
    arrivals = [Arrival(float(at), "a", 10, 1) for at in range(400)]
    script = Scripted([{"a": 1}] * 3 + [{"a": 2}] * 16 + [{"a": 1}])
    outcome = simulate(scenario_of([model("a", 24, least=1)], hosts=3, least=1), arrivals, script, record=True)
    assert [(change.at, change.phase) for change in outcome.changes if change.placement.replica == 1] == [
        (100.0, LOADING),
        (115.0, READY),
        (200.0, DRAINING),
        (200.0, GONE),
    ]
    assert outcome.host_starts == 1
    assert list(outcome.host_s.values()) == [outcome.seconds, 270.0 - 40.0, 0.0]


def test_an_unwanted_machine_is_not_awaited() -> None:
    """Its request is withdrawn, and no time is counted afterwards."""
    arrivals = [Arrival(float(at), "a", 10, 1) for at in range(200)]
    script = Scripted([{"a": 2}] * 3 + [{"a": 1}])
    outcome = simulate(scenario_of([model("a", 24, least=1)], hosts=2, least=1), arrivals, script, record=True)
    assert list(outcome.host_s.values()) == [outcome.seconds, 30.0]
    assert outcome.loads == {"a": 0}


def test_a_replica_that_waits_for_a_machine_with_a_price_is_not_dropped() -> None:
    """A steady load requests each machine once, although the replica has no cores for five minutes."""
    models = [model("a", 8, least=1, objectives=OBJECTIVES, slots=4), model("b", 8, objectives=OBJECTIVES, slots=4)]
    scenario = scenario_of(models, hosts=3, least=1, price=0.5, host_start_s=300.0)
    outcome = simulate(scenario, Workload("poisson", ("a", "b"), 1.5, 1200.0, 1), Joint())
    assert 0 < outcome.host_starts <= 2


def test_the_policy_gets_the_running_replicas() -> None:
    """Places, ready and starting replicas."""
    scripted = Scripted([{"a": 2}, {"a": 2}, {"a": 2}])
    simulate(scenario_of([model("a")], hosts=1), [Arrival(29.0, "a", 10, 1)], scripted, initial={"a": 1})
    seen = [(fleet.models[0].ready, fleet.models[0].starting, fleet.models[0].places) for fleet in scripted.seen[:2]]
    assert seen == [(1, 0, ((0, 0),)), (1, 1, ((0, 0), (0, 8)))]


def test_a_model_without_scaling_keeps_its_min() -> None:
    """`scaling: {auto: false}`."""
    arrivals = [Arrival(at / 10, "a", 10, 50) for at in range(600)]
    outcome = simulate(scenario_of([model("a", least=1, scaling={"auto": False})], hosts=1), arrivals, Joint())
    assert outcome.loads["a"] == 0


@given(
    script=st.lists(
        st.fixed_dictionaries({"a": st.integers(0, 4), "b": st.integers(0, 3), "c": st.integers(0, 9)}), max_size=8
    ),
    seed=st.integers(0, 5),
    least=st.sampled_from((None, 0, 1)),
)
@search(8, cost=10)
def test_no_core_is_ever_held_twice(script: list[dict[str, int]], seed: int, least: int | None) -> None:
    """In any prefix of the events, for any policy, also if hosts come and go; and no request is lost."""
    models = [model("a", 8), model("b", 24, priority=1), model("c", 2, priority=-1)]
    load = Workload("gamma", ("a", "b", "c"), 1.0, 100.0, seed)
    scenario = scenario_of(models, hosts=2, least=least, host_start_s=20.0)
    outcome = simulate(scenario, load, Scripted(script or [{}], 7.0), record=True)
    held(outcome)
    for value in outcome.measured.values():
        assert value.arrived == value.answered + value.refused + value.lost + value.open


@pytest.mark.slow
@given(seed=st.integers(0, 1000), kind=st.sampled_from(("gamma", "onoff", "mixed")))
@search(4, cost=30)
def test_the_autoscaler_never_exceeds_the_cores_of_the_fleet(seed: int, kind: str) -> None:
    """Its targets together, at every decision."""
    sizes = {"a": 8, "b": 24, "c": 4}
    models = [model(name, cores, objectives=OBJECTIVES, priority=int(name == "c")) for name, cores in sizes.items()]
    load = Workload(kind, ("a", "b", "c"), 4.0, 1200.0, seed)  # type: ignore[arg-type]
    outcome = simulate(scenario_of(models, hosts=2), load, Joint(), record=True)
    held(outcome)
    targets = dict.fromkeys(sizes, 0)
    for before, after in pairwise([*outcome.decisions, None]):
        assert before is not None
        targets[before.model] = before.after
        if after is None or after.at != before.at:
            assert sum(sizes[name] * count for name, count in targets.items()) <= 48


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.15, 0.3])
def test_constant_load_causes_no_flapping(rate: float) -> None:
    """For an hour: what is started in its first ten minutes stays, give or take one."""
    models = [model(name, 8, objectives=OBJECTIVES, load_s=60.0) for name in "abc"]
    load = Workload("poisson", ("a", "b", "c"), rate, 3600.0, 1)
    outcome = simulate(scenario_of(models, hosts=2), load, Joint(), record=True)
    late = [decision for decision in outcome.decisions if 600 < decision.at < 3600]
    assert len(late) <= 2, late


def test_two_runs_are_equal_for_any_hash_seed() -> None:
    """Byte for byte, in the output."""
    code = (
        "import json, sys; from orchestrator.cli.main import run; "
        "sys.exit(run(['simulate', 'placements/examples/demo.yaml', '--generate', 'mixed', '--rate', '2', "
        "'--duration', '60', '--gateways', '2', '-o', 'json']))"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) > 1000


def test_a_static_split_starts_nothing() -> None:
    """`Fixed` simulates a spec without scaling."""
    load = Workload("poisson", ("a",), 1.0, 60.0)
    outcome = simulate(scenario_of([model("a", least=1)], hosts=1), load, Fixed({"a": 1}))
    assert outcome.loads["a"] == 0
