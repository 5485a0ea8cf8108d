"""From what is wished to which replicas should be now, one step of an update at a time. Pure.

A replica is *current* when it runs the wished version in a place that is still meant for it; else it is *old*: of an
earlier version, on a host that is being drained, or told to be replaced. Old ones go as current ones come; how is the
strategy's business:

surge      a current one more, on free cores; when it is ready an old one goes
in_place   an old one goes, and a current one takes its cores; one at a time
hold       as in_place; requests wait meanwhile instead of being refused
borrow     an idle replica of another model gives way, and then as surge; it comes back on the cores that become free
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from orchestrator.fleet.lifecycle import State
from orchestrator.fleet.snapshot import ReplicaView
from placements.facts.checkpoints import Checkpoint
from placements.facts.core_range import CoreRange
from placements.facts.topology import Host
from placements.planner.plan import Placement, Plan, Running, plan
from placements.spec.schema import ModelSpec, Spec, Strategy

_ENDING = (State.DRAINING, State.STOPPING)


@dataclass(frozen=True)
class ReplicaTarget:
    """A replica that should be, and where. ``placement`` is None for an old one, which stays as it was started."""

    model: str
    replica: int
    host: str
    cores: CoreRange | None
    version: str
    placement: Placement | None = None

    @property
    def id(self) -> str:
        return f"{self.model}/{self.replica}"


@dataclass(frozen=True)
class Former:
    """The version that was complete last: to it the lost replicas of a canary return, and of an update that stands
    still."""

    model: ModelSpec
    version: str
    checkpoint: Checkpoint | None = None

    @property
    def apart(self) -> ModelSpec:
        """The model under a name of its own, to be planned beside the new version."""
        return self.model.model_copy(update={"name": f"{self.model.name} (former version)"})


@dataclass(frozen=True)
class DesiredModel:
    """What one model should become, and by which way."""

    model: ModelSpec
    count: int
    version: str
    strategy: Strategy = "surge"  # never auto: that has been decided
    mixes: bool = True  # both versions may serve at once: their tokenizers agree
    canary: bool = False  # one current replica, until it is promoted
    reachable: bool = False  # promise no more replicas than find a place: waiting for more would never end
    frozen: bool = False  # paused: nothing old goes and nothing current comes
    awaited: bool = False  # what the current ones load is not on their hosts yet: nothing old goes for them before
    lender: str | None = None  # with borrow: the id of the replica that gives way
    former: Former | None = None  # of a canary, and of what is frozen, where it is known


@dataclass(frozen=True)
class Step:
    """How far one model is."""

    keep: tuple[ReplicaView, ...] = ()  # old ones that go on serving
    count: int = 0  # current ones that should be
    old: int = 0  # old ones that are not gone yet
    alive: int = 0  # current ones that there are
    ready: int = 0  # and of these are ready
    serves_old: bool = False  # requests go to old ones only: the versions do not mix
    lost: int = 0  # old ones that are gone, and come back elsewhere in the former version

    def settled(self, wish: DesiredModel) -> bool:
        """Whether nothing of the update is left to do."""
        return self.old == 0 and self.ready >= wish.count


@dataclass(frozen=True)
class Goal:
    """What should be now: the replicas, the plan of the current ones, and each model's step."""

    targets: tuple[ReplicaTarget, ...] = ()
    plan: Plan = field(default_factory=Plan)
    steps: Mapping[str, Step] = field(default_factory=lambda: MappingProxyType({}))


def step(wish: DesiredModel, current: Sequence[ReplicaView], old: Sequence[ReplicaView], leaving: int = 0) -> Step:
    """The next step of one model. ``leaving`` counts old ones that drain or stop already.

    Neither strategy lets go of a ready old replica before what it promises is served by others: surge promises as many
    as are wished, in_place one fewer.
    """
    ready = sum(view.state is State.READY for view in current)
    alive = len(current)
    done = Step((), wish.count, len(old) + leaving, alive, ready)
    restores = wish.former is not None and (wish.canary or (wish.frozen and (bool(old) or not ready)))
    if not old and not restores:
        return done
    best_first = sorted(old, key=lambda view: (view.state is not State.READY, view.replica))
    missing = wish.count - len(old)
    waits = wish.awaited and wish.strategy != "surge"
    spare = 0 if wish.strategy in ("surge", "borrow") else 1
    if wish.canary and restores:
        comes = min(wish.count, alive if wish.frozen or waits else 1, 1)
        promised = max(wish.count - spare * comes, min(wish.count, 1))
        keep = best_first[:promised]
        return replace(done, keep=tuple(keep), count=comes, lost=promised - len(keep))
    if wish.frozen or waits:  # the versions stand still, the numbers need not
        keep = best_first[: max(0, wish.count - ready)]
        if restores:
            lost = max(0, wish.count - len(keep) - sum(view.state is not State.FAILED for view in current))
            done = replace(done, count=min(wish.count, alive), lost=lost)
            return replace(done, keep=tuple(keep), serves_old=not wish.mixes)
        return replace(done, keep=tuple(keep), count=min(wish.count, max(alive, missing)), serves_old=not wish.mixes)
    if wish.canary:
        keep = best_first[: max(0, wish.count - spare)]
        return replace(done, keep=tuple(keep), count=min(wish.count, max(1, missing)))
    if not wish.mixes:
        keep = best_first if spare == 0 and ready < wish.count else []
        return replace(done, keep=tuple(keep[: wish.count]), serves_old=bool(keep))
    keep = best_first[: max(0, wish.count - ready - spare)]
    return replace(done, keep=tuple(keep), count=min(wish.count, max(alive, ready + 1, missing)))


