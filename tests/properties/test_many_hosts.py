"""A hundred hosts on a virtual clock: whatever their machines, processes and operators do, cores add up.

The controller's own code on `VirtualCluster`. Each event draws from a seed, which a failure prints. With
PYTHONHASHSEED=0, too, a run repeats.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from orchestrator.api.schemas import OperationRefused
from orchestrator.control.decisions.reconcile import reconcile
from orchestrator.control.decisions.replica_view import Observed
from orchestrator.control.fleet_goal import update_goal
from orchestrator.control.host_conditions import replicas_replaced
from orchestrator.messages.replica_states import State
from tests.orchestrator import virtual_cluster
from tests.orchestrator.fakes import Played, virtual, virtually
from tests.orchestrator.virtual_cluster import TailJournal, VirtualCluster, VirtualReplica

SEED = int(os.environ.get("SEED", "8"))
LOAD_S = 7.0
HEAD = "version: 1\nname: fleet\nhosts: {{emulate: inf2.48xlarge, count: {hosts}}}\n"
CORES = 24
HOUR_S = 3600.0
MONTH_S = 730 * HOUR_S
REPAIR_S = 4 * HOUR_S  # mean
NOTICED_S = 60.0  # after this a lost host is known
REPAIRED_S = 600.0  # until all replicas serve again, elsewhere


FULL = HEAD.format(hosts=4) + "defaults: {engine: echo}\nmodels:\n  mid: {tp_degree: 8, replicas: 12}\n"
"""Needs all cores of four hosts."""


def specs(hosts: int) -> list[str]:
    """Returns specs that fill most of the hosts: with large replicas, with mixed ones, and with one for each core."""
    head = HEAD.format(hosts=hosts)
    models = [
        {"large": (24, hosts // 4), "mid": (8, hosts)},
        {"large": (24, hosts // 5), "mid": (8, hosts), "small": (2, 2 * hosts)},
        {"mid": (8, hosts // 2), "small": (1, 6 * hosts), "tiny": (1, 6 * hosts)},
        dict.fromkeys(("small", "tiny", "least"), (1, 8 * hosts)),  # a model has at most 1,000 replicas
    ]
    return [
        f"{head}defaults: {{engine: echo, max_batch: {batch}, update: {{progress_deadline_s: 300}}}}\nmodels:\n"
        + "".join(
            f"  {name}: {{tp_degree: {cores}, replicas: {count}, priority: {cores}}}\n"
            for name, (cores, count) in rows.items()
        )
        for batch, rows in enumerate(models, 1)
    ]


class World:
    """A fleet on many hosts, and what befalls it."""

    def __init__(self, home: Path, hosts: int, rng: random.Random, texts: list[str], tick_s: float = 5.0) -> None:
        self.home = home
        self.hosts = [f"inf2.48xlarge/{index}" for index in range(hosts)]
        self.rng = rng
        self.texts = texts
        self.tick_s = tick_s
        self.cluster = VirtualCluster(self.hosts, rng)
        self.cluster.load_s, self.cluster.drain_s = LOAD_S, 3.0
        self.journal = TailJournal(asyncio.get_running_loop().time)
        self.played = self._controller(restarted=False)

    def _controller(self, *, restarted: bool) -> Played:
        return Played(
            self.home, self.cluster, self.texts[0], journal=self.journal, tick_s=self.tick_s, restarted=restarted
        )

    # What is checked after each event

    def check(self) -> None:
        assert self.cluster.violations == []
        state = self.played.controller.state
        for host in state.hosts:
            leased = [core for view in state.views.of_host(host.name) if not view.gone for core in view.cores or ()]
            assert len(leased) == len(set(leased)), f"{host.name}: cores are leased twice"
        for name, actor in self.cluster.actors.items():
            view = state.views.get(f"{actor.config.model.name}/{actor.config.place.replica}")
            assert view is not None, f"{name} is leaked"
            assert view.epoch == actor.config.run.epoch, f"{name} is leaked"

    def check_status(self) -> None:
        """The cores of each host add up, as the status counts them."""
        for host in self.played.controller.status().hosts:
            assert host.balanced, host
            assert sum(host.cores_by_state.values()) == host.cores, host

    async def settle(self) -> None:
        """Everything is repaired; soon nothing is left to do, and each process is one that the plan has."""
        cluster = self.cluster
        cluster.slow_starts = 0
        for host in self.hosts:
            await cluster.come_back(host)
            await cluster.answer(host)
        for host in self.played.controller.state.records.state.cordons:
            await self.played.operator.cordon(host, None, False, "tester")
        state = self.played.controller.state
        if self.played.operator.rollout().state in ("paused", "failed"):
            await self.played.operator.resume("tester")
        for _ in range(60):
            await asyncio.sleep(120.0)
            self.check()
            if self._is_at_rest():
                break
        goal = await update_goal(state)
        assert reconcile(goal.targets, Observed(state.clock(), dict(state.views)), replicas_replaced(state)) == []
        assert {view.state for view in state.views.values()} <= {State.READY}
        assert {(view.id, view.version) for view in state.views.values()} == {(t.id, t.version) for t in goal.targets}
        assert {replica.name for replica in cluster.processes()} == {view.actor for view in state.views.values()}
        assert state.lost == frozenset()
        self.check_status()

    def _is_at_rest(self) -> bool:
        state = self.played.controller.state
        ready = all(view.state is State.READY for view in state.views.values())
        planned = {target.id for target in state.goal.targets}
        return ready and planned == set(state.views) and state.outcome is not None and not state.lost

    # What befalls it

    async def befall(self, kind: str) -> None:
        """One event; an operator may be refused."""
        with contextlib.suppress(OperationRefused):
            await getattr(self, f"_{kind}")()

    def _host(self) -> str:
        return self.rng.choice(self.hosts)

    def _replica(self) -> VirtualReplica | None:
        living = [actor for actor in self.cluster.actors.values() if actor.runs and actor.dead is None]
        return self.rng.choice(living) if living else None

    async def _lose_power(self) -> None:
        host = self._host()
        if self.cluster.machines[host].linked:
            await self.cluster.cut_off(host, power=True)

    async def _cut_off(self) -> None:
        host = self._host()
        if self.cluster.machines[host].linked:
            await self.cluster.cut_off(host)

    async def _come_back(self) -> None:
        away = [host for host, machine in self.cluster.machines.items() if not machine.linked]
        if away:
            await self.cluster.come_back(self.rng.choice(away), lingers_s=self.rng.choice([1.0, 8.0, 60.0]))

    async def _fall_silent(self) -> None:
        self.cluster.machines[self._host()].silent = True

    async def _answer(self) -> None:
        for host in self.hosts:
            await self.cluster.answer(host)

    async def _kill(self) -> None:
        if (replica := self._replica()) is not None:
            await self.cluster.die(replica, "killed by signal 9")

    async def _hang(self) -> None:
        if (replica := self._replica()) is not None:
            replica.hangs = True

    async def _slow_start(self) -> None:
        self.cluster.slow_starts += 1
        await self._kill()

    async def _restart_controller(self, *, lose_tail: bool = False) -> None:
        await self.played.kill()
        if lose_tail:
            self.journal.lose_tail()
        self.played = self._controller(restarted=True)
        await self.played.__aenter__()
        await self.played.controller.settled()

    async def _restart_without_tail(self) -> None:
        await self._restart_controller(lose_tail=True)

    async def _apply(self) -> None:
        await self.played.apply(self.rng.choice(self.texts))

    async def _scale(self) -> None:
        model = self.rng.choice(self.played.controller.state.current.spec.models)
        count = self.rng.choice([None, 1, model.replicas.max // 2, model.replicas.max])
        await self.played.operator.scale(model.name, count, "tester")

    async def _drain(self) -> None:
        await self.played.operator.drain(self._host(), "tester")

    async def _cordon(self) -> None:
        cores = self.rng.choice(["0-7", "4", None])
        await self.played.operator.cordon(self._host(), cores, True, "tester")

    async def _uncordon(self) -> None:
        for host in self.played.controller.state.records.state.cordons:
            await self.played.operator.cordon(host, None, False, "tester")


WEIGHTS = {
    "lose_power": 6,
    "cut_off": 10,
    "come_back": 20,
    "fall_silent": 3,
    "answer": 3,
    "kill": 12,
    "hang": 6,
    "slow_start": 4,
    "restart_controller": 3,
    "restart_without_tail": 3,
    "apply": 2,
    "scale": 3,
    "drain": 4,
    "cordon": 4,
    "uncordon": 4,
}


def chaos(
    home: Path,
    hosts: int,
    events: int,
    settle_each: int,
    texts: list[str],
    report: Callable[[str], None] = lambda progress: None,
) -> Counter[str]:
    """Runs random events on a virtual fleet, with all checks. Returns how often each happened."""
    rng, began = random.Random(SEED), time.monotonic()

    async def live() -> Counter[str]:
        happened: Counter[str] = Counter()
        world = World(home, hosts, rng, texts)
        async with world.played:
            await world.played.settled()
            for number in range(1, events + 1):
                (kind,) = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
                happened[kind] += 1
                try:
                    await world.befall(kind)
                    world.check()
                    await asyncio.sleep(rng.expovariate(1 / 8.0))
                    world.check()
                    if number % settle_each == 0:
                        await world.settle()
                        count = len(world.played.controller.state.views)
                        seconds = time.monotonic() - began
                        report(f"event {number} of {events} after {seconds:.0f} s, {count} replicas, SEED={SEED}")
                except AssertionError as error:
                    raise AssertionError(f"SEED={SEED}, event {number}, {kind}: {error}") from error
            await world.settle()
            await world.played.kill()
        return happened

    return virtually(live)


def test_through_random_faults_of_hosts_no_core_is_held_twice_or_leaked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Eight hosts lose power and links, come back with what they ran before, are drained; controllers die."""
    caplog.set_level(logging.CRITICAL)
    happened = chaos(tmp_path, hosts=8, events=300, settle_each=60, texts=specs(8)[:2])
    assert happened.keys() == WEIGHTS.keys()


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_ten_thousand_faults_of_a_hundred_hosts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """As above, with up to 2,400 replicas, though most of the time with fewer: that costs the most. EVENTS sets another
    number."""
    caplog.set_level(logging.CRITICAL)
    events = int(os.environ.get("EVENTS", "10000"))
    large, mixed, small, least = specs(100)

    def report(progress: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"{progress}\n")
            sys.stdout.flush()

    texts = [large] * 5 + [mixed] * 5 + [small, least]
    happened = chaos(tmp_path, hosts=100, events=events, settle_each=250, texts=texts, report=report)
    assert sum(happened.values()) == events


