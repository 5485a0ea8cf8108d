"""What the autoscaler promises for any history and fleet."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.scaling.autoscaler import FleetNow, History, Load, ModelNow, Targets, autoscale
from placements.planner.board import Tenant
from placements.planner.capacity import Capacity
from placements.spec.sections import Objectives
from tests.orchestrator.scaling.pools import need_of, pool_of
from tests.searches import search

NOW = 10_000.0
NAMES = ("a", "b", "c", "d")
_FEW = search(20)


@st.composite
def models(draw: st.DrawFn, name: str, priorities: int = 3, sizes: tuple[int, ...] = (1, 2, 4, 8, 24)) -> ModelNow:
    low = draw(st.integers(0, 3))
    high = low + draw(st.integers(0, 5))
    starting = draw(st.integers(0, 1))
    target = draw(st.integers(0, 8))
    return ModelNow(
        name=name,
        need=need_of(draw(st.sampled_from(sizes))),
        slots=draw(st.sampled_from((1, 4, 8))),
        min=low,
        max=high,
        priority=draw(st.integers(0, priorities - 1)),
        load_s=draw(st.sampled_from((1.0, 30.0, 90.0, 400.0))),
        objectives=Objectives(ttft_ms=draw(st.sampled_from((None, 1000.0, 10_000.0)))),
        override=draw(st.sampled_from((None, None, None, 0, 2))),
        target=target,
        ready=max(0, target - starting),
        starting=min(starting, target),
        since=draw(st.sampled_from((None, 0.0, NOW - 10.0))),
        reachable=draw(st.sampled_from((None, None, 1))),
        worth_per_1000=draw(st.sampled_from((None, 0.1, 1000.0))),
        first_ready_at=draw(st.sampled_from((None, 0.0))),
    )


@st.composite
def fleets(draw: st.DrawFn) -> FleetNow:
    names = NAMES[: draw(st.integers(1, 4))]
    loads = tuple(draw(models(name)) for name in names)
    hosts = tuple(draw(st.lists(st.tuples(st.sampled_from((0, 8, 24)), st.sampled_from((0.0, 0.0, 1.5))), max_size=3)))
    capacity = Capacity(pool_of(*hosts))
    placed = []
    for order, model in enumerate(loads):  # some know where they lie
        known: list[tuple[int, int]] = []
        while draw(st.booleans()) and len(known) < model.target and model.need is not None:
            tenant = Tenant(order, len(known), model.cores, (0, True, True), model.need.demand)
            if not capacity.place(tenant, model.need, (), most=9.0):
                break
            known.append((tenant.host, tenant.first))
        placed.append(replace(model, places=tuple(known)))
    return FleetNow(tuple(placed), pool_of(*hosts))


@st.composite
def histories(draw: st.DrawFn) -> History:
    history = History()
    for tick in range(draw(st.integers(0, 12))):
        loads = {}
        for name in NAMES:
            arrived = draw(st.sampled_from((0, 0, 1, 5, 60)))
            ended = draw(st.integers(0, arrived))
            loads[name] = Load(
                5.0,
                arrived=arrived,
                ended=ended,
                slot_s=ended * draw(st.sampled_from((0.1, 5.0, 60.0))),
                waiting=arrived - ended,
                longest_wait_s=draw(st.sampled_from((0.0, 100.0))),
            )
        history = history.after(NOW - 60.0 + 5.0 * tick, loads)
    return history


def used(fleet: FleetNow, targets: Targets) -> int:
    return sum(model.cores * targets.counts[model.name] for model in fleet.models)


@_FEW
@given(histories(), fleets())
def test_targets_never_take_more_cores_than_there_are(history: History, fleet: FleetNow) -> None:
    """For any history and fleet, over-committed ones among them."""
    assert used(fleet, autoscale(history, fleet, NOW)) <= sum(fleet.pool.cores)


@_FEW
@given(histories(), fleets())
def test_targets_are_within_min_and_max_or_cut(history: History, fleet: FleetNow) -> None:
    """No target is above max or the number set by hand; one below min is because there are no cores."""
    targets = autoscale(history, fleet, NOW)
    for model in fleet.models:
        high = model.max if model.override is None else min(model.override, model.max)
        low = min(model.min, model.max) if model.override is None else high
        assert targets.counts[model.name] <= high
        if targets.counts[model.name] < low:
            others = used(fleet, targets)
            assert others + model.cores > sum(fleet.pool.cores) or targets.reasons[model.name]


@_FEW
@given(histories(), fleets())
def test_the_same_gives_the_same(history: History, fleet: FleetNow) -> None:
    """The decision does not depend on the order in which the models are named."""
    turned = replace(fleet, models=fleet.models[::-1])
    assert autoscale(history, fleet, NOW).counts == autoscale(history, turned, NOW).counts


@_FEW
@given(histories(), fleets())
def test_every_change_has_a_reason(history: History, fleet: FleetNow) -> None:
    """Nothing changes without a sentence."""
    targets = autoscale(history, fleet, NOW)
    for model in fleet.models:
        assert targets.counts[model.name] == model.target or targets.reasons[model.name]


@_FEW
@given(histories(), st.data())
def test_no_model_falls_below_min_while_an_equal_is_above_its_own(history: History, data: st.DataObject) -> None:
    """Where every replica has the same size, a model without its min gets it from any of its priority beyond theirs."""
    loads = tuple(replace(data.draw(models(name, sizes=(8,))), override=None) for name in NAMES)
    fleet = FleetNow(loads, pool_of((24, 0.0), (24, 0.0)))
    counts = autoscale(history, fleet, NOW).counts
    for model in loads:
        if counts[model.name] < model.min:
            assert all(counts[other.name] <= other.min for other in loads if other.priority <= model.priority), (
                model,
                counts,
            )


@_FEW
@given(histories(), st.data())
def test_a_higher_priority_never_lowers_a_model_s_own_target(history: History, data: st.DataObject) -> None:
    """Monotone in priority, where every replica has the same size."""
    loads = tuple(data.draw(models(name, sizes=(8,))) for name in NAMES)
    hosts = pool_of((24, 0.0), (24, 0.0))
    raised = (replace(loads[0], priority=loads[0].priority + data.draw(st.integers(1, 3))), *loads[1:])
    before = autoscale(history, FleetNow(loads, hosts), NOW).counts["a"]
    assert autoscale(history, FleetNow(raised, hosts), NOW).counts["a"] >= before


def play(fleet: FleetNow, rates: Mapping[str, float], seconds: float) -> list[dict[str, int]]:
    """The targets of each tick under constant load, where replicas are ready after their load time."""
    history, counts = History(), {model.name: model.target for model in fleet.models}
    began: dict[str, list[float]] = {name: [-1e4] * count for name, count in counts.items()}
    seen = []
    for tick in range(1, int(seconds / 5.0) + 1):
        now = 5.0 * tick
        loads = {}
        for name, rate in rates.items():
            n = int(rate * now) - int(rate * (now - 5.0))
            loads[name] = Load(5.0, arrived=n, ended=n, slot_s=6.0 * n)
        history = history.after(now, loads)
        state = []
        for model in fleet.models:
            mine = began[model.name]
            ready = sum(now - at >= model.load_s for at in mine)
            since = max((at + model.load_s if now - at >= model.load_s else at for at in mine), default=None)
            first = min((at + model.load_s for at in mine), default=None)
            known = replace(model, target=len(mine), ready=ready, starting=len(mine) - ready, since=since)
            state.append(replace(known, first_ready_at=first if ready else None))
        decided = autoscale(history, FleetNow(tuple(state), fleet.pool), now).counts
        for name, count in decided.items():
            mine = began[name]
            began[name] = mine[:count] + [now] * (count - len(mine))
        seen.append(dict(decided))
    return seen


@pytest.mark.slow
@search(4, cost=10)
@given(st.lists(st.sampled_from((0.0, 0.02, 0.3, 1.0, 3.0)), min_size=4, max_size=4), st.data())
def test_an_hour_of_constant_load_reaches_a_fixed_point(rates: list[float], data: st.DataObject) -> None:
    """After the first twenty minutes only models without requests change: they scale to zero."""
    states = []
    for name in NAMES:
        cores = data.draw(st.sampled_from((2, 4, 8)))
        states.append(
            ModelNow(name=name, need=need_of(cores), slots=4, min=0, max=8, load_s=40.0, target=1, idle_s=1e9)
        )
    seen = play(FleetNow(tuple(states), pool_of((24, 0.0), (24, 0.0))), dict(zip(NAMES, rates, strict=True)), 3600.0)
    changes = sum(a != b for a, b in itertools.pairwise(seen[240:]))
    assert changes == 0
