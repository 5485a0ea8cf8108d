"""What a new spec changes: each difference with its tag, and how each model gets from one to the other. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from hashlib import blake2s
from types import MappingProxyType
from typing import Any

from orchestrator.lifecycle import State
from orchestrator.rollout import Goal, Wish, aim
from orchestrator.snapshot import ReplicaView
from placements.checkpoints import Checkpoint
from placements.engines import AUTO_ENGINES, HOST_ENGINES, Engine
from placements.spec import ModelSpec, Spec, Strategy
from placements.topology import Host

END_S = 2.0  # from the last answer of a replica to its cores being free: a kill and the host's look at the process


class Tag(str, Enum):
    """What a change costs, from nothing to hours; a model's tag is the greatest of its fields'."""

    NONE = "none"
    RECONFIGURE = "reconfigure"  # takes effect while the replicas run
    RESTART = "restart"  # needs new processes
    RECOMPILE = "recompile"  # needs new processes and, unless it is cached, a new NEFF


_ORDER = tuple(Tag)
_LIVE = frozenset(
    {
        "replicas",
        "priority",
        "max_queue",
        "update",
        "deadlines",
        "cores",
        "allow_head_padding",
        "allow_degrees",
        "hbm_overhead_gib",
        "host_memory_gib",
        "spread",
    }
)
_PROCESS = frozenset({"neff_cache", "threads", "allow_pickle"})
_SHAPE = frozenset(  # what a graph is compiled for; a new process where nothing is compiled
    {
        "source",
        "engine",
        "dtype",
        "tp_degree",
        "max_batch",
        "max_len",
        "draft",
        "engine_options",
        "quantize",
        "quantize_kv",
        "group_query_attention",
        "buckets",
        "sampling",
        "fuse_qkv",
        "compiler",
    }
)


@dataclass(frozen=True)
class FieldChange:
    """One field, as the spec's JSON writes its values."""

    field: str
    before: Any
    after: Any


@dataclass(frozen=True)
class ModelChange:
    """One model of the old spec, the new one, or both."""

    model: str
    tag: Tag
    fields: tuple[FieldChange, ...] = ()


def tag_of(name: str, engine: Engine) -> Tag:
    """What a change of that field of `ModelSpec` costs on a resolved engine. KeyError for a field without a tag."""
    if name in _LIVE:
        return Tag.RECONFIGURE
    if name in _PROCESS:
        return Tag.RESTART
    if name in _SHAPE:
        return Tag.RESTART if engine in HOST_ENGINES else Tag.RECOMPILE
    raise KeyError(name)


def model_change(before: ModelSpec | None, after: ModelSpec | None, engine: Engine) -> ModelChange:
    """What is different about one model. A model that comes or goes has the tag of a process."""
    one = after or before
    if one is None:
        raise ValueError("no model on either side")
    if before is None or after is None:
        return ModelChange(one.name, Tag.RECOMPILE if after and engine not in HOST_ENGINES else Tag.RESTART)
    old, new = before.model_dump(mode="json"), after.model_dump(mode="json")
    old["source"], new["source"] = before.source_path or before.source, after.source_path or after.source
    fields = tuple(FieldChange(name, old[name], new[name]) for name in new if name != "name" and old[name] != new[name])
    tags = [tag_of(change.field, engine) for change in fields]
    return ModelChange(one.name, max(tags, key=_ORDER.index, default=Tag.NONE), fields)


def interpreters(spec: Spec, engine: Engine) -> dict[str, str]:
    """Where the spec names another Python for a resolved engine, by engine; ``auto`` may become any of two."""
    meant = AUTO_ENGINES if engine == "auto" else (engine,)
    return {one: python for one in meant if (python := spec.python_for(one)) is not None}


def version_of(model: ModelSpec, engine: Engine, max_len: int, pythons: Mapping[str, str] | None = None) -> str:
    """A name for what a replica's process is told: processes of the same version are interchangeable.

    ``pythons`` are the spec's `interpreters` for the engine.
    """
    told = (engine, model.dtype_on(engine), max_len, model.neff_cache_location, *model.started_with)
    told += tuple(sorted((pythons or {}).items()))
    return blake2s(repr(told).encode(), digest_size=4).hexdigest()


@dataclass(frozen=True)
class Situation:
    """All that the choice of a way depends on; the arguments of `rollout.aim`, and what is known of times."""

    spec: Spec
    hosts: tuple[Host, ...]
    checkpoints: Mapping[str, Checkpoint]
    wishes: Mapping[str, Wish]
    views: tuple[ReplicaView, ...]
    blocked: Mapping[str, frozenset[int]] = field(default_factory=lambda: MappingProxyType({}))
    drained: Mapping[str, frozenset[int]] = field(default_factory=lambda: MappingProxyType({}))
    replaced: frozenset[tuple[str, int]] = frozenset()

    def aim(self, moves: int = 0, costs: Mapping[str, float] | None = None) -> Goal:
        """What should be now; with ``moves``, what could be if so many running replicas were given other cores."""
        return aim(
            self.spec,
            self.hosts,
            self.checkpoints,
            self.wishes,
            self.views,
            blocked=self.blocked,
            drained=self.drained,
            replaced=self.replaced,
            moves=moves,
            costs=costs,
        )

    def with_wish(self, wish: Wish) -> Situation:
        """The same with another wish for its model."""
        return replace(self, wishes={**self.wishes, wish.model.name: wish})

    def load_s(self, model: str) -> float | None:
        """How long the last start of a replica of the model took, in seconds; None before one was ready."""
        known = [view.load_s for view in self.views if view.model == model and view.load_s is not None]
        return max(known, default=None)