def deferred(
    goal: Goal,
    views: Sequence[ReplicaView],
    lacking: Callable[[ReplicaTarget], bool],
    stays: Callable[[ReplicaView], bool],
) -> tuple[Goal, tuple[ReplicaTarget, ...]]:
    """The same, but that no replica that serves goes for one of another model whose host lacks what it loads.

    ``lacking`` says so of a new one, ``stays`` whether one that is not wanted may go on. Also those that wait now. A
    place that somebody takes at once all the same is given up for all.
    """
    there = {(view.id, view.host, view.cores, view.version) for view in views if view.state not in _ENDING}
    late = {
        target.id: target
        for target in goal.targets
        if target.placement is not None
        and (target.id, target.host, target.cores, target.version) not in there
        and lacking(target)
    }
    if not late:
        return goal, ()
    wanted = {target.id for target in goal.targets}
    staying: list[ReplicaTarget] = []
    waiting: dict[str, ReplicaTarget] = {}
    for view in views:
        if view.state is State.READY and view.id not in wanted and stays(view):
            takers = [target for target in goal.targets if _lies_on(target, view)]
            if takers and all(target.id in late for target in takers):
                staying.append(ReplicaTarget(view.model, view.replica, view.host, view.cores, view.version))
                waiting.update((target.id, target) for target in takers)
    targets = (*(target for target in goal.targets if target.id not in waiting), *staying)
    return replace(goal, targets=targets), tuple(waiting.values())


def _lies_on(target: ReplicaTarget, view: ReplicaView) -> bool:
    if target.cores is None or view.cores is None or target.host != view.host:
        return False
    return target.cores.overlap(view.cores) is not None


@dataclass(frozen=True)
class Situation:
    """All that is decided from.

    ``hosts`` are those that live. ``blocked`` are cores by host where nothing new may go, ``drained`` those whose
    replicas shall move, ``replaced`` (id, epoch) of replicas that shall be replaced by new processes, ``held`` the
    models by host whose artifacts are there.
    """

    spec: Spec
    hosts: tuple[Host, ...]
    checkpoints: Mapping[str, Checkpoint]
    wishes: Mapping[str, DesiredModel]
    views: tuple[ReplicaView, ...]
    blocked: Mapping[str, frozenset[int]] = field(default_factory=lambda: MappingProxyType({}))
    drained: Mapping[str, frozenset[int]] = field(default_factory=lambda: MappingProxyType({}))
    replaced: frozenset[tuple[str, int]] = frozenset()
    held: Mapping[str, frozenset[str]] = field(default_factory=lambda: MappingProxyType({}))

    def with_wish(self, wish: DesiredModel) -> Situation:
        """The same with another wish for its model."""
        return replace(self, wishes={**self.wishes, wish.model.name: wish})

    def load_s(self, model: str) -> float | None:
        """How long the last start of a replica of the model took, in seconds; None before one was ready."""
        known = [view.load_s for view in self.views if view.model == model and view.load_s is not None]
        return max(known, default=None)


@dataclass(frozen=True)
class _Sorted:
    """The replicas of each model, by what is to become of them."""

    current: dict[str, list[ReplicaView]]
    old: dict[str, list[ReplicaView]]
    leaving: dict[str, int]  # old ones that drain or stop already

    def step(self, wish: DesiredModel) -> Step:
        name = wish.model.name
        return step(wish, self.current[name], self.old[name], self.leaving[name])


def aim(situation: Situation, moves: int = 0, costs: Mapping[str, float] | None = None) -> Goal:
    """Which replicas should be now; with ``moves``, which could be if so many running replicas were given other cores.

    Old replicas are kept for as many new ones as are wished; where the wish is ``reachable``, for as many as find a
    place. ``moves`` and ``costs`` are those of `placements.planner.plan.plan`.
    """
    wishes = situation.wishes
    found = _sort(situation)
    steps = {name: found.step(wish) for name, wish in wishes.items()}
    made = _plan(situation, found, steps, moves, costs)
    waiting = {one.model for one in made.unplaced}
    stuck = [name for name in waiting if wishes[name].reachable and steps[name].keep]
    if stuck:  # how many there can be when nothing old is in the way any more; with none, the old ones are all there is
        ends = {name: Step(count=wish.count) for name, wish in wishes.items()}
        most = Counter(one.model for one in _plan(situation, found, ends, moves, costs).placements)
        steps |= {name: found.step(replace(wishes[name], count=most[name])) for name in stuck if most[name]}
        made = _plan(situation, found, steps, moves, costs)
    back = [one for one in made.placements if one.model not in wishes]
    made = replace(made, placements=tuple(one for one in made.placements if one.model in wishes))
    targets = [ReplicaTarget(p.model, p.replica, p.host, p.cores, wishes[p.model].version, p) for p in made.placements]
    for one in steps.values():
        targets += [ReplicaTarget(v.model, v.replica, v.host, v.cores, v.version) for v in one.keep]
    targets += _returning(situation, back, targets)
    return Goal(tuple(targets), made, MappingProxyType(steps))


