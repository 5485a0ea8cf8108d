"""Computes which replicas should run now, one step of an update at a time. Pure.

A replica is *current* when it runs the desired version on cores where it may stay; otherwise it is *old*: it has an
earlier version, is on a host that is being drained, or has to be replaced. Old replicas stop as current ones start; the
strategy determines the order:

surge      one more current replica starts on free cores; once it is ready, an old one stops
in_place   an old replica stops and a current one takes its cores; one at a time
hold       as in_place; meanwhile requests wait instead of being rejected
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

from orchestrator.control.decisions.replica_view import ReplicaView
from orchestrator.messages.replica_states import LEAVING, State
from placements.facts.checkpoints import Checkpoint
from placements.facts.core_range import CoreRange
from placements.facts.topology import Host
from placements.planner.plan import Placement, Plan, Running, plan
from placements.spec.schema import ModelSpec, Spec
from placements.spec.sections import Strategy


@dataclass(frozen=True)
class ReplicaTarget:
    """A replica that should run, and where. ``placement`` is None for an old one, which keeps its configuration."""

    model: str
    replica: int
    host: str
    cores: CoreRange | None
    version: str
    placement: Placement | None = None

    @classmethod
    def old(cls, view: ReplicaView) -> ReplicaTarget:
        """Returns the target of an old replica that continues."""
        return cls(view.model, view.replica, view.host, view.cores, view.version)

    @cached_property
    def id(self) -> str:
        return f"{self.model}/{self.replica}"

    def overlaps(self, view: ReplicaView) -> bool:
        """Returns whether the replica is on some of the cores."""
        return self.host == view.host and view.touches(self.cores or ())


@dataclass(frozen=True)
class FormerVersion:
    """The last version whose rollout completed. During a canary or a frozen update, lost replicas restart in it."""

    model: ModelSpec
    version: str
    checkpoint: Checkpoint | None = None

    @property
    def renamed_model(self) -> ModelSpec:
        """A copy of the model with a distinct name, so that it can be planned beside the new version."""
        return self.model.model_copy(update={"name": f"{self.model.name} (former version)"})


@dataclass(frozen=True)
class DesiredModel:
    """The desired state of one model, and the update strategy that leads to it."""

    model: ModelSpec
    count: int
    version: str
    strategy: Strategy = "surge"  # never auto: it is resolved already
    mixes: bool = True  # both versions may serve at once, since their tokenizers are equal
    canary: bool = False  # only one current replica until the promotion
    reachable: bool = False  # limit the count to what can be placed: waiting for more would never end
    frozen: bool = False  # paused: no old replica stops and no current one starts
    awaited: bool = False  # old replicas stay until the artifacts of the current ones are on their hosts
    former: FormerVersion | None = None  # of a canary or a frozen update, if known


@dataclass(frozen=True)
class ModelStep:
    """The progress of one model's update, and its next step."""

    keep: tuple[ReplicaView, ...] = ()  # old replicas that continue to serve
    count: int = 0  # desired current replicas
    old: int = 0  # old replicas that still exist
    alive: int = 0  # existing current replicas
    ready: int = 0  # ready current replicas
    serves_old: bool = False  # requests go to old replicas only: the versions do not mix
    lost: int = 0  # old replicas that were lost and restart elsewhere in the former version

    def settled(self, desired: DesiredModel) -> bool:
        """Returns whether the update is finished."""
        return self.old == 0 and self.ready >= desired.count


