"""Hosts that come and go: machines are requested for replicas without a place, and given back when none needs them."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.control.decisions.host_demand import SPARE_S, HostDemand
from orchestrator.control.decisions.rollout_step import DesiredModel, Situation
from orchestrator.control.host_uses import LEAST_LATE_S
from orchestrator.control.journal.journal import Journal
from placements.facts.topology import Machine
from placements.planner.spec_hosts import host_groups, hosts_for, kept_hosts
from placements.spec.parse import parse
from tests.orchestrator.fakes import FakeCluster, Played, starting_fleet, virtual
from workers.messages.status import Notice

FIRST, SECOND, THIRD = (f"inf2.48xlarge/{i}" for i in range(3))
SMALL = "trn1.32xlarge/0"
SPEC = """\
version: 1
hosts: [{emulate: inf2.48xlarge, min: 1, max: 3}]
models:
  a: {engine: echo, tp_degree: 24, replicas: {min: 1, max: 4}}
"""
TWO_TYPES = """\
version: 1
hosts:
  - {emulate: inf2.48xlarge, min: 0, max: 2, price_per_core_hour: 1}
  - {emulate: trn1.32xlarge, min: 0, max: 2, price_per_core_hour: 2}
models:
  a: {engine: echo, tp_degree: 8, replicas: {min: 1, max: 4}}
"""


def hosts(played: Played) -> dict[str, str]:
    return {host.name: "starting" if host.starting else "ready" for host in played.controller.status().hosts}


async def scale(played: Played, count: int | None) -> None:
    await played.operator.scale("a", count, by="tester")


@starting_fleet(SPEC, machine_s=30.0, tick_s=10.0)
async def test_a_machine_is_requested_for_a_replica_without_a_place_and_given_back(played: Played) -> None:
    """The replica serves once the machine has joined. When it is not wanted any more, its host is given back, and the
    fleet keeps its least number."""
    await played.settled()
    assert hosts(played) == {FIRST: "ready"}
    await scale(played, 2)
    await played.until(lambda: hosts(played).get(SECOND) == "starting", "requested", 5.0)
    await played.until(lambda: len(played.ready("a")) == 2, "served", 60.0)
    assert hosts(played) == {FIRST: "ready", SECOND: "ready"}
    await scale(played, 1)
    await played.until(lambda: len(hosts(played)) == 1, "given back", 3 * SPARE_S)
    await asyncio.sleep(3600.0)
    assert len(played.ready("a")) == len(hosts(played)) == 1
    kinds = [kind for kind in played.happened() if kind.startswith("Host")]
    assert kinds == ["HostRequested", "HostJoined", "HostLeaving", "HostReleased"]


@starting_fleet(SPEC)
async def test_a_machine_that_is_given_back_takes_its_cordon_along(played: Played) -> None:
    """The next machine with the host's name is another one."""
    await scale(played, 2)
    await played.until(lambda: len(played.ready("a")) == 2, "served", 60.0)
    await played.operator.cordon(SECOND, "3", on=True, by="tester")
    await scale(played, 1)
    await played.until(lambda: len(hosts(played)) == 1, "given back", 3 * SPARE_S)
    await scale(played, 3)
    await played.until(lambda: len(played.ready("a")) == 3, "served by all hosts of the spec", 60.0)


@starting_fleet(SPEC, machine_s=600.0)
async def test_a_replica_that_waits_for_its_machine_has_cores_for_the_autoscaler(played: Played) -> None:
    """Without any, a replica on hosts with a price would be dropped and requested anew with each decision."""
    await played.settled()
    await scale(played, 2)
    await played.until(lambda: hosts(played).get(SECOND) == "starting", "requested", 5.0)
    assert played.controller.scaler.fleet_now().models[0].places == ((0, 0), (1, 0))