@virtual
async def test_a_host_that_is_lost_and_back_between_two_rounds_starts_nothing_beside_its_old_processes(
    tmp_path: Path,
) -> None:
    """No round has seen the loss. The old processes hold their cores for a minute, as on a machine that was cut off."""
    world = World(tmp_path, 4, random.Random(SEED), [FULL])
    async with world.played:
        await world.played.settled()
        host = world.hosts[1]
        await world.cluster.cut_off(host)
        await world.cluster._declare_dead(host)
        await world.cluster.come_back(host, lingers_s=600.0)
        await world.settle()
        await world.played.kill()


@virtual
async def test_a_new_controller_starts_nothing_on_a_host_that_has_not_reported_its_processes(tmp_path: Path) -> None:
    """The host was lost and is back, and what it ran still holds its cores. Its host actor does not reply."""
    world = World(tmp_path, 4, random.Random(SEED), [FULL])
    async with world.played:
        await world.played.settled()
        host = world.hosts[1]
        await world.cluster.cut_off(host)
        await asyncio.sleep(NOTICED_S)
        world.cluster.answer = partial(asyncio.sleep, 0)  # type: ignore[method-assign]  # its actor does not start
        await world.cluster.come_back(host, lingers_s=600.0)
        await world._restart_controller()
        await asyncio.sleep(NOTICED_S)
        world.check()
        del world.cluster.answer
        await world.cluster.answer(host)
        await asyncio.sleep(600.0)
        await world.settle()
        await world.played.kill()