@dataclass(frozen=True)
class Goal:
    """The desired state now: the replicas, the plan of the current ones, and the step of each model."""

    targets: tuple[ReplicaTarget, ...] = ()
    plan: Plan = field(default_factory=Plan)
    steps: Mapping[str, ModelStep] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class StepCase:
    """What the next step of one model depends on.

    ``leaving`` counts old replicas that drain or stop already. ``evacuates``: old replicas only leave their hosts, and
    stay until successors serve elsewhere. ``urgent``: a host with old replicas ends soon.
    """

    desired: DesiredModel
    current: Sequence[ReplicaView]
    old: Sequence[ReplicaView]
    leaving: int = 0
    evacuates: bool = False
    urgent: bool = False

    @property
    def wanted(self) -> int:
        return self.desired.count

    @property
    def alive(self) -> int:
        return len(self.current)

    @property
    def ready(self) -> int:
        return sum(view.state is State.READY for view in self.current)

    @property
    def missing(self) -> int:
        """The replicas that the old ones leave to current ones."""
        return self.wanted - len(self.old)

    @property
    def spare(self) -> int:
        """The replicas that may be absent during an update: one with in_place, none with surge."""
        return 0 if self.desired.strategy == "surge" or self.evacuates else 1

    @property
    def waits(self) -> bool:
        """True while the versions of the replicas must not change: paused, or hosts are prepared for new ones."""
        return self.desired.frozen or (self.desired.awaited and self.desired.strategy != "surge")

    @property
    def restores(self) -> bool:
        """True if lost old replicas restart in the former version."""
        frozen = self.desired.frozen and (bool(self.old) or not self.ready)
        return self.desired.former is not None and (self.desired.canary or frozen)

    @property
    def canaries(self) -> int:
        """The current replicas of a canary whose former version is known: one, or while it waits, one that exists."""
        return min(self.wanted, self.alive if self.waits else 1, 1)

    @property
    def canary_keeps(self) -> int:
        """The replicas of the former version beside such a canary: at least one."""
        return max(self.wanted - self.spare * self.canaries, min(self.wanted, 1))

    @property
    def unfailed(self) -> int:
        """The current replicas that serve or will."""
        return sum(view.state is not State.FAILED for view in self.current)


@dataclass(frozen=True)
class StepRow:
    """A row of the table of steps: when it applies, how many old replicas stay, and how many current ones are desired.

    ``lost`` is the number of old replicas that restart in the former version, and ``serves_old`` whether requests go to
    old replicas only; both by the case and the number of replicas that stay.
    """

    number: int
    when: str
    applies: Callable[[StepCase], bool]
    stay: Callable[[StepCase], int]
    count: Callable[[StepCase], int]
    lost: Callable[[StepCase, int], int] = lambda case, kept: 0
    serves_old: Callable[[StepCase, int], bool] = lambda case, kept: False


STEPS: tuple[StepRow, ...] = (
    StepRow(
        1,
        "no replica is old, and none has to be restored",
        lambda case: not case.old and not case.restores,
        stay=lambda case: 0,
        count=lambda case: case.wanted,
    ),
    StepRow(
        2,
        "a canary, and its former version is known",
        lambda case: case.desired.canary and case.restores,
        stay=lambda case: case.canary_keeps,
        count=lambda case: case.canaries,
        lost=lambda case, kept: case.canary_keeps - kept,
    ),
    StepRow(
        3,
        "a paused update, and its former version is known",
        lambda case: case.waits and case.restores,
        stay=lambda case: case.wanted - case.ready,
        count=lambda case: case.alive,
        lost=lambda case, kept: max(0, case.wanted - kept - case.unfailed),
        serves_old=lambda case, kept: not case.desired.mixes,
    ),
    StepRow(
        4,
        "a paused update, or hosts are being prepared",
        lambda case: case.waits,
        stay=lambda case: case.wanted - case.ready,
        count=lambda case: max(case.alive, case.missing),
        serves_old=lambda case, kept: not case.desired.mixes,
    ),
    StepRow(
        5,
        "a canary without a known former version",
        lambda case: case.desired.canary,
        stay=lambda case: case.wanted - case.spare,
        count=lambda case: max(1, case.missing),
    ),
    StepRow(
        6,
        "the versions cannot serve together",
        lambda case: not case.desired.mixes,
        stay=lambda case: case.wanted if case.spare == 0 and case.ready < case.wanted else 0,
        count=lambda case: case.wanted,
        serves_old=lambda case, kept: kept > 0,
    ),
    StepRow(
        7,
        "a host with old replicas ends soon",
        lambda case: case.urgent,
        stay=lambda case: case.wanted - case.ready - case.spare,
        count=lambda case: case.wanted,
    ),
    StepRow(
        8,
        "any other update",
        lambda case: True,
        stay=lambda case: case.wanted - case.ready - case.spare,
        count=lambda case: max(case.alive, case.ready + 1, case.missing),
    ),
)
"""The next step of an update: the first row that applies counts. docs/updates.md has the same rows."""


