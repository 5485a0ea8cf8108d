"""The hosts that are added for missing replicas are the cheapest that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from placements.facts.topology import TOPOLOGIES, Host, Machine
from placements.planner import host_choice
from placements.planner.host_choice import HostChoice, choose_hosts, plan_on_cluster
from placements.planner.plan import Running, Unplaced, plan
from placements.planner.spec_hosts import host_groups, hosts_for
from placements.spec.schema import HostsSpec, Spec
from tests.placements.fleets import model
from tests.searches import search

BLOCKS = {"inf2.xlarge": [2], "inf2.24xlarge": [8, 4], "inf2.48xlarge": [8, 8, 8]}
"""Cores of a host as aligned blocks of powers of two: what replicas of degrees 1, 2, 4 and 8 can use."""

entries = st.lists(
    st.builds(
        lambda kind, low, more, price: HostsSpec.model_validate(
            {"emulate": kind, "min": low, "max": max(1, low + more), "price_per_core_hour": price}
        ),
        st.sampled_from(sorted(BLOCKS)),
        st.integers(0, 1),
        st.integers(0, 3),
        st.sampled_from([0.0, 0.3, 0.5, 0.75]),
    ),
    min_size=1,
    max_size=3,
)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    models = [
        model(
            name,
            draw(st.sampled_from([1, 2, 4, 8])),
            engine="echo",
            replicas={"min": (count := draw(st.integers(0, 5))), "max": max(1, count)},
            priority=draw(st.integers(0, 1)),
        )
        for name in ("a", "b", "c")
    ]
    return Spec(models=tuple(models), hosts=tuple(draw(entries)))


def sizes(spec: Spec) -> list[int]:
    return [item.tp_degree for item in spec.models for _ in range(item.replicas.min)]


def holds(items: Sequence[int], counts: Sequence[tuple[str, int]]) -> bool:
    """Returns whether these hosts have room: the largest item first, into the smallest block that has as much left."""
    left = [block for kind, count in counts for _ in range(count) for block in BLOCKS[kind]]
    for item in sorted(items, reverse=True):
        room = min((block for block in left if block >= item), default=None)
        if room is None:
            return False
        left.remove(room)
        left.append(room - item)
    return True


@search(25)
@given(specs())
def test_no_cheaper_set_of_hosts_holds_what_is_wanted(spec: Spec) -> None:
    """Against every combination of numbers of hosts, with a packing of its own: price, then fewest hosts and cores."""
    choice = plan_on_cluster(spec, hosts_for(spec, Machine(cpus=(0, 1))), {})
    kinds = [str(entry.emulate) for entry in spec.hosts]
    possible = [
        counts
        for counts in product(*(range(entry.least, entry.most + 1) for entry in spec.hosts))
        if holds(sizes(spec), list(zip(kinds, counts, strict=True)))
    ]
    event("possible" if possible else "impossible")
    if not possible:
        assert choice.plan.unplaced
        return
    least = tuple(entry.least for entry in spec.hosts)

    def cost(counts: tuple[int, ...]) -> tuple[float, ...]:
        added = [more - low for more, low in zip(counts, least, strict=True)]
        cores = [TOPOLOGIES[kind].cores for kind in kinds]
        price = sum(n * c * entry.price_per_core_hour for n, c, entry in zip(added, cores, spec.hosts, strict=True))
        return round(price, 6), sum(added), sum(n * c for n, c in zip(added, cores, strict=True))

    chosen = tuple(
        low + sum(host in choice.hosts for host in group.hosts) for low, group in zip(least, choice.groups, strict=True)
    )
    event(f"{sum(cost(chosen)[1:2])} added")
    assert choice.plan.unplaced == ()
    assert cost(chosen) == min(map(cost, possible))
    assert {added.host for added in choice.added() if not added.replicas} == set()


@search(25)
@given(specs(), st.sets(st.integers(0, 9)), st.booleans(), st.booleans())
def test_adding_hosts_leaves_what_runs_and_is_the_same_each_time(
    spec: Spec, missing: set[int], backwards: bool, by_halves: bool
) -> None:
    """With some hosts present and replicas on them; whatever the order of search, as much is placed as with all."""
    hosts = hosts_for(spec, Machine(cpus=(0, 1)))
    groups = host_groups(spec, hosts)
    present = [host for i, host in enumerate(hosts) if i not in missing]
    absent = [host for i, host in enumerate(hosts) if i in missing]
    running = [placement.running for placement in plan(spec, present).placements[:3]]

    def chosen(order: Sequence[Host]) -> HostChoice:
        return choose_hosts(spec, groups, order, lambda added: plan(spec, (*present, *added), None, running))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_choice, "MOST_PLANS", 0 if by_halves else 64)
        choice = chosen(absent[::-1] if backwards else absent)
        assert choice == chosen(absent[::-1] if backwards else absent)
    kept = {placement.running for placement in choice.plan.placements}
    assert set(running) <= kept
    every = plan(spec, (*present, *absent), None, running)
    assert _short(spec, choice.plan.unplaced) <= _short(spec, every.unplaced)


def _short(spec: Spec, unplaced: Sequence[Unplaced]) -> list[int]:
    """Missing cores by priority, the highest first."""
    models = {item.name: item for item in spec.models}
    missing = [models[item.model] for item in unplaced]
    return [sum(item.tp_degree for item in missing if item.priority == priority) for priority in (1, 0)]


def test_a_type_that_does_not_come_is_avoided_while_another_suffices() -> None:
    """The small hosts are the cheapest; when they are avoided a large one is chosen, and small ones only without it."""
    small = HostsSpec.model_validate({"emulate": "inf2.xlarge", "max": 4, "price_per_core_hour": 0.3})
    large = HostsSpec.model_validate({"emulate": "inf2.48xlarge", "max": 1, "price_per_core_hour": 0.5})
    pair = model("pair", 2, engine="echo", replicas=2)

    def names(*entries: HostsSpec, avoided: str) -> list[str]:
        spec = Spec(models=(pair,), hosts=entries)
        hosts = hosts_for(spec, Machine(cpus=(0, 1)))
        groups = host_groups(spec, hosts)
        choice = choose_hosts(spec, groups, hosts, lambda added: plan(spec, added), {avoided})
        return [host.name for host in choice.hosts]

    assert names(small, large, avoided="") == ["inf2.xlarge/0", "inf2.xlarge/1"]
    assert names(small, large, avoided="inf2.xlarge") == ["inf2.48xlarge/0"]
    assert names(small, avoided="inf2.xlarge") == ["inf2.xlarge/0", "inf2.xlarge/1"]


def test_replicas_that_run_stay_where_they_are_when_a_host_is_added() -> None:
    """A fragmented host keeps its replicas; the one that fits nowhere gets a host of its own."""
    entry = HostsSpec.model_validate({"emulate": "inf2.48xlarge", "min": 1, "max": 2})
    models = (model("one", engine="echo", replicas=2), model("all", 24, engine="echo"))
    spec = Spec(models=models, hosts=(entry,))
    hosts = hosts_for(spec, Machine(cpus=(0, 1)))
    here = plan(Spec(models=models[:1], hosts=(entry,)), hosts[:1])
    running: list[Running] = [placement.running for placement in here.placements]
    choice = choose_hosts(
        spec, host_groups(spec, hosts), hosts[1:], lambda added: plan(spec, (*hosts[:1], *added), None, running)
    )
    assert [added.replicas for added in choice.added()] == [("all/0",)]