def months(home: Path, hosts: int, count: int) -> Counter[str]:
    """Fails each host once in each month, by power or link, for some hours; all replicas serve again minutes later.
    Returns how often hosts failed in each way."""
    rng = random.Random(SEED)
    text = HEAD.format(hosts=hosts) + "defaults: {engine: echo}\nmodels:\n"
    text += f"  large: {{tp_degree: 24, replicas: {hosts // 4}, priority: 2}}\n"
    text += f"  mid: {{tp_degree: 8, replicas: {hosts * 3 // 2}}}\n"
    times = [(MONTH_S * (month + rng.random()), host) for month in range(count) for host in range(hosts)]

    async def live() -> Counter[str]:
        happened: Counter[str] = Counter()
        world = World(home, hosts, rng, [text], tick_s=HOUR_S)
        async with world.played:
            await world.played.settled()
            for number, (at, index) in enumerate(sorted(times), 1):
                await asyncio.sleep(at - asyncio.get_running_loop().time())
                host, power = world.hosts[index], rng.random() < 0.5
                if not world.cluster.machines[host].linked:
                    continue
                happened["power" if power else "link"] += 1
                await world.cluster.cut_off(host, power=power)
                world.cluster._later(rng.expovariate(1 / REPAIR_S), partial(world.cluster.come_back, host))
                try:
                    await asyncio.sleep(NOTICED_S)
                    await world.played.settled(REPAIRED_S)
                    world.check()
                except AssertionError as error:
                    raise AssertionError(f"SEED={SEED}, failure {number}, of {host}: {error}") from error
            await world.settle()
            await world.played.kill()
        return happened

    return virtually(live)


@pytest.fixture
def rare_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas report changes, and otherwise once a day: reports each minute would be most of the work of a year."""
    monkeypatch.setattr(virtual_cluster, "REPORT_S", 24 * HOUR_S)


@pytest.mark.usefixtures("rare_reports")
def test_after_each_failure_of_a_host_its_replicas_serve_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Eight hosts, each of which fails once in a month."""
    caplog.set_level(logging.CRITICAL)
    assert sum(months(tmp_path, hosts=8, count=1).values()) > 0


@pytest.mark.soak
@pytest.mark.usefixtures("rare_reports")
def test_a_year_with_a_failure_of_each_host_in_each_month(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As above, with 100 hosts and 175 replicas, for a year of virtual time."""
    caplog.set_level(logging.CRITICAL)
    assert sum(months(tmp_path, hosts=100, count=12).values()) > 1100