def step(case: StepCase) -> ModelStep:
    """Returns the next step of one model by `STEPS`. Of old replicas, those that serve stay first."""
    row = next(row for row in STEPS if row.applies(case))
    best_first = sorted(case.old, key=lambda view: (view.state is not State.READY, view.replica))
    keep = tuple(best_first[: max(0, row.stay(case))])
    return ModelStep(
        keep,
        count=min(case.wanted, row.count(case)),
        old=len(case.old) + case.leaving,
        alive=case.alive,
        ready=case.ready,
        serves_old=row.serves_old(case, len(keep)),
        lost=row.lost(case, len(keep)),
    )


def defer_displacements(
    goal: Goal,
    views: Sequence[ReplicaView],
    lacking: Callable[[ReplicaTarget], bool],
    stays: Callable[[ReplicaView], bool],
) -> tuple[Goal, tuple[ReplicaTarget, ...]]:
    """Keeps serving replicas until the artifacts of the replicas that displace them are on their hosts.

    ``lacking`` returns whether the host of a new replica lacks artifacts, ``stays`` whether an unplanned replica may
    continue. Returns the goal and the targets that have to wait. Cores that at least one new replica takes at once are
    released for all.
    """
    late = {target.id: target for target in new_targets(goal, views) if lacking(target)}
    if not late:
        return goal, ()
    target_ids = {target.id for target in goal.targets}
    staying: list[ReplicaTarget] = []
    waiting: dict[str, ReplicaTarget] = {}
    for view in views:
        if view.state is State.READY and view.id not in target_ids and stays(view):
            takers = [target for target in goal.targets if target.overlaps(view)]
            if takers and all(target.id in late for target in takers):
                staying.append(ReplicaTarget.old(view))
                waiting.update((target.id, target) for target in takers)
    targets = (*(target for target in goal.targets if target.id not in waiting), *staying)
    return replace(goal, targets=targets), tuple(waiting.values())


def new_targets(
    goal: Goal, views: Iterable[ReplicaView], replaced: frozenset[tuple[str, int]] = frozenset()
) -> list[ReplicaTarget]:
    """Returns the targets that need a new process; ``replaced`` has the (id, epoch) of processes that do not count."""
    existing = {
        view.id: (view.host, view.cores, view.version)
        for view in views
        if view.state not in LEAVING and (view.id, view.epoch) not in replaced
    }
    return [
        target
        for target in goal.targets
        if target.placement is not None and existing.get(target.id) != (target.host, target.cores, target.version)
    ]


@dataclass(frozen=True)
class Situation:
    """The input of `compute_goal`.

    ``hosts`` are the hosts that are up. By host, ``blocked`` are the cores where no replica may be placed, ``drained``
    the cores whose replicas have to move, and ``held`` the models whose artifacts are there. ``replaced`` has the
    (id, epoch) of replicas that need a new process. ``leaving`` are hosts that end at a known time, and ``ending`` the
    (id, epoch) of replicas there that cannot stay any longer. Situations are compared without ``views``, of which there
    are thousands: `ReplicaViews.changes` says whether these are the same.
    """

    spec: Spec
    hosts: tuple[Host, ...]
    checkpoints: Mapping[str, Checkpoint]
    desired_models: Mapping[str, DesiredModel]
    views: tuple[ReplicaView, ...] = field(compare=False)
    blocked: Mapping[str, frozenset[int]] = field(default_factory=lambda: MappingProxyType({}))
    drained: Mapping[str, frozenset[int]] = field(default_factory=lambda: MappingProxyType({}))
    replaced: frozenset[tuple[str, int]] = frozenset()
    held: Mapping[str, frozenset[str]] = field(default_factory=lambda: MappingProxyType({}))
    leaving: frozenset[str] = frozenset()
    ending: frozenset[tuple[str, int]] = frozenset()

    def evacuates(self, model: str) -> bool:
        """Returns whether the model's old replicas only have to leave their hosts: to stop one before its successor
        serves would free no core."""
        if self.urgent(model):
            return True
        if not self.drained:
            return False
        desired, moves = self.desired_models[model], False
        for view in self._of_model.get(model, ()):
            if view.gone:
                continue
            if view.touches(self.drained.get(view.host, frozenset())):
                moves = True
            elif view.version != desired.version or (view.id, view.epoch) in self.replaced:
                return False
        return moves

    def urgent(self, model: str) -> bool:
        """Returns whether replicas of the model have to move before their host ends."""
        if not self.leaving:
            return False
        return any(view.host in self.leaving and not view.gone for view in self._of_model.get(model, ()))

    def with_desired(self, desired: DesiredModel) -> Situation:
        """Returns a copy in which ``desired`` replaces the desired state of its model."""
        return replace(self, desired_models={**self.desired_models, desired.model.name: desired})

    def load_s(self, model: str) -> float | None:
        """Returns how long the last start of a replica of the model took, in seconds; None if none was ready yet."""
        times = [view.load_s for view in self._of_model.get(model, ()) if view.load_s is not None]
        return max(times, default=None)

    @cached_property
    def _of_model(self) -> dict[str, list[ReplicaView]]:
        """The replicas by model."""
        by_model: dict[str, list[ReplicaView]] = {}
        for view in self.views:
            by_model.setdefault(view.model, []).append(view)
        return by_model


