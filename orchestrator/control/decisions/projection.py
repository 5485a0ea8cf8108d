"""Follows a decision to the end of its rollout: which replicas start, stop, restart and move. Pure.

Every start succeeds and takes as long as the last one of its model, stops take no time, preparations little, and the
load stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from orchestrator.control.decisions.decide import FleetDecision, FleetSnapshot, decide
from orchestrator.control.decisions.preparation import Key, Preparation, preparation_of
from orchestrator.control.decisions.reconcile import matches
from orchestrator.control.decisions.relocation import placement_of
from orchestrator.control.decisions.replica_view import ReplicaView
from orchestrator.control.decisions.rollout_step import ReplicaTarget, Situation
from orchestrator.messages.replica_states import LEAVING, STARTING, State
from placements.facts.topology import Host
from placements.planner.plan import Move, Plan, Running

PREPARATION_S = 1.0  # less than a start, and more than a stop
UNKNOWN_LOAD_S = 60.0  # of a model that was never ready
MAX_DECISIONS = 128
"""The most decisions that are followed, about one for each replica of an update. Old replicas that then remain count as
restarted on their cores."""

MAX_PLANNED_REPLICAS = 50_000
"""The most replicas in all decisions together, which bounds the time on large fleets: 20 decisions with 2,400 replicas,
each of some 50 ms."""


@dataclass(frozen=True)
class Projection:
    """The fleet at the end of a rollout, and the replicas before it."""

    before: tuple[ReplicaView, ...]
    after: FleetSnapshot
    last: FleetDecision  # nothing but starts and stops follows from it

    @property
    def situation(self) -> Situation:
        return self.after.situation

    @cached_property
    def plan(self) -> Plan:
        """The plan of the end, with the old replicas that stay, and with the moves since the beginning."""
        situation, planned = self.situation, self.last.goal.plan
        machines = {host.name: host for host in situation.hosts}
        staying = []
        for target in self.last.goal.targets:
            model = situation.spec.model(target.model)
            if target.placement is None and model is not None:
                running = Running(target.model, target.replica, target.host, target.cores)
                staying.append(placement_of(running, machines[target.host], model))
        placements = (*planned.placements, *staying)
        places = {(placement.model, placement.replica): placement for placement in placements}
        moved = [view for view in self.before if self._changes.get(view.id) == "move" and view.cores is not None]
        moves = tuple(
            Move(Running(view.model, view.replica, view.host, view.cores), places[view.model, view.replica])
            for view in moved
        )
        return replace(planned, placements=placements, moves=moves)

    @property
    def changes(self) -> list[dict[str, str]]:
        """An entry for each replica that starts, stops, moves, or restarts on the same cores."""
        return [{"replica": id, "change": change} for id, change in self._changes.items()]

    @cached_property
    def _changes(self) -> dict[str, Literal["start", "stop", "move", "restart"]]:
        before = {view.id: view for view in self.before if view.state not in LEAVING}
        changes: dict[str, Literal["start", "stop", "move", "restart"]] = {}
        for view in self.situation.views:
            earlier = before.pop(view.id, None)
            if earlier is None:
                changes[view.id] = "start"
            elif (earlier.host, earlier.cores) != (view.host, view.cores):
                changes[view.id] = "move"
            elif earlier.epoch != view.epoch:
                changes[view.id] = "restart"
        return changes | dict.fromkeys(before, "stop")

    def on_hosts(self, hosts: tuple[Host, ...]) -> Projection:
        """Returns the projection that continues on these hosts."""
        if set(hosts) == set(self.situation.hosts):
            return self
        situation = replace(self.situation, hosts=hosts)
        return replace(project(decide(replace(self.after, situation=situation))), before=self.before)


def project(decision: FleetDecision) -> Projection:
    """Returns the fleet at the end of the rollout that a decision begins.

    1. Replicas that the decision does not plan stop, and those that it plans start, with a decision before those that
       have to wait. The end, if no later decision can differ.
    2. The hosts of awaited replicas are prepared; if none is awaited, the next replicas that have started become ready.
    3. If neither happens, time passes: a relocation ends, and another one may begin. The end, if nothing waits for it.
    4. The next decision: from 1.
    """
    before = decision.after.situation.views
    now, ready_at = 0.0, dict[tuple[str, int], float]()
    first_epoch = 1 + max((view.epoch for view in before), default=0)
    end_epoch = first_epoch + min(MAX_DECISIONS, 1 + MAX_PLANNED_REPLICAS // max(1, len(before)))
    for epoch in range(first_epoch, end_epoch):
        running = decision.after.situation.views
        views, waits = _carried_out(decision, epoch)  # 1
        after = _with_views(decision.after, views)
        if not waits and _is_last(decision):
            return Projection(before, after, decision)
        starting = [view for view in views if view.state in STARTING]
        for view in starting:
            load_s = after.situation.load_s(view.model)
            ready_at.setdefault((view.id, view.epoch), now + (UNKNOWN_LOAD_S if load_s is None else load_s))
        begun = {view.id for view in starting if view.epoch == epoch}
        awaited = [target for target in decision.upcoming if target.id not in begun]
        if not waits and awaited:  # 2
            now += PREPARATION_S
            after = replace(after, preparations=_prepared(awaited, after.preparations))
        elif not waits and starting:
            now = max(now, min(ready_at[view.id, view.epoch] for view in starting))
            ready = {view.id for view in starting if ready_at[view.id, view.epoch] <= now}
            views = tuple(replace(view, state=State.READY) if view.id in ready else view for view in views)
            after = _with_views(after, views)
        elif views == running:
            moving = after.memory.relocation is not None
            if not moving and (after.may_relocate or not decision.goal.plan.unplaced):
                return Projection(before, after, decision)
            after = replace(after, may_relocate=True, relocation_late=moving)  # 3
        decision = decide(after)  # 4
    return Projection(before, *_restarted(decision, end_epoch))


def _carried_out(decision: FleetDecision, epoch: int) -> tuple[tuple[ReplicaView, ...], bool]:
    """Returns the replicas after the decision, those that it starts with this epoch; and whether other starts wait.

    A start waits until its cores are free, and if its own replica stops, until that is forgotten.
    """
    situation, targets = decision.after.situation, {target.id: target for target in decision.goal.targets}
    staying, leaving = [], []
    for view in situation.views:
        target = targets.get(view.id)
        if target is None or view.state in LEAVING or not matches(view, target, situation.replaced):
            leaving.append(view if view.state in LEAVING else replace(view, state=State.STOPPING))
            continue
        del targets[view.id]
        again = view.state is State.FAILED and target.placement is not None
        staying.append(replace(view, state=State.LOADING) if again else view)
    ids = {view.id for view in leaving}
    at_once = [target for id, target in targets.items() if id not in ids and not any(map(target.overlaps, leaving))]
    if at_once and len(at_once) < len(targets):
        return (*staying, *_started(at_once, situation, epoch), *leaving), True
    next_ = [target for id, target in targets.items() if id not in ids] or list(targets.values())
    return (*staying, *_started(next_, situation, epoch)), len(next_) < len(targets)


def _started(targets: Iterable[ReplicaTarget], situation: Situation, epoch: int) -> Iterator[ReplicaView]:
    for target in targets:
        yield ReplicaView(
            model=target.model,
            replica=target.replica,
            epoch=epoch,
            host=target.host,
            cores=target.cores,
            state=State.LOADING,
            since=0.0,
            version=target.version,
            load_s=situation.load_s(target.model),
        )


def _restarted(decision: FleetDecision, epoch: int) -> tuple[FleetSnapshot, FleetDecision]:
    """Returns the end if every old replica that is left restarts where it is."""
    situation = decision.after.situation
    versions = {name: desired.version for name, desired in situation.desired_models.items()}
    current = tuple(
        view if view.version == versions[view.model] else replace(view, version=versions[view.model], epoch=epoch)
        for view in situation.views
        if view.model in versions
    )
    last = decide(_with_views(decision.after, current))
    return _with_views(last.after, _carried_out(last, epoch)[0]), last


def _with_views(snapshot: FleetSnapshot, views: tuple[ReplicaView, ...]) -> FleetSnapshot:
    return replace(snapshot, situation=replace(snapshot.situation, views=views))


def _prepared(awaited: Iterable[ReplicaTarget], known: Mapping[Key, Preparation]) -> Mapping[Key, Preparation]:
    """Returns the preparations once those of the awaited replicas are done, too."""
    done = (replace(preparation_of(target, known), done=True) for target in awaited)
    return {**known, **{preparation.key: preparation for preparation in done}}


def _is_last(decision: FleetDecision) -> bool:
    """Returns whether the next decisions have the same targets: all replicas are current ones, and each has a place."""
    goal, desired_models = decision.goal, decision.after.situation.desired_models
    if decision.upcoming or goal.plan.unplaced or decision.after.memory.relocation is not None:
        return False
    return all(
        not step.keep and not step.lost and step.count == desired_models[name].count
        for name, step in goal.steps.items()
    )
