"""Whatever happens to a fleet: no core is held twice, the cores add up, and in the end it is as the spec says.

The controller's own code on a fake cluster with a virtual clock; every check fails when the code is broken by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from orchestrator.api.schemas import OperationRefused
from orchestrator.control import fleet_goal
from orchestrator.control.decisions.decide import FleetDecision, FleetSnapshot, decide
from orchestrator.control.decisions.reconcile import reconcile
from orchestrator.control.decisions.replica_view import Observed
from orchestrator.control.fleet_goal import update_goal
from orchestrator.control.host_conditions import replicas_replaced
from orchestrator.control.journal.journal import Journal
from orchestrator.control.journal.journal_fold import failed_cores
from orchestrator.messages.replica_states import State
from orchestrator.scaling.demand_report import DemandReport, DemandWindow
from tests.orchestrator.elsewhere import forbid_remote_sources
from tests.orchestrator.fakes import FakeCluster, Played, virtual, virtually
from tests.searches import search
from workers.messages.status import Failure, Phase, Reaction

HOSTS = 2
LOAD_S = 7.0
FETCH_S = 40.0

SPECS = [
    f"""\
version: 1
name: fleet
hosts: {{emulate: inf2.48xlarge, count: {HOSTS}}}
defaults: {{engine: echo, max_batch: {batch}, update: {{progress_deadline_s: 300, strategy: {strategy}}}}}
models:
  big: {{engine: cpu, source: s3://models/{source}, tp_degree: {big}, replicas: {{min: 1, max: 3}}, priority: 5}}
  small: {{tp_degree: 2, replicas: {small}}}
{extra}"""
    for batch, strategy, source, big, small, extra in [
        (4, "auto", "one", 8, 3, ""),
        (8, "auto", "one", 8, 3, "  asleep: {replicas: {min: 0, max: 2}}\n"),
        (4, "in_place", "two", 12, 2, ""),
        (4, "auto", "one", 8, 5, '  pinned: {tp_degree: 4, cores: ["inf2.48xlarge/1:20-23"]}\n'),
        (16, "hold", "two", 8, 4, ""),
        (2, "auto", "three", 24, 4, ""),
    ]
]
BROKEN_BATCH = 16  # replicas of the specs with this batch may be made unable to start

events = st.one_of(
    st.tuples(st.just("apply"), st.integers(0, len(SPECS) - 1)),
    st.tuples(st.just("undo")),
    st.tuples(st.just("kill"), st.integers(0, 20)),
    *(
        st.tuples(st.just("fault"), st.integers(0, 20), st.just(reaction), st.sets(st.integers(0, 11)))
        for reaction in Reaction
    ),
    st.tuples(st.just("kill_controller")),
    st.tuples(st.just("scale"), st.sampled_from(["big", "small"]), st.integers(0, 3)),
    st.tuples(st.just("unscale"), st.sampled_from(["big", "small"])),
    st.tuples(st.just("cordon"), st.integers(0, HOSTS - 1), st.sampled_from(["0-7", "4", None]), st.booleans()),
    st.tuples(st.just("drain_host"), st.integers(0, HOSTS - 1)),
    st.tuples(st.just("drain_replica"), st.integers(0, 20)),
    st.tuples(st.just("restart"), st.sampled_from(["big", "small"])),
    st.tuples(st.just("take_core"), st.integers(0, 23)),
    st.tuples(st.just("free_cores")),
    st.tuples(st.just("lose_host"), st.integers(0, HOSTS - 1)),
    st.tuples(st.just("host_back")),
    st.tuples(st.just("break_loads"), st.booleans()),
    st.tuples(st.just("break_source"), st.sampled_from(["one", "two"]), st.booleans()),
    st.tuples(st.just("new_content"), st.sampled_from(["one", "two"]), st.integers(2, 4)),
    st.tuples(st.just("lose_store"), st.integers(0, HOSTS - 1)),
    st.tuples(st.just("pause")),
    st.tuples(st.just("resume")),
    st.tuples(st.just("wake")),
    st.tuples(st.just("demand"), st.sampled_from(["big", "small", "asleep"]), st.integers(0, 60), st.integers(1, 90)),
    st.tuples(st.just("canary"), st.integers(0, len(SPECS) - 1)),
    st.tuples(st.just("promote")),
    st.tuples(st.just("wait"), st.integers(1, 60)),
)


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        forbid_remote_sources(patch, tmp_path_factory.mktemp("home"))
        patch.setattr(fleet_goal, "decide", decided_once)
        yield


def decided_once(snapshot: FleetSnapshot) -> FleetDecision:
    """Returns the decision, after checking that to decide about its outcome changes and records nothing."""
    decision = decide(snapshot)
    again = decide(decision.after)
    assert (again.goal, again.upcoming, again.after, again.events, again.moved) == (
        decision.goal,
        decision.upcoming,
        decision.after,
        (),
        (),
    )
    return decision


class World:
    """A fleet, and what befalls it."""

    def __init__(self, home: Path, tick_s: float = 1.0) -> None:
        self.home = home
        self.tick_s = tick_s
        self.reports = 0
        self.cluster = FakeCluster()
        self.cluster.load_s, self.cluster.fetch_s = LOAD_S, FETCH_S
        self.cluster.drain_s = 3.0
        self.journal = Journal(None, clock=asyncio.get_running_loop().time)
        self.played = self._controller()

    def _controller(self) -> Played:
        return Played(self.home, self.cluster, SPECS[0], journal=self.journal, tick_s=self.tick_s)

    async def befall(self, event: tuple[Any, ...]) -> None:
        """One event; an operator may be refused."""
        with contextlib.suppress(OperationRefused):
            await getattr(self, f"_{event[0]}")(*event[1:])
        self.check()

    def check(self) -> None:
        """What holds at every moment."""
        assert self.cluster.violations == []
        for host in self.played.controller.status().hosts:
            assert sum(host.cores_by_state.values()) == host.cores, host
        noted = {
            (failed_core.host, failed_core.core): failed_core.at for failed_core in failed_cores(self.journal.state())
        }
        for view in self.played.controller.state.views.values():
            since = [noted[view.host, core] for core in view.cores or () if (view.host, core) in noted]
            ends = view.state in (State.FAILED, State.STOPPING)
            assert ends or view.begun < min(since, default=math.inf), f"{view.id} was started on a broken device"
            if view.state is State.READY and view.host not in self.cluster.lost_now:
                assert f"{view.id}.{view.epoch}" in self.cluster.replicas

    async def settle(self) -> None:
        """Everything foreign is taken back; after a while nothing is left to do."""
        self.cluster.held.clear()
        self.cluster.broken.clear()
        self.cluster.unfetchable.clear()
        self.cluster.loads = True
        self.cluster.lost_now.clear()
        for host in range(HOSTS):
            await self._cordon(host, None, False)
        if self.played.operator.rollout().state in ("paused", "failed"):
            await self.played.operator.resume("tester")
        if self.played.controller.state.in_canary:
            await self.played.operator.promote("tester")
        await asyncio.sleep(700.0)
        for model in {view.model for view in self.played.controller.state.views.values() if view.stopped}:
            with contextlib.suppress(OperationRefused):  # no longer of the spec
                await self.played.operator.restart(model, "tester")
        for _ in range(12):
            await asyncio.sleep(700.0)
            self.check()
        state = self.played.controller.state
        goal = await update_goal(state)
        observed = Observed(state.clock(), dict(state.views))
        assert reconcile(goal.targets, observed, replicas_replaced(state)) == []
        assert {view.state for view in state.views.values()} <= {State.READY}
        assert {(view.id, view.version) for view in state.views.values()} == {(t.id, t.version) for t in goal.targets}
        assert {t.version for t in goal.targets} <= set(state.current.versions.values())
        living = {f"{r.config.model.name}/{r.config.place.replica}.{r.config.run.epoch}" for r in self.cluster.living()}
        assert living == {f"{view.id}.{view.epoch}" for view in state.views.values()}
        assert self.cluster.fetching == []

    async def _apply(self, number: int) -> None:
        await self.played.apply(SPECS[number])

    async def _canary(self, number: int) -> None:
        await self.played.apply(SPECS[number], canary=0.5)

    async def _promote(self) -> None:
        await self.played.operator.promote("tester")

    async def _undo(self) -> None:
        await self.played.operator.undo(None, "tester")

    async def _kill(self, number: int) -> None:
        living = self.cluster.living()
        if living:
            await living[number % len(living)].die("killed by signal 9")

    async def _fault(self, number: int, reaction: Reaction, devices: set[int]) -> None:
        await asyncio.sleep(0.5)  # so that nothing starts at that very moment by itself
        living = self.cluster.living()
        if living:
            failure = Failure("device-failed", "it is broken", reaction=reaction, devices=tuple(devices))
            await living[number % len(living)].report(phase=Phase.FAILED, failure=failure)

    async def _kill_controller(self) -> None:
        await self.played.kill()
        self.played = self._controller()
        await self.played.__aenter__()
        await self.played.controller.change(0, 60.0)

    async def _scale(self, model: str, count: int) -> None:
        await self.played.operator.scale(model, count, "tester")

    async def _unscale(self, model: str) -> None:
        await self.played.operator.scale(model, None, "tester")

    async def _cordon(self, host: int, cores: str | None, on: bool) -> None:
        await self.played.operator.cordon(f"inf2.48xlarge/{host}", cores, on, "tester")

    async def _drain_host(self, host: int) -> None:
        await self.played.operator.drain(f"inf2.48xlarge/{host}", "tester")

    async def _drain_replica(self, number: int) -> None:
        ids = sorted(self.played.controller.state.views)
        if ids:
            await self.played.operator.drain(ids[number % len(ids)], "tester")

    async def _restart(self, model: str) -> None:
        await self.played.operator.restart(model, "tester")

    async def _take_core(self, core: int) -> None:
        ours = {
            core for r in self.cluster.living() for core in r.config.place.cores if r.config.place.host.endswith("/0")
        }
        if core not in ours:
            self.cluster.held[core] = 7  # no pid of a replica, however many starts there were

    async def _free_cores(self) -> None:
        self.cluster.held.clear()

    async def _lose_host(self, host: int) -> None:
        await self.cluster.lose(f"inf2.48xlarge/{host}")

    async def _host_back(self) -> None:
        self.cluster.lost_now.clear()

    async def _break_loads(self, broken: bool) -> None:
        self.cluster.broken.clear()
        if broken:
            versions = {
                r.config.run.version for r in self.cluster.replicas.values() if r.config.model.max_batch == BROKEN_BATCH
            }
            self.cluster.broken.update(dict.fromkeys(versions, Failure("engine-failed", "it is broken")))

    async def _break_source(self, name: str, broken: bool) -> None:
        self.cluster.unfetchable.pop(f"s3://models/{name}", None)
        if broken:
            self.cluster.unfetchable[f"s3://models/{name}"] = Failure("s3-denied", "no s3:GetObject")

    async def _new_content(self, name: str, content: int) -> None:
        self.cluster.contents[f"s3://models/{name}"] = str(content)

    async def _lose_store(self, host: int) -> None:
        if all(view.state is State.READY for view in self.played.controller.state.views.values()):
            self.cluster.store.pop(f"inf2.48xlarge/{host}", None)  # else it is in use

    async def _pause(self) -> None:
        await self.played.operator.pause("tester")

    async def _resume(self) -> None:
        await self.played.operator.resume("tester")

    async def _wake(self) -> None:
        if self.played.controller.state.current.spec.model("asleep") is not None:
            await self.played.controller.wake("asleep")

    async def _demand(self, model: str, waiting: int, seconds: int) -> None:
        """Requests wait, as a gateway reports each second."""
        for _ in range(seconds):
            await asyncio.sleep(1.0)
            demand = DemandWindow(model=model, arrived=waiting // 4, waiting=waiting, live=4, ended=1, slot_s=5.0)
            self.reports += 1
            report = DemandReport(gateway="g", number=self.reports, seconds=1.0, models=[demand])
            await self.played.controller.demand(report)
            self.played.controller.wake_up()

    async def _wait(self, seconds: int) -> None:
        await asyncio.sleep(seconds)


@search(12, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(events, max_size=14))
@example([("take_core", 8), ("wait", 1)])  # between the decision to start and the start
@example([("apply", 2), ("wait", 1), ("apply", 5), ("scale", "big", 3)])  # old ones waited for ever for a third's place
def test_after_any_sequence_of_events_the_fleet_is_as_the_spec_says(story: list[tuple[Any, ...]]) -> None:
    """Applies, kills, drains, cordons, lost hosts, taken cores, controllers that die: it converges, by the rules."""

    async def live() -> None:
        with tempfile.TemporaryDirectory() as home:
            world = World(Path(home), tick_s=30.0)
            async with world.played:
                await world.played.controller.change(0, 60.0)
                for event in story:
                    await world.befall(event)
                await world.settle()
                await world.played.kill()

    virtually(live)


@search(12)
@given(
    replicas=st.integers(1, 4),
    load_s=st.floats(0.1, 50),
    drain_s=st.floats(0, 50),
    strategy=st.sampled_from(["surge", "in_place"]),
    mixes=st.just(True),
)
def test_an_update_never_serves_with_fewer_replicas_than_it_promised(
    replicas: int, load_s: float, drain_s: float, strategy: str, mixes: bool
) -> None:
    """Surge promises all of them at every moment, in place all but one."""
    text = (
        "version: 1\nhosts: {{emulate: inf2.48xlarge}}\nmodels:\n"
        "  m: {{engine: echo, tp_degree: 2, replicas: {n}, max_batch: {batch}, update: {{strategy: {strategy}}}}}\n"
    )

    async def live() -> None:
        cluster = FakeCluster()
        cluster.load_s, cluster.drain_s = load_s, drain_s
        with tempfile.TemporaryDirectory() as home:
            first = text.format(n=replicas, batch=2, strategy=strategy)
            async with Played(Path(home), cluster, first) as played:
                await played.settled()
                await played.apply(text.format(n=replicas, batch=4, strategy=strategy))
                seen, fewest = 0, replicas
                while not played.is_settled():
                    seen = await played.controller.change(seen, 5.0)
                    routed = len(played.controller.routes().models[0].replicas)
                    fewest = min(fewest, routed, len(played.ready("m")))
                assert fewest >= (replicas if strategy == "surge" else replicas - 1)
                assert cluster.violations == []

    virtually(live)


mishaps = st.one_of(
    st.tuples(st.just("lose_host"), st.integers(0, HOSTS - 1)),
    st.tuples(st.just("host_back")),
    st.tuples(st.just("kill"), st.integers(0, 20)),
    st.tuples(st.just("kill_controller")),
    st.tuples(st.just("scale"), st.just("small"), st.integers(1, 3)),
    st.tuples(st.just("pause")),
    st.tuples(st.just("resume")),
    st.tuples(st.just("cordon"), st.integers(0, HOSTS - 1), st.just(None), st.booleans()),
    st.tuples(st.just("wait"), st.integers(1, 60)),
)


@search(4, cost=3, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(mishaps, max_size=8))
@example([("lose_host", 0)])
@example([("lose_host", 1)])
@example([("lose_host", 0), ("lose_host", 1), ("wait", 9), ("host_back",)])
@example([("pause",), ("lose_host", 0), ("lose_host", 1), ("host_back",)])
def test_whatever_a_canary_loses_the_old_version_stays_or_comes_back(story: list[tuple[Any, ...]]) -> None:
    """Hosts, processes and controllers go, someone scales: there is one canary, the others are of the old version."""

    async def live() -> None:
        with tempfile.TemporaryDirectory() as home:
            world = World(Path(home), tick_s=30.0)
            async with world.played:
                await world.played.settled()
                old = dict(world.played.controller.state.current.versions)
                await world.befall(("canary", 1))
                await asyncio.sleep(120.0)
                for event in story:
                    await world.befall(event)
                await world.befall(("host_back",))
                for host in range(HOSTS):
                    await world.befall(("cordon", host, None, False))
                await world.befall(("resume",))
                await asyncio.sleep(1500.0)
                state = world.played.controller.state
                assert state.in_canary
                for model in ("big", "small"):
                    ready = [view.version for view in state.views.of_model(model) if view.state is State.READY]
                    spec = state.current.spec.model(model)
                    assert spec is not None
                    assert ready.count(state.current.versions[model]) == 1
                    others = len(ready) - 1  # in place, the canary stands for one of them
                    assert ready.count(old[model]) == others >= max(1, state.counts.desired(spec) - 1)
                await world.played.kill()

    virtually(live)


@virtual
async def test_a_controller_killed_at_any_record_of_an_apply_leaves_the_old_or_the_new_revision() -> None:
    """The journal is cut after each of its records, and at bytes between: what comes up runs one text, whole."""
    with tempfile.TemporaryDirectory() as folder:
        home, path = Path(folder), Path(folder) / "journal"
        journal = Journal(path)
        cluster = FakeCluster()
        async with Played(home, cluster, SPECS[0], journal=journal) as played:
            await played.settled()
            before = path.stat().st_size
            await played.apply(SPECS[3])
            await played.settled()
        journal.close()
        data = path.read_bytes()
        ends = [i + 1 for i in range(before, len(data)) if data[i : i + 1] == b"\n"]
        cuts = sorted({before, *ends, *(end - 7 for end in ends)})
        for cut in cuts:
            path.write_bytes(data[:cut])
            again = Journal(path)
            fresh = FakeCluster()
            async with Played(home, fresh, SPECS[0], journal=again) as second:
                await second.settled()
                text = second.controller.state.current.revision.text
                assert text in (SPECS[0], SPECS[3])
                models = {replica.config.model.name for replica in fresh.living()}
                assert models == ({"big", "small"} if text == SPECS[0] else {"big", "small", "pinned"})
                assert fresh.violations == []
            again.close()


def items_in(root: object) -> int:
    """The items of all collections that an object of the product holds, itself or through others of the product."""
    items, seen, unread = 0, set[int](), [root]
    while unread:
        value = unread.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Collection) and not isinstance(value, str | bytes):
            items += len(value)
            unread += value.values() if isinstance(value, Mapping) else value
        elif type(value).__module__.startswith("orchestrator."):
            unread += getattr(value, "__dict__", {}).values()
            unread += [getattr(value, name) for name in getattr(value, "__struct_fields__", ())]
    return items


@pytest.mark.slow
def test_through_a_year_of_events_the_fleet_settles_each_week(caplog: pytest.LogCaptureFixture) -> None:
    """One event an hour for 365 days, of every kind; what the controller keeps of them does not grow. It takes six
    minutes on one core."""
    kept: list[int] = []  # after each week

    async def live() -> int:
        rng = random.Random(4)
        with tempfile.TemporaryDirectory() as home:
            world = World(Path(home), tick_s=3600.0)
            async with world.played:
                await world.played.controller.change(0, 60.0)
                hours = 365 * 24
                for hour in range(hours):
                    await world.befall(_drawn(rng))
                    await asyncio.sleep(3600.0 - asyncio.get_running_loop().time() % 3600.0)
                    if hour % (24 * 7) == 0:
                        await world.settle()
                        kept.append(items_in(world.played.controller))
                await world.settle()
                await world.played.kill()
                return hours

    caplog.set_level(logging.CRITICAL)  # a year's log would take longer than the year
    assert virtually(live) == 8760
    assert max(kept[-10:]) < 1.1 * max(kept[10:20])  # by then the journal keeps its most events


KINDS = [
    "apply",
    "undo",
    "kill",
    "kill",
    "fault",
    "kill_controller",
    "scale",
    "unscale",
    "cordon",
    "drain_host",
    "drain_replica",
    "restart",
    "take_core",
    "free_cores",
    "lose_host",
    "host_back",
    "host_back",
    "break_loads",
    "break_source",
    "new_content",
    "lose_store",
    "pause",
    "resume",
    "resume",
    "wake",
    "demand",
    "canary",
    "promote",
    "wait",
]


def _drawn(rng: random.Random) -> tuple[Any, ...]:
    kind = rng.choice(KINDS)
    number, model = rng.randrange(20), rng.choice(["big", "small"])
    arguments: dict[str, tuple[Any, ...]] = {
        "apply": (number % len(SPECS),),
        "canary": (number % len(SPECS),),
        "kill": (number,),
        "fault": (number, tuple(Reaction)[number % 4], {number % 3}),
        "scale": (model, number % 4),
        "unscale": (model,),
        "restart": (model,),
        "cordon": (number % HOSTS, rng.choice(["0-7", "4", None]), rng.random() < 0.4),
        "drain_host": (number % HOSTS,),
        "drain_replica": (number,),
        "take_core": (rng.randrange(24),),
        "lose_host": (number % HOSTS,),
        "break_loads": (rng.random() < 0.5,),
        "break_source": (rng.choice(["one", "two"]), rng.random() < 0.5),
        "new_content": (rng.choice(["one", "two"]), number),
        "lose_store": (number % HOSTS,),
        "demand": (model, 3 * number, 1 + number),
        "wait": (number,),
    }
    return kind, *arguments.get(kind, ())