@dataclass(frozen=True)
class _ReplicaGroups:
    """The replicas of each model, classified as current, old or leaving."""

    current: dict[str, list[ReplicaView]]
    old: dict[str, list[ReplicaView]]
    leaving: dict[str, int]  # number of old replicas that drain or stop already
    evacuated: frozenset[str]  # models
    urgent: frozenset[str]  # models

    def step(self, desired: DesiredModel) -> ModelStep:
        name = desired.model.name
        evacuates, urgent = name in self.evacuated, name in self.urgent
        return step(StepCase(desired, self.current[name], self.old[name], self.leaving[name], evacuates, urgent))


def compute_goal(situation: Situation, moves: int = 0, costs: Mapping[str, float] | None = None) -> Goal:
    """Returns the replicas that should run now; with ``moves``, those possible if so many running replicas may move.

    Old replicas are kept up to the desired count; for a ``reachable`` model, up to the count that can be placed.
    ``moves`` and ``costs`` are passed to `placements.planner.plan.plan`.
    """
    desired_models = situation.desired_models
    replicas = _group_replicas(situation)
    steps = {name: replicas.step(desired) for name, desired in desired_models.items()}
    new_plan = _plan(situation, replicas, steps, moves, costs)
    waiting = {unplaced.model for unplaced in new_plan.unplaced}
    stuck = [
        name
        for name in waiting - replicas.evacuated  # which serve where they are until the last moment
        if desired_models[name].reachable and steps[name].keep
    ]
    if stuck:  # the count that fits once all old replicas are gone; if that is 0, only the old ones can serve
        ends = {name: ModelStep(count=desired.count) for name, desired in desired_models.items()}
        most = Counter(placement.model for placement in _plan(situation, replicas, ends, moves, costs).placements)
        steps |= {name: replicas.step(replace(desired_models[name], count=most[name])) for name in stuck if most[name]}
        new_plan = _plan(situation, replicas, steps, moves, costs)
    restored = [placed for placed in new_plan.placements if placed.model not in desired_models]
    new_plan = replace(
        new_plan, placements=tuple(placed for placed in new_plan.placements if placed.model in desired_models)
    )
    targets = [
        ReplicaTarget(p.model, p.replica, p.host, p.cores, desired_models[p.model].version, p)
        for p in new_plan.placements
    ]
    for model_step in steps.values():
        targets += map(ReplicaTarget.old, model_step.keep)
    targets += _restored_targets(situation, restored, targets)
    return Goal(tuple(targets), new_plan, MappingProxyType(steps))


def _restored_targets(
    situation: Situation, restored: Sequence[Placement], other_targets: Iterable[ReplicaTarget]
) -> list[ReplicaTarget]:
    """Returns targets of the former version, with unused replica numbers."""
    if not restored:
        return []
    formers = {
        desired.former.renamed_model.name: desired.former
        for desired in situation.desired_models.values()
        if desired.former is not None
    }
    used = {view.id for view in situation.views} | {target.id for target in other_targets}
    targets = []
    for placement in restored:
        former = formers[placement.model]
        name = former.model.name
        number = next(n for n in itertools.count() if f"{name}/{n}" not in used)
        used.add(f"{name}/{number}")
        placement = replace(placement, model=name, replica=number)
        targets.append(ReplicaTarget(name, number, placement.host, placement.cores, former.version, placement))
    return targets