def _returning(situation: Situation, back: Sequence[Placement], others: Iterable[ReplicaTarget]) -> list[ReplicaTarget]:
    """Targets of the former version, with numbers that nobody has."""
    formers = {wish.former.apart.name: wish.former for wish in situation.wishes.values() if wish.former is not None}
    taken = {view.id for view in situation.views} | {target.id for target in others}
    targets = []
    for placement in back:
        former = formers[placement.model]
        name = former.model.name
        number = next(n for n in itertools.count() if f"{name}/{n}" not in taken)
        taken.add(f"{name}/{number}")
        placement = replace(placement, model=name, replica=number)
        targets.append(ReplicaTarget(name, number, placement.host, placement.cores, former.version, placement))
    return targets


def _sort(situation: Situation) -> _Sorted:
    wishes = situation.wishes
    names = {host.name for host in situation.hosts}
    current: dict[str, list[ReplicaView]] = {name: [] for name in wishes}
    old: dict[str, list[ReplicaView]] = {name: [] for name in wishes}
    leaving: dict[str, int] = dict.fromkeys(wishes, 0)
    for view in situation.views:
        wish = wishes.get(view.model)
        if wish is None:
            continue
        is_old = (
            view.version != wish.version
            or (view.id, view.epoch) in situation.replaced
            or view.touches(situation.drained.get(view.host, frozenset()))
        )
        if view.state in _ENDING or view.host not in names:
            leaving[view.model] += is_old and not view.gone
        elif view.state is State.FAILED and view.touches(situation.blocked.get(view.host, frozenset())):
            continue  # it had better go elsewhere
        elif is_old:
            old[view.model].append(view)
        else:
            current[view.model].append(view)
    for name, wish in wishes.items():
        old[name] += _misplaced(wish, current[name])
        current[name] = [view for view in current[name] if view not in old[name]]
    return _Sorted(current, old, leaving)


def _plan(
    situation: Situation, found: _Sorted, steps: Mapping[str, Step], moves: int, costs: Mapping[str, float] | None
) -> Plan:
    """Where the current replicas of those steps lie, beside the old ones that they keep."""
    wishes, blocked = situation.wishes, situation.blocked
    lent = {
        wish.lender
        for name, wish in wishes.items()
        if wish.strategy == "borrow" and wish.lender is not None and steps[name].old > 0 and not wish.awaited
    }
    lent_by = Counter(id.rpartition("/")[0] for id in lent)  # for as long as it is lent, wherever its process is
    counts = {name: max(0, min(one.count, wishes[name].count - lent_by[name])) for name, one in steps.items()}
    taken = _cores_of(view for kept in steps.values() for view in kept.keep)
    running = [
        Running(view.model, view.replica, view.host, view.cores)
        for views_of_one in found.current.values()
        for view in views_of_one
        if view.id not in lent
    ]
    occupied = {host: blocked.get(host, frozenset()) | taken.get(host, frozenset()) for host in {*blocked, *taken}}
    numbered = {name: frozenset(view.replica for view in one.keep) for name, one in steps.items() if one.keep}
    spec, checkpoints = situation.spec, dict(situation.checkpoints)
    formers = [(wish.former, steps[name].lost) for name, wish in wishes.items() if wish.former and steps[name].lost]
    for former, lost in formers:
        spec = spec.model_copy(update={"models": (former.apart, *spec.models)})
        counts[former.apart.name] = lost
        if former.checkpoint is not None:
            checkpoints[former.apart.name] = former.checkpoint
    made = plan(
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
    names = {former.apart.name: former.model.name for former, _ in formers}
    unplaced = tuple(replace(one, model=names.get(one.model, one.model)) for one in made.unplaced)
    return replace(made, unplaced=unplaced)


def _misplaced(wish: DesiredModel, current: Sequence[ReplicaView]) -> list[ReplicaView]:
    """Those that the model's pins would have elsewhere: it has a pin for each replica, and this one is on none."""
    pins = wish.model.cores
    if not pins or wish.count > len(pins):
        return []
    return [
        view
        for view in current
        if view.cores is not None and not any(pin.cores == view.cores and pin.host in (None, view.host) for pin in pins)
    ]


def _cores_of(views: Iterable[ReplicaView]) -> dict[str, frozenset[int]]:
    found: dict[str, frozenset[int]] = {}
    for view in views:
        found[view.host] = found.get(view.host, frozenset()) | frozenset(view.cores or ())
    return found