@dataclass(frozen=True)
class Way:
    """How a model's replicas are replaced, and what that costs."""

    strategy: Strategy
    outage_s: float | None  # how long no replica of the model serves; None: nobody has measured a start of it yet
    why: str
    lender: str | None = None
    possible: bool = True


def choose(situation: Situation, name: str) -> Way:
    """The way for a model with old replicas: the spec's, or under ``auto`` the first of these.

    1. surge, where a replica more finds free cores (all of them where the versions do not mix)   no outage
    2. in_place, one replica at a time, where another one serves meanwhile                        no outage
    3. borrow, where an idle replica of no higher priority lies on enough cores                   no outage
    4. hold, where the predicted swap takes at most ``hold_s``                                    requests wait
    5. in_place                                                                                   requests are refused
    """
    wish = situation.wishes[name]
    asked = wish.model.update.strategy
    ready = sum(view.model == name and view.state is State.READY for view in situation.views)
    load_s = situation.load_s(name)
    swap_s = None if load_s is None else load_s + END_S
    if asked in ("auto", "surge"):
        if _fits(situation, replace(wish, strategy="surge", lender=None)):
            return Way("surge", 0.0, "free cores hold the new replica while the old one serves")
        if asked == "surge":
            return Way("surge", None, "no free cores hold a further replica", possible=False)
    if asked in ("auto", "in_place") and ready > 1 and wish.mixes:
        return Way("in_place", 0.0, f"one of {ready} replicas at a time, the others serve")
    if asked in ("auto", "borrow"):
        lender = _lender(situation, wish)
        if lender is not None:
            return Way("borrow", 0.0, f"{lender} is idle and gives way meanwhile", lender)
        if asked == "borrow":
            return Way("borrow", None, "no idle replica lies on enough cores", possible=False)
    if ready == 0:
        return Way("in_place", 0.0, "no replica serves now")
    if asked == "hold" or (asked == "auto" and swap_s is not None and swap_s <= wish.model.update.hold_s):
        return Way("hold", swap_s, "no free cores: requests wait while the replica is swapped")
    return Way("in_place", swap_s, "no free cores: it is stopped before the new one starts")


def _fits(situation: Situation, wish: Wish) -> bool:
    trial = situation.with_wish(wish).aim()
    placed = sum(placement.model == wish.model.name for placement in trial.plan.placements)
    return placed >= trial.steps[wish.model.name].count


def _lender(situation: Situation, wish: Wish) -> str | None:
    """The idle replica of the lowest priority whose cores would let the model surge."""
    specs = {model.name: model for model in situation.spec.models}
    idle = [
        view
        for view in situation.views
        if view.model != wish.model.name
        and view.model in specs
        and view.state is State.READY
        and view.idle
        and specs[view.model].priority <= wish.model.priority
    ]
    for view in sorted(idle, key=lambda view: (specs[view.model].priority, len(view.cores or ()), view.id)):
        if _fits(situation, replace(wish, strategy="borrow", lender=view.id)):
            return view.id
    return None


def difference(before: Spec | None, after: Spec, engines: Mapping[str, Engine]) -> list[ModelChange]:
    """Every model of either spec, those of the new one first. ``engines`` are resolved, by model."""
    old = {model.name: model for model in before.models} if before is not None else {}
    changes = []
    for model in after.models:
        engine, earlier = engines[model.name], old.pop(model.name, None)
        change = model_change(earlier, model, engine)
        if before is not None and earlier is not None:
            change = _with_interpreters(change, interpreters(before, engine), interpreters(after, engine))
        changes.append(change)
    return changes + [model_change(model, None, model.engine) for model in old.values()]


def _with_interpreters(change: ModelChange, before: Mapping[str, str], after: Mapping[str, str]) -> ModelChange:
    """The same with the interpreters that differ, each a restart."""
    fields = tuple(
        FieldChange(f"engines.{engine}.python", before.get(engine), after.get(engine))
        for engine in dict.fromkeys((*before, *after))
        if before.get(engine) != after.get(engine)
    )
    if not fields:
        return change
    return replace(change, tag=max(change.tag, Tag.RESTART, key=_ORDER.index), fields=(*change.fields, *fields))


def replica_changes(goal: Goal, views: Sequence[ReplicaView], settled: Goal) -> list[dict[str, str]]:
    """One entry for each replica that an apply would start, stop, move to other cores or restart on the same.

    ``goal`` is the first step of the update, ``settled`` the plan when it is over.
    """
    kept = {target.id for target in goal.targets if target.placement is None}
    now = {view.id: view for view in views if view.state not in (State.DRAINING, State.STOPPING)}
    changes: list[dict[str, str]] = []
    for target in settled.targets:
        view = now.pop(target.id, None)
        if view is None:
            change = "start"
        elif (view.host, view.cores) != (target.host, target.cores):
            change = "move"
        elif view.version != target.version or view.id in kept:
            change = "restart"
        else:
            continue
        changes.append({"replica": target.id, "change": change})
    return changes + [{"replica": id, "change": "stop"} for id in now]