def _group_replicas(situation: Situation) -> _ReplicaGroups:
    desired_models = situation.desired_models
    names = {host.name for host in situation.hosts}
    current: dict[str, list[ReplicaView]] = {name: [] for name in desired_models}
    old: dict[str, list[ReplicaView]] = {name: [] for name in desired_models}
    leaving: dict[str, int] = dict.fromkeys(desired_models, 0)
    for view in situation.views:
        desired = desired_models.get(view.model)
        if desired is None:
            continue
        is_old = (
            view.version != desired.version
            or (view.id, view.epoch) in situation.replaced
            or view.touches(situation.drained.get(view.host, frozenset()))
        )
        if view.state in LEAVING or view.host not in names or (view.id, view.epoch) in situation.ending:
            leaving[view.model] += is_old and not view.gone
        elif view.state is State.FAILED and view.touches(situation.blocked.get(view.host, frozenset())):
            continue  # it is placed elsewhere
        elif is_old:
            old[view.model].append(view)
        else:
            current[view.model].append(view)
    for name, desired in desired_models.items():
        pinned_elsewhere = {view.id for view in _misplaced(desired, current[name])}
        if pinned_elsewhere:
            old[name] += [view for view in current[name] if view.id in pinned_elsewhere]
            current[name] = [view for view in current[name] if view.id not in pinned_elsewhere]
    evacuated, urgent = (frozenset(filter(test, desired_models)) for test in (situation.evacuates, situation.urgent))
    return _ReplicaGroups(current, old, leaving, evacuated, urgent)


def _plan(
    situation: Situation,
    replicas: _ReplicaGroups,
    steps: Mapping[str, ModelStep],
    moves: int,
    costs: Mapping[str, float] | None,
) -> Plan:
    """Returns a plan of the current replicas of the steps, beside the old replicas that they keep."""
    desired_models, blocked = situation.desired_models, situation.blocked
    counts = {name: model_step.count for name, model_step in steps.items()}
    kept_cores = cores_by_host(view for kept in steps.values() for view in kept.keep)
    running = [
        Running(view.model, view.replica, view.host, view.cores)
        for views_of_one in replicas.current.values()
        for view in views_of_one
    ]
    occupied = merged(blocked, kept_cores)
    numbered = {
        name: frozenset(view.replica for view in model_step.keep)
        for name, model_step in steps.items()
        if model_step.keep
    }
    spec, checkpoints = situation.spec, dict(situation.checkpoints)
    formers = [
        (desired.former, steps[name].lost)
        for name, desired in desired_models.items()
        if desired.former and steps[name].lost
    ]
    for former, lost in formers:
        spec = spec.model_copy(update={"models": (former.renamed_model, *spec.models)})
        counts[former.renamed_model.name] = lost
        if former.checkpoint is not None:
            checkpoints[former.renamed_model.name] = former.checkpoint
    new_plan = plan(
        spec,
        situation.hosts,
        checkpoints,
        running,
        counts,
        occupied,
        numbered,
        moves=moves,
        costs=costs,
        held=situation.held,
    )
    names = {former.renamed_model.name: former.model.name for former, _ in formers}
    unplaced = tuple(replace(missing, model=names.get(missing.model, missing.model)) for missing in new_plan.unplaced)
    return replace(new_plan, unplaced=unplaced)


def _misplaced(desired: DesiredModel, current: Sequence[ReplicaView]) -> list[ReplicaView]:
    """Returns the replicas that are on none of the model's pins, if it has a pin for each replica."""
    pins = desired.model.cores
    if not pins or desired.count > len(pins):
        return []
    return [
        view
        for view in current
        if view.cores is not None and not any(pin.cores == view.cores and pin.host in (None, view.host) for pin in pins)
    ]


def cores_by_host(replicas: Iterable[ReplicaView | Placement]) -> dict[str, frozenset[int]]:
    """Returns the cores of all these replicas."""
    cores: dict[str, set[int]] = {}
    for replica in replicas:
        cores.setdefault(replica.host, set()).update(replica.cores or ())
    return {host: frozenset(some) for host, some in cores.items()}


def merged(*cores: Mapping[str, frozenset[int]]) -> dict[str, frozenset[int]]:
    """Returns the union of these cores by host."""
    union: dict[str, frozenset[int]] = {}
    for by_host in cores:
        for host, some in by_host.items():
            union[host] = union.get(host, frozenset()) | some
    return union
