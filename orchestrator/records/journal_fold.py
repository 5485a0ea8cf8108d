"""Adds records to the state of the journal, one at a time. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from orchestrator.records.journal_records import (
    AnyRecord,
    Cordon,
    Cordoned,
    Damage,
    Decision,
    Event,
    JournalState,
    Pin,
    Quarantine,
    Replace,
    Revision,
    RolloutState,
    Scale,
    Snapshot,
    Target,
)

KEEP_REVISIONS = 50
KEEP_PINS = 256  # of the latest versions
KEEP_REPLICAS = 4096  # with known epochs: those of the latest decisions


def fold(state: JournalState, record: AnyRecord) -> JournalState:
    """Returns the state after ``record``. Pure; a record whose seq is already in ``state`` is ignored.

    Uncordoning a host frees all of its cores, including those that were cordoned individually; uncordoning single cores
    of a completely cordoned host has no effect.
    """
    if isinstance(record, Snapshot):
        return record.state if record.seq > state.seq else state
    if record.seq <= state.seq:
        return state
    seq = index = record.seq
    replace = msgspec.structs.replace
    if isinstance(record, Event):
        return replace(state, seq=seq)
    if isinstance(record, RolloutState):
        outcomes = _latest(state.outcomes, record.revision, record, KEEP_REVISIONS)
        promoted = record.revision if record.promoted else state.promoted
        completed = record.revision if record.state == "complete" else state.completed
        return replace(state, seq=seq, rollout=record, outcomes=outcomes, promoted=promoted, completed=completed)
    if isinstance(record, Decision):
        id = f"{record.model}/{record.replica}"
        epoch = max(record.epoch, state.epochs.get(id, 0))  # an adopted one may have a higher epoch
        starts = 0 if record.action == "forget" else state.starts.get(id, 0) + (record.action == "start")
        epochs = _latest(state.epochs, id, epoch, KEEP_REPLICAS)
        counts = _latest(state.starts, id, starts, KEEP_REPLICAS)
        over = record.epoch > state.replaces.get(id, record.epoch) or record.action == "forget"
        replaces = _set(state.replaces, id, 0, absent=True) if over else state.replaces
        return replace(state, seq=seq, index=index, epochs=epochs, starts=counts, replaces=replaces)
    if isinstance(record, Revision):
        revisions = _latest(state.revisions, record.number, record, KEEP_REVISIONS)
        begins = record.cause == "up"
        held = state.held if record.cause == "rollback" else None  # all others are an operator's decision
        state = replace(state, seq=seq, index=index, revision=record.number, revisions=revisions, held=held)
        return replace(state, starts={}, pins={}) if begins else state
    if isinstance(record, Damage):
        return replace(state, seq=seq, index=index, held=record.what)
    if isinstance(record, Scale):
        as_the_spec_says = record.count is None and not record.sleep
        return replace(state, seq=seq, index=index, scales=_set(state.scales, record.model, record, as_the_spec_says))
    if isinstance(record, Target):
        targets = _set(state.targets, record.model, record.count or 0, record.count is None)
        return replace(state, seq=seq, targets=targets)  # not the index: an operator's plan stays valid
    if isinstance(record, Cordon):
        cordoned = _cordoned(state.cordons.get(record.host, frozenset()), record)
        drained = state.drains - {record.host}
        if cordoned == "whole" and (record.drain or record.host in state.drains):
            drained |= {record.host}
        cordons = _set(state.cordons, record.host, cordoned, not cordoned)
        return replace(state, seq=seq, index=index, cordons=cordons, drains=drained)
    if isinstance(record, Pin):
        removed = record.origin is None and record.draft_origin is None
        pins = (
            _set(state.pins, record.key, record, removed)
            if removed
            else _latest(state.pins, record.key, record, KEEP_PINS)
        )
        return replace(state, seq=seq, pins=pins)  # not the index: an operator's plan stays valid
    if isinstance(record, Replace):
        replaces = _set(state.replaces, f"{record.model}/{record.replica}", record.epoch, absent=False)
        return replace(state, seq=seq, index=index, replaces=replaces)
    cores = _set(state.quarantines.get(record.host, {}), record.core, record, not record.on)
    return replace(state, seq=seq, index=index, quarantines=_set(state.quarantines, record.host, cores, not cores))


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