@starting_fleet(SPEC)
async def test_a_host_that_leaves_stays_when_a_replica_needs_it(played: Played) -> None:
    """The new replica is placed there at once, and no machine is requested."""
    await scale(played, 2)
    await played.until(lambda: len(played.ready("a")) == 2, "served", 60.0)
    played.cluster.drain_s = 600.0
    await scale(played, 1)
    await played.until(lambda: "HostLeaving" in played.happened(), "leaving", 3 * SPARE_S)
    await scale(played, 2)
    await played.until(lambda: len(played.ready("a")) == 2, "served again", 700.0)
    kinds = [kind for kind in played.happened() if kind.startswith("Host")]
    assert kinds == ["HostRequested", "HostJoined", "HostLeaving", "HostStays"]


@starting_fleet(TWO_TYPES, refused_types={"inf2.48xlarge": "no capacity"})
async def test_the_next_cheapest_type_is_requested_if_machines_of_the_cheapest_one_do_not_start(played: Played) -> None:
    """The reason is an event and part of the status; the request that is not needed any more is withdrawn."""
    await played.until(lambda: len(played.ready("a")) == 1, "served", 60.0)
    await played.until(lambda: hosts(played) == {SMALL: "ready"}, "withdrawn", 30.0)
    events = played.journal.events()
    refused = [(event.host, event.message) for event in events if event.reason == "HostNotStarted"]
    assert refused == [(FIRST, "no capacity")]
    assert played.cluster.requests == {}


@starting_fleet(
    SPEC.replace("min: 1, max: 3", "min: 0, max: 1"), refused_types={"inf2.48xlarge": "no capacity"}, tick_s=30.0
)
async def test_the_status_says_why_a_replica_waits(played: Played) -> None:
    """Its model is loading while a machine is requested, with the reason why it does not start."""
    await played.until(lambda: hosts(played).get(FIRST) == "starting", "requested", 5.0)
    await asyncio.sleep(2.0)
    model, (host,) = played.model("a"), played.controller.status().hosts
    assert (model["state"], model["reason"]) == (
        "loading",
        f"it waits for the requested machine of {FIRST} (no capacity)",
    )
    assert host.starting is not None
    assert (host.lost, host.starting.reason) == (False, "no capacity")
    await asyncio.sleep(3600.0)
    assert [kind for kind in played.happened() if kind.startswith("Host")] == ["HostRequested", "HostNotStarted"]


@starting_fleet(TWO_TYPES, tick_s=10.0)
async def test_a_late_machine_is_not_waited_for(played: Played) -> None:
    """Without a reason of Ray's autoscaler, too, the other type is requested after some time. An event says why."""
    played.cluster.machine_s = 1e6
    await played.until(lambda: hosts(played) == {FIRST: "starting"}, "requested", 5.0)
    await asyncio.sleep(LEAST_LATE_S)
    played.cluster.machine_s = 5.0
    await played.until(lambda: len(played.ready("a")) == 1, "served", 60.0)
    late = [event for event in played.journal.events() if event.reason == "HostNotStarted"]
    assert [(event.host, event.message) for event in late] == [(FIRST, "no machine has joined within 900 s")]
    await played.until(lambda: hosts(played) == {SMALL: "ready"}, "withdrawn", 30.0)


@starting_fleet(SPEC)
async def test_a_lost_host_is_replaced(played: Played) -> None:
    """A machine is requested under the name of the lost one."""
    await played.settled()
    await played.cluster.lose(FIRST)
    await played.until(lambda: hosts(played) == {FIRST: "starting"}, "requested", 30.0)
    await played.until(lambda: len(played.ready("a")) == 1, "served", 60.0)
    kinds = [kind for kind in played.happened() if kind.startswith("Host")]
    assert kinds == ["HostLost", "HostJoined"]


@starting_fleet(SPEC)
async def test_the_replacement_of_a_host_that_ends_is_requested_at_its_notice(played: Played) -> None:
    """The ended host is released, and the fleet keeps its least number."""
    await played.settled()
    played.cluster.notices[FIRST] = Notice(cause="spot interruption", until=played.controller.state.wall() + 120.0)
    await played.until(lambda: hosts(played).get(SECOND) == "ready", "requested", 60.0)
    await played.until(lambda: [replica["host"] for replica in played.ready("a")] == [SECOND], "moved", 60.0)
    await played.cluster.lose(FIRST)
    del played.cluster.notices[FIRST]
    await played.until(lambda: hosts(played) == {SECOND: "ready"}, "released", 30.0)


