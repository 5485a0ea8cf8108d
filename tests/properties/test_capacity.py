"""The autoscaler and the planner count the same cores, whatever the spec, the hosts, what runs or is quarantined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from hypothesis import HealthCheck, assume, event, given
from hypothesis import strategies as st

from placements.planner.board import Tenant
from placements.planner.capacity import Capacity, Need, needs
from placements.planner.host_pool import HostPool
from placements.planner.plan import Running
from tests.properties.test_plan import Case, cases
from tests.searches import search

# Two of three drawn fleets are not at rest, since a pin of theirs was taken or quarantined.
_SEARCHED = search(40, suppress_health_check=list(HealthCheck))


@st.composite
def running_fleets(draw: st.DrawFn) -> Case:
    """A fleet at rest: some replicas of each model run, and some cores were quarantined since they started."""
    case = replace(draw(cases()), moves=0, held={})
    counts = {model.name: draw(st.integers(0, 3)) for model in case.spec.models}
    first = replace(case, running=(), wanted=counts)
    runs = tuple(placement.running for placement in first.plan().placements)
    blocked = {
        host.name: case.blocked.get(host.name, frozenset())
        | draw(st.frozensets(st.integers(0, host.cores - 1), max_size=2))
        for host in case.hosts
    }
    at_rest = replace(case, running=runs, wanted=Counter(replica.model for replica in runs), blocked=blocked)
    assume(is_at_rest(at_rest))
    return at_rest


def is_at_rest(case: Case) -> bool:
    """Whether the planner changes nothing."""
    again = case.plan()
    return not again.unplaced and {placement.running for placement in again.placements} == set(case.running)


def without(case: Case, removed: Collection[Running]) -> Case:
    runs = tuple(replica for replica in case.running if replica not in removed)
    return replace(case, running=runs, wanted=Counter(replica.model for replica in runs))


def plans_one_more(case: Case, name: str) -> bool:
    """Whether the planner places one more replica of the model and moves none."""
    more = replace(case, wanted={**case.wanted, name: case.wanted.get(name, 0) + 1}).plan()
    return not more.unplaced and not more.moves


def board_of(case: Case) -> tuple[Capacity, dict[str, Need], dict[str, list[Tenant]]]:
    """The autoscaler's board with all running replicas, the need of each model, and its replicas."""
    pool = HostPool(case.hosts, case.blocked)
    need_of = needs(case.spec, pool, case.checkpoints)
    capacity = Capacity(pool, [pin for need in need_of.values() for pin in need.pins])
    own: dict[str, list[Tenant]] = {name: [] for name in need_of}
    for replica in case.running:
        if replica.cores is not None:
            tenant = next_of(case, replica.model, need_of, own)
            assert capacity.hold(tenant, (pool.numbers[replica.host], replica.cores.first))
            own[replica.model].append(tenant)
    return capacity, need_of, own


def next_of(case: Case, name: str, need_of: dict[str, Need], own: dict[str, list[Tenant]]) -> Tenant:
    order = [model.name for model in case.spec.models].index(name)
    demand = need_of[name].demand
    return Tenant(order, len(own[name]), demand.size, (-case.model(name).priority, True, False), demand)


@_SEARCHED
@given(running_fleets())
def test_one_more_replica_is_possible_if_and_only_if_the_planner_places_it(case: Case) -> None:
    """For each model of a fleet at rest, with pins, reserved and quarantined cores, memory, CPUs and spread."""
    for name in board_of(case)[1]:
        model, count = case.model(name), case.wanted.get(name, 0)
        if count >= model.replicas.max:
            continue
        capacity, need_of, own = board_of(case)
        possible = capacity.place(next_of(case, name, need_of, own), need_of[name], own[name])
        event(f"possible: {possible}")
        assert possible == plans_one_more(case, name), (name, possible)


@_SEARCHED
@given(running_fleets())
def test_the_replicas_to_remove_for_one_more_are_those_after_which_the_planner_places_it(case: Case) -> None:
    """Each vacancy is room once its replicas are gone, and where a single replica makes room, there is a vacancy."""
    capacity, need_of, own = board_of(case)
    names = [model.name for model in case.spec.models]
    runs = {name: [replica for replica in case.running if replica.model == name] for name in names}
    for name in need_of:
        if case.wanted.get(name, 0) >= case.model(name).replicas.max:
            continue
        offered = set()
        for vacancy in capacity.vacancies(need_of[name], own[name]):
            if any(names[tenant.model] == name for tenant in vacancy.tenants):
                continue  # the autoscaler never replaces a model's own replica
            gone = frozenset(runs[names[tenant.model]][tenant.replica] for tenant in vacancy.tenants)
            offered.add(gone)
            rest = without(case, gone)
            if is_at_rest(rest):
                event("vacancy")
                assert plans_one_more(rest, name), (name, vacancy)
        if plans_one_more(case, name):
            continue
        for replica in case.running:
            rest = without(case, {replica})
            if replica.model != name and replica.cores is not None and is_at_rest(rest) and plans_one_more(rest, name):
                event("single replica")
                assert offered, (name, replica)
