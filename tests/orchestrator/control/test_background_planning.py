"""The controller plans beside its event loop, and does not act upon a plan that has become wrong meanwhile."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from orchestrator.control import fleet_goal
from orchestrator.control.decisions import decide as decisions
from orchestrator.control.decisions import rollout_step
from orchestrator.control.decisions.decide import FleetDecision, FleetSnapshot, decide
from orchestrator.control.decisions.rollout_step import Goal, Situation, compute_goal
from orchestrator.messages.replica_states import State
from placements.planner.plan import plan
from tests.orchestrator import virtual_cluster
from tests.orchestrator.fakes import FakeCluster, Played, virtual
from tests.orchestrator.virtual_cluster import VirtualCluster
from workers.messages.status import Failure, Phase, Reaction

DEADLINE_S = 20.0
SPEC = """\
version: 1
hosts: {emulate: inf2.48xlarge}
models:
  m: {engine: echo, tp_degree: %d, max_batch: %d, replicas: {min: %d, max: 2}}
"""


def test_the_loop_goes_on_while_a_plan_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, planned = threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        begun.set()
        assert planned.wait(DEADLINE_S), "the event loop waited for the plan"
        return compute_goal(*args)

    async def main() -> None:
        async with Played(tmp_path, FakeCluster(), SPEC % (2, 4, 1), in_thread=asyncio.to_thread) as played:
            await played.settled(DEADLINE_S)
            monkeypatch.setattr(decisions, "compute_goal", slow)
            played.controller.wake_up()
            assert await asyncio.to_thread(begun.wait, DEADLINE_S)
            assert [len(model.replicas) for model in played.controller.routes().models] == [1]
            planned.set()
            await played.settled(DEADLINE_S)

    asyncio.run(main())


class Interrupted:
    """Runs each function at once; while the first plan is made for which ``due`` holds, ``event`` happens."""

    def __init__(self, due: Callable[[Situation], bool], event: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.due, self.event, self.happened = due, event, False

    async def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        result = function(*args)
        if function is decide and not self.happened and self.due(args[0].situation):
            self.happened = True
            await self.event()
            for _ in range(9):
                await asyncio.sleep(0)
        return result


@virtual
async def test_cores_that_fail_while_a_plan_is_made_are_not_used(tmp_path: Path) -> None:
    """The other core of the device was free when the plan began."""
    cluster = FakeCluster()
    cluster.load_s = 100.0

    async def fail() -> None:
        failure = Failure("device-failed", "it is broken", reaction=Reaction.QUARANTINE)
        await cluster.find("m/0").report(phase=Phase.FAILED, failure=failure)

    thread = Interrupted(lambda situation: situation.desired_models["m"].count == 2, fail)
    async with Played(tmp_path, cluster, SPEC % (1, 4, 1), in_thread=thread) as played:
        await played.until(lambda: played.replica("m/0").get("state") == "loading", "it loads")
        await played.operator.scale("m", 2, "tester")
        await played.settled()
    assert thread.happened
    assert not {0, 1} & {core for config in cluster.started[1:] for core in config.place.cores}


@virtual
async def test_the_old_replica_stays_if_the_new_one_fails_while_its_end_is_planned(tmp_path: Path) -> None:
    cluster = FakeCluster()

    def ready(situation: Situation) -> bool:
        return [view.state for view in situation.views] == [State.READY, State.READY]

    async def fail() -> None:
        await next(replica for replica in cluster.living() if replica.config is cluster.started[1]).die("killed")

    thread = Interrupted(ready, fail)
    async with Played(tmp_path, cluster, SPEC % (2, 4, 1), in_thread=thread) as played:
        await played.settled()
        await played.apply(SPEC % (2, 8, 1))
        await played.until(lambda: thread.happened, "both were ready")
        await played.until(lambda: len(cluster.started) == 3, "the new one starts again")
        assert cluster.drained == []
        await played.settled()


@virtual
async def test_a_fleet_at_rest_is_not_planned_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports of replicas change their views, but nothing that a plan depends on; the death of one does."""
    planned: list[Situation] = []

    def counted(situation: Situation) -> Goal:
        planned.append(situation)
        return compute_goal(situation)

    monkeypatch.setattr(decisions, "compute_goal", counted)
    monkeypatch.setattr(virtual_cluster, "REPORT_S", 5.0)
    cluster = VirtualCluster(["inf2.48xlarge/0"], random.Random(1))
    async with Played(tmp_path, cluster, SPEC % (2, 4, 1)) as played:
        await played.settled()
        await asyncio.sleep(5.0)
        heard, _ = played.controller.state.views["m/0"].heard, planned.clear()
        await asyncio.sleep(60.0)
        assert (played.controller.state.views["m/0"].heard > heard, planned) == (True, [])
        (replica,) = cluster.actors.values()
        await cluster.die(replica, "killed by signal 9")
        await played.until(lambda: planned, "planned", DEADLINE_S)
        await played.kill()


@virtual
async def test_the_round_after_an_apply_carries_out_the_decision_of_its_preview(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It decides anew only when something has changed, here the end of the rollout."""
    decided: list[FleetSnapshot] = []

    def noted(snapshot: FleetSnapshot) -> FleetDecision:
        decided.append(snapshot)
        return decide(snapshot)

    async with Played(tmp_path, FakeCluster(), SPEC % (2, 4, 1)) as played:
        await played.settled()
        await asyncio.sleep(5.0)
        monkeypatch.setattr(fleet_goal, "decide", noted)
        applied = await played.apply((SPEC % (2, 4, 1)).replace("engine: echo", "engine: echo, max_queue: 7"))
        await asyncio.sleep(5.0)
        assert applied["changed"]
        assert [snapshot.situation.desired_models["m"].reachable for snapshot in decided] == [True]


@virtual
async def test_an_apply_plans_the_next_step_and_the_end_of_its_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once each, for an update by surge: the plan of the snapshot answers whether the new replica finds a place."""
    plans: list[Any] = []

    def noted(*args: Any, **fields: Any) -> Any:
        plans.append(args)
        return plan(*args, **fields)

    async with Played(tmp_path, FakeCluster(), SPEC % (2, 4, 1)) as played:
        await played.settled()
        await asyncio.sleep(5.0)
        monkeypatch.setattr(rollout_step, "plan", noted)
        applied = await played.apply(SPEC % (2, 8, 1))
        assert applied["changed"]
        assert len(plans) == 2