@virtual
async def test_a_restarted_controller_continues_with_the_hosts_that_it_used(tmp_path: Path) -> None:
    """The hosts and the measured time of their start are in the journal."""
    cluster, journal = FakeCluster(), Journal(None, clock=asyncio.get_running_loop().time)
    async with Played(tmp_path, cluster, SPEC, journal=journal) as played:
        await scale(played, 2)
        await played.until(lambda: len(played.ready("a")) == 2, "served", 60.0)
    async with Played(tmp_path, cluster, SPEC, journal=journal, restarted=True) as played:
        await played.settled()
        assert hosts(played) == {FIRST: "ready", SECOND: "ready"}
        assert 4.0 < played.controller.state.uses.start_s("inf2.48xlarge") < 8.0
    assert cluster.violations == []


@pytest.mark.slow
@virtual
async def test_hosts_do_not_flap_in_a_day(tmp_path: Path) -> None:
    """Demand changes every ten minutes. Each request of a machine follows a change, and the number of hosts is always
    between `min` and `max`."""

    async def story(played: Played) -> None:
        rng, changes = random.Random(7), 0
        before = 1
        for _ in range(144):
            count = rng.randint(1, 4)
            changes += count > before
            before = count
            await scale(played, count)
            for _ in range(20):
                await asyncio.sleep(30.0)
                assert 1 <= len(hosts(played)) <= 3
            assert len(played.ready("a")) == min(3, count)
        requests = played.happened().count("HostRequested")
        assert 0 < requests <= 2 * changes

    cluster = FakeCluster()
    cluster.machine_s, cluster.load_s = 120.0, 20.0
    async with Played(tmp_path, cluster, SPEC, tick_s=15.0) as played:
        await story(played)
    assert cluster.violations == []


@given(st.data())
def test_chosen_hosts_are_within_the_bounds(data: st.DataObject) -> None:
    """Of any hosts in use, a spare one leaves at least `min` of its group; chosen ones are not in use, and with them no
    host is spare that holds what was missing."""
    bounds = [
        (low, low + data.draw(st.integers(0, 3)))
        for low in data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=2))
    ]
    types = ("inf2.48xlarge", "inf2.8xlarge")
    entries = "\n".join(
        f"  - {{emulate: {type}, min: {low}, max: {max(1, high)}, price_per_core_hour: {data.draw(st.integers(0, 3))}}}"
        for type, (low, high) in zip(types, bounds, strict=False)
    )
    count, degree = data.draw(st.integers(0, 6)), data.draw(st.sampled_from([2, 8, 24]))
    text = f"hosts:\n{entries}\nmodels:\n  a: {{engine: echo, tp_degree: {degree}, replicas: {{min: 0, max: 9}}}}\n"
    spec = parse(text, "s", "/").spec
    assert spec is not None
    every = hosts_for(spec, Machine((0, 1), joined=True))
    groups = host_groups(spec, every)
    used = frozenset(data.draw(st.sets(st.sampled_from([host.name for host in every]))))
    kept = kept_hosts(groups, used)
    present = tuple(host for host in kept if data.draw(st.booleans()))
    desired = DesiredModel(spec.models[0], count, "v")
    demand = HostDemand(Situation(spec, present, {}, {"a": desired}, ()), groups, frozenset(h.name for h in kept))
    choice = demand.choose()
    assert not {host.name for host in choice.hosts} & demand.used
    for group in groups:
        assert (
            group.min
            <= len(kept_hosts([group], demand.used | {host.name for host in choice.hosts}))
            <= len(group.hosts)
        )
    spare = demand.spare(choice.hosts)
    if spare is not None:
        rest = kept_hosts(groups, demand.used - {spare.name})
        assert {host.name for host in rest} == demand.used - {spare.name}
