"""Adds records to the state of the journal, one at a time. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec.structs

from orchestrator.control.journal.journal_records import (
    AnyRecord,
    Cordon,
    Cordoned,
    Damage,
    Decision,
    Departure,
    Event,
    HostUse,
    JournalState,
    Pin,
    Quarantine,
    ReadyStart,
    Replace,
    Revision,
    RolloutState,
    Scale,
    Snapshot,
    Target,
)

KEEP_REVISIONS = 50
KEEP_PINS = 256  # of the latest versions
KEEP_STARTS = 3  # of a model: one slow start does not count, and a lasting change counts after two
KEEP_MODELS = 256  # with known starts: those of the latest starts
KEEP_REPLICAS = 4096  # with known epochs: those of the latest starts


def fold(state: JournalState, record: AnyRecord) -> JournalState:
    """Returns the state after ``record``. Pure; a record whose seq is already in ``state`` is ignored.

    Uncordoning a host frees all of its cores, including those that were cordoned individually; uncordoning single cores
    of a completely cordoned host has no effect.
    """
    if isinstance(record, Snapshot):
        return record.state if record.seq > state.seq else state
    if record.seq <= state.seq:
        return state
    index = state.index if _keeps_plans(record) else record.seq
    return msgspec.structs.replace(state, seq=record.seq, index=index, **_changes(state, record))


def _keeps_plans(record: AnyRecord) -> bool:
    """Returns whether an operator's plan stays valid: it does at a rollout's end, and not when an operator pauses,
    resumes or promotes the rollout."""
    if isinstance(record, RolloutState):
        return record.state not in ("paused", "progressing")
    return isinstance(record, (Event, Target, Pin, HostUse, ReadyStart))


def _changes(state: JournalState, record: AnyRecord) -> dict[str, Any]:
    """Returns the fields of the state that the record changes, besides seq and index."""
    match record:
        case RolloutState():
            return _rollout_changes(state, record)
        case Decision():
            return _decision_changes(state, record)
        case Revision():
            revisions = _latest(state.revisions, record.number, record, KEEP_REVISIONS)
            held = state.held if record.cause == "rollback" else None  # all others are an operator's decision
            begun: dict[str, Any] = {"starts": {}, "pins": {}, "ready_starts": {}} if record.cause == "up" else {}
            return {"revision": record.number, "revisions": revisions, "held": held, **begun}
        case Damage():
            return {"held": record.what}
        case Scale(model=model):
            return {"scales": _set(state.scales, model, record, absent=record.count is None and not record.sleep)}
        case Target(model=model, count=count):
            return {"targets": _set(state.targets, model, count or 0, absent=count is None)}
        case Cordon():
            return _cordon_changes(state, record)
        case Departure(host=host, on=on):
            return {"departures": _set(state.departures, host, record, absent=not on)}
        case HostUse(host=host):
            starts = state.host_starts
            if record.start_s is not None:
                starts = {**starts, host.rpartition("/")[0]: record.start_s}
            return {"uses": _set(state.uses, host, record, absent=record.state == "released"), "host_starts": starts}
        case Pin() if not any(record.origins) and not record.contents:
            return {"pins": _set(state.pins, record.key, record, absent=True)}
        case Pin():
            return {"pins": _latest(state.pins, record.key, record, KEEP_PINS)}
        case ReadyStart(model=model):
            kept = (record, *state.ready_starts.get(model, ()))[:KEEP_STARTS]
            return {"ready_starts": _latest(state.ready_starts, model, kept, KEEP_MODELS)}
        case Replace():
            return {"replaces": _set(state.replaces, f"{record.model}/{record.replica}", record.epoch, absent=False)}
        case Quarantine(host=host, core=core, on=on):
            cores = _set(state.quarantines.get(host, {}), core, record, absent=not on)
            return {"quarantines": _set(state.quarantines, host, cores, absent=not cores)}
    return {}


def _rollout_changes(state: JournalState, record: RolloutState) -> dict[str, Any]:
    return {
        "outcomes": _latest(state.outcomes, record.revision, record, KEEP_REVISIONS),
        "promoted": record.revision if record.promoted else state.promoted,
        "completed": record.revision if record.state == "complete" else state.completed,
    }


def _decision_changes(state: JournalState, record: Decision) -> dict[str, Any]:
    id = f"{record.model}/{record.replica}"
    epoch = max(record.epoch, state.epochs.get(id, 0))  # an adopted one may have a higher epoch
    starts = 0 if record.action == "forget" else state.starts.get(id, 0) + (record.action == "start")
    over = record.epoch > state.replaces.get(id, record.epoch) or record.action == "forget"
    if not over and (epoch, starts) == (state.epochs.get(id), state.starts.get(id)):
        return {}  # as most; copies for each of thousands of replicas would take seconds
    return {
        "epochs": _latest(state.epochs, id, epoch, KEEP_REPLICAS),
        "starts": _latest(state.starts, id, starts, KEEP_REPLICAS),
        "replaces": _set(state.replaces, id, 0, absent=True) if over else state.replaces,
    }


def _cordon_changes(state: JournalState, record: Cordon) -> dict[str, Any]:
    cordoned = _cordoned(state.cordons.get(record.host, frozenset()), record)
    drains = state.drains - {record.host}
    if cordoned == "whole" and (record.drain or record.host in state.drains):
        drains |= {record.host}
    return {"cordons": _set(state.cordons, record.host, cordoned, absent=not cordoned), "drains": drains}


def failed_cores(state: JournalState) -> list[Quarantine]:
    """Returns the failed cores in quarantine; the owners of the others are observed again."""
    return [record for cores in state.quarantines.values() for record in cores.values() if record.cause]


K = TypeVar("K")
V = TypeVar("V")


def _set(mapping: Mapping[K, V], key: K, value: V, absent: bool) -> dict[K, V]:
    """Returns a copy with ``key`` set, or without it if ``absent``."""
    copy = dict(mapping)
    if absent:
        copy.pop(key, None)
    else:
        copy[key] = value
    return copy


def _latest(mapping: Mapping[K, V], key: K, value: V, keep: int) -> dict[K, V]:
    """Returns a copy with ``key`` at the end, limited to the last ``keep`` keys."""
    copy = dict(mapping)
    copy.pop(key, None)
    copy[key] = value
    while len(copy) > keep:
        del copy[next(iter(copy))]
    return copy


def _cordoned(before: Cordoned, record: Cordon) -> Cordoned:
    if record.cores is None:
        return "whole" if record.on else frozenset()
    if before == "whole":
        return before
    cores = frozenset(record.cores)
    return before | cores if record.on else before - cores
