"""Decides what the fleet should run now: from one snapshot to the goal, and what is recorded about it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

from orchestrator.control.decisions.preparation import Key, Preparation, preparation_of, takes_long, upcoming_targets
from orchestrator.control.decisions.relocation import Relocation, find_relocation
from orchestrator.control.decisions.replica_view import ReplicaView
from orchestrator.control.decisions.rollout_step import (
    Goal,
    ReplicaTarget,
    Situation,
    compute_goal,
    defer_displacements,
    merged,
)
from orchestrator.control.decisions.update_strategy import UpdateStrategy, choose_strategy
from orchestrator.control.journal.journal_records import Event
from placements.engines.registry import Engine
from placements.facts.plural import counted

RELOCATION_S = 60.0  # between two relocation attempts; and the limit of one, beside the starts


@dataclass(frozen=True)
class UpdateMemory:
    """What one decision leaves to the next."""

    strategies: Mapping[str, UpdateStrategy] = field(default_factory=lambda: MappingProxyType({}))  # of updated models
    holding: frozenset[str] = frozenset()  # models updated by `hold`, until they are settled
    lost_former: frozenset[str] = frozenset()  # models that have lost replicas of their former version
    relocation: Relocation | None = None  # in progress

    def with_strategy(self, model: str, strategy: UpdateStrategy) -> UpdateMemory:
        """Returns the memory in which the model is updated so."""
        holding = self.holding | {model} if strategy.strategy == "hold" else self.holding
        return replace(self, strategies={**self.strategies, model: strategy}, holding=holding)

    def without(self, models: Collection[str]) -> UpdateMemory:
        """Returns the memory in which no update of these models is in progress."""
        strategies = {name: strategy for name, strategy in self.strategies.items() if name not in models}
        return replace(self, strategies=strategies, holding=self.holding.difference(models))


@dataclass(frozen=True)
class FleetSnapshot:
    """Everything that a decision reads, at one time. Two snapshots with equal replicas and equal fields lead to the
    same decision; like those of a `Situation`, the replicas are not compared."""

    situation: Situation  # without the cores of a relocation
    memory: UpdateMemory
    engines: Mapping[str, Engine]  # by model
    preparations: Mapping[Key, Preparation]
    compiled_on: frozenset[Key]  # where a start has nothing to compile
    lost_hosts: frozenset[str]
    scaled: frozenset[str]  # models that an operator has scaled
    held: bool = False  # the newest revision is unknown: nothing is decided
    frozen: bool = False  # the rollout is paused, or has failed without a revision to restore
    in_canary: bool = False
    may_relocate: bool = True  # the last relocation began long enough ago
    relocation_late: bool = False  # the one in progress has taken too long

    def needs_preparation(self, target: ReplicaTarget) -> bool:
        """Returns whether the host is not prepared for the target. After a ready start only fetches can remain."""
        model, preparation = self.situation.spec.model(target.model), preparation_of(target, self.preparations)
        if model is None or preparation.done:
            return False
        return takes_long(model, self.engines[model.name]) or preparation.key not in self.compiled_on


@dataclass(frozen=True)
class FleetDecision:
    """What should run now."""

    goal: Goal
    after: FleetSnapshot  # the same fleet once this is recorded: deciding about it changes nothing
    upcoming: tuple[ReplicaTarget, ...] = ()  # they displace others once their hosts are prepared
    events: tuple[Event, ...] = ()
    moved: tuple[ReplicaView, ...] = ()  # replicas that a new relocation replaces elsewhere


def decide(snapshot: FleetSnapshot) -> FleetDecision:
    """Returns the decision about a snapshot.

    1. The goal, with the update strategies so far. A held fleet is not acted upon, and nothing else is decided.
    2. A model with old replicas gets a strategy, or another one if the next replica finds no place: the goal again.
    3. A settled model loses its strategy.
    4. Old replicas stay until the hosts of their successors are prepared; so do replicas that others displace.
    5. A warning if replicas of a former version were lost.
    6. A relocation ends when its cores are empty or it is late, and one begins for a replica that finds no contiguous
       cores. Either changes the cores: from 1.
    """
    decision = _Deciding(snapshot).decide()
    relocation = snapshot.memory.relocation
    while decision.after.memory.relocation != relocation:
        relocation = decision.after.memory.relocation
        again = _Deciding(decision.after).decide()
        events, moved = decision.events + again.events, decision.moved + again.moved
        decision = replace(again, events=events, moved=moved)
    return decision


class _Deciding:
    """One pass of a decision."""

    def __init__(self, snapshot: FleetSnapshot) -> None:
        self._snapshot = snapshot
        self._memory = snapshot.memory
        self._events: list[Event] = []

    @cached_property
    def _situation(self) -> Situation:
        """The situation with the cores of a relocation blocked."""
        situation, relocation = self._snapshot.situation, self._snapshot.memory.relocation
        return (
            situation if relocation is None else replace(situation, blocked=merged(situation.blocked, relocation.cores))
        )

    def decide(self) -> FleetDecision:
        """Returns the decision, without a second pass; the numbers are those of `decide`."""
        situation, goal = self._situation, compute_goal(self._situation)  # 1
        if self._snapshot.held:
            return FleetDecision(goal, self._snapshot)
        situation, goal = self._with_strategies(situation, goal)  # 2, 3
        goal, upcoming = self._awaiting_preparations(situation, goal)  # 4
        self._report_lost_replicas(goal)  # 5
        moved = self._relocate(situation, goal)  # 6
        return FleetDecision(goal, self._after(moved), upcoming, tuple(self._events), moved)

    def _after(self, moved: tuple[ReplicaView, ...]) -> FleetSnapshot:
        """Returns the snapshot with the memory of this decision, and what follows from it."""
        snapshot, strategies = self._snapshot, self._memory.strategies
        if self._memory == snapshot.memory:
            return snapshot
        desired_models = {
            name: desired
            if desired.strategy == (way := strategies[name].strategy if name in strategies else "surge")
            else replace(desired, strategy=way)
            for name, desired in snapshot.situation.desired_models.items()
        }
        situation = replace(
            snapshot.situation,
            desired_models=desired_models,
            replaced=snapshot.situation.replaced | {(view.id, view.epoch) for view in moved},
        )
        return replace(
            snapshot,
            situation=situation,
            memory=self._memory,
            may_relocate=snapshot.may_relocate and not moved,
            relocation_late=snapshot.relocation_late and self._memory.relocation is not None,
        )

    def _with_strategies(self, situation: Situation, goal: Goal) -> tuple[Situation, Goal]:
        before = self._memory.strategies
        undecided = [
            name
            for name, step in goal.steps.items()
            if step.old and not situation.evacuates(name) and self._needs_strategy(name, goal)
        ]
        for name in undecided:
            strategy = choose_strategy(situation, name, goal)
            if strategy != before.get(name):
                seconds = strategy.outage_s
                outage = "an outage of unknown length" if seconds is None else f"{seconds:.0f} s of outage"
                message = f"{strategy.strategy}, {outage}: {strategy.why}"
                self._events.append(Event(level="info", reason="UpdateStrategy", message=message, model=name))
            self._memory = self._memory.with_strategy(name, strategy)
        settled = {name for name, step in goal.steps.items() if step.settled(situation.desired_models[name])}
        self._memory = self._memory.without(settled | (self._memory.strategies.keys() - goal.steps.keys()))
        decided = situation
        for name in undecided:
            chosen, desired = self._memory.strategies.get(name), decided.desired_models[name]
            way = "surge" if chosen is None else chosen.strategy
            if way != desired.strategy:
                decided = decided.with_desired(replace(desired, strategy=way))
        return (situation, goal) if decided is situation else (decided, compute_goal(decided))

    def _needs_strategy(self, name: str, goal: Goal) -> bool:
        """Returns whether the model has no strategy, or one that cannot place the next replica."""
        strategy = self._memory.strategies.get(name)
        stuck = any(missing.model == name for missing in goal.plan.unplaced)
        return strategy is None or (stuck and strategy.strategy == "surge" and not self._snapshot.frozen)

    def _awaiting_preparations(self, situation: Situation, goal: Goal) -> tuple[Goal, tuple[ReplicaTarget, ...]]:
        """Returns the goal in which old replicas stay until the hosts of their successors are prepared, and these."""
        snapshot, awaited = self._snapshot, situation
        if snapshot.frozen:
            return goal, ()
        upcoming: tuple[ReplicaTarget, ...] = ()
        for name, step in goal.steps.items():
            strategy = self._memory.strategies.get(name)
            if not step.old or strategy is None or strategy.strategy == "surge" or situation.evacuates(name):
                continue
            missing = tuple(
                new
                for new in upcoming_targets(situation, goal, name)
                if not preparation_of(new, snapshot.preparations).done
            )
            if missing:
                upcoming += missing
                awaited = awaited.with_desired(replace(awaited.desired_models[name], awaited=True))
        if awaited is not situation:
            goal = compute_goal(awaited)
        planned = Counter(target.model for target in goal.targets)
        short = {name for name, desired in situation.desired_models.items() if planned[name] < desired.count}
        goal, waiting = defer_displacements(
            goal, situation.views, snapshot.needs_preparation, lambda view: self._may_stay(short, view)
        )
        return goal, upcoming + waiting

    def _may_stay(self, short: Collection[str], view: ReplicaView) -> bool:
        """Returns whether a displaced replica may continue: neither an operator nor the spec stops it.

        ``short`` has the models with fewer targets than desired.
        """
        snapshot, situation = self._snapshot, self._situation
        stopped = situation.spec.model(view.model) is None
        stopped = stopped or (view.model in snapshot.scaled and view.model not in short)
        drained = view.host in situation.drained or view.host in snapshot.lost_hosts
        return not stopped and not drained and (view.id, view.epoch) not in situation.replaced

    def _report_lost_replicas(self, goal: Goal) -> None:
        lost = {name: step.lost for name, step in goal.steps.items() if step.lost}
        for name in lost.keys() - self._memory.lost_former:
            unplaced = (group for group in goal.plan.unplaced if group.model == name)
            missing = [problem.what for group in unplaced for problem in group.problems]
            detail = f"no place is free, only the new version serves: {missing[0]}" if missing else "starting elsewhere"
            count = f"{counted(lost[name], 'replica')} of the former version"
            self._events.append(
                Event(level="warning", reason="FormerVersionLost", message=f"{count} lost: {detail}", model=name)
            )
        self._memory = replace(self._memory, lost_former=frozenset(lost))

    def _relocate(self, situation: Situation, goal: Goal) -> tuple[ReplicaView, ...]:
        """Ends or begins a relocation in the memory. Returns the replicas that one that begins moves."""
        snapshot, relocation = self._snapshot, self._memory.relocation
        if relocation is not None:
            if relocation.empty(situation.views) or snapshot.relocation_late or snapshot.frozen:
                self._memory = replace(self._memory, relocation=None)
            return ()
        if snapshot.frozen or snapshot.in_canary or not snapshot.may_relocate or not goal.plan.unplaced:
            return ()
        relocation = find_relocation(situation, goal)
        if relocation is None:
            return ()
        self._memory = replace(self._memory, relocation=relocation)
        message = f"it is moved to make room for {' and '.join(relocation.models)}"
        for view in relocation.moving:
            self._events.append(
                Event(
                    level="info",
                    reason="MakingRoom",
                    message=message,
                    model=view.model,
                    replica=view.id,
                    host=view.host,
                )
            )
        return relocation.moving
