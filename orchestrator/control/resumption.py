"""Resumes a fleet from its journal when a controller starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec.structs

from orchestrator.control.fleet_state import FleetState
from orchestrator.control.journal.journal_fold import failed_cores
from orchestrator.control.journal.journal_records import Damage, HostUse, JournalState, Revision, Scale, Target
from orchestrator.control.record_writer import RecordWriter
from orchestrator.control.resolve.resolved_revision import resolve_revision
from orchestrator.messages.controller_settings import ControllerSettings

MAX_DAMAGE = 3  # damage descriptions in one record


def resume_fleet(
    settings: ControllerSettings,
    records: RecordWriter,
    clock: Callable[[], float] = time.monotonic,
    *,
    restarted: bool = False,
) -> FleetState:
    """Returns the state at the journal's last revision, or at the spec of `up`, the first revision of this fleet.

    ``restarted``: this fleet had an earlier controller. A journal that is damaged, or has no revision of this fleet,
    may then have lost a newer revision, and holds the fleet; at the first start the spec of `up` is current. Blocks: it
    reads the checkpoints of the spec.

    Raises ValueError if that spec has errors; `up` has checked it before.
    """
    machine = settings.machine
    past, damage = records.state, list(records.journal.damage)
    last, completed = past.revisions.get(past.revision or 0), past.revisions.get(past.completed or 0)
    begins = last is None or last.fleet != settings.fleet
    if begins and restarted and not damage:
        damage = ["the journal has no revision of this fleet, which had an earlier controller"]
    current = resolve_revision(_first_revision(settings, past) if last is None or begins else last, machine)
    is_stable = completed is not None and completed.fleet == settings.fleet and completed.number != current.number
    stable = resolve_revision(completed, machine) if completed is not None and is_stable else None
    confirmed = begins and not restarted
    if confirmed:
        _report_damage(records, damage)  # before the revision, which ends the hold
    if begins and not (restarted and damage):
        for model in past.scales:  # of an earlier fleet; cordons concern the machine and stay
            records.note(Scale(model=model, count=None, by="up"))
        for model in past.targets:
            records.note(Target(model=model, count=None))
        for host in past.uses:
            records.note(HostUse(host=host, state="released"))
        for record in failed_cores(past):  # they may have been repaired, and are tried again
            records.note(msgspec.structs.replace(record, on=False))
    if begins:
        records.note(current.revision)
        records.event("info", "FleetStarted", f"revision {current.number} of {settings.spec_file}")
    if not confirmed:
        _report_damage(records, damage)
    state = FleetState(settings, records, current, stable, clock)
    if state.hold is not None:
        records.event("error", "ActionsHeld", state.hold.line)
    return state


def _first_revision(settings: ControllerSettings, past: JournalState) -> Revision:
    return Revision(
        number=past.next_revision,
        fleet=settings.fleet,
        cause="up",
        by=f"up, pid {settings.daemon_pid}" if settings.daemon_pid else "up",
        text=settings.spec_text,
        file=settings.spec_file,
        base_dir=settings.base_dir,
        of=None,
        plan={},
    )


def _report_damage(records: RecordWriter, damage: Sequence[str]) -> None:
    """Record each damage of the journal as an event, and hold the fleet until the next revision."""
    if not damage:
        return
    more = len(damage) - MAX_DAMAGE
    records.note(Damage(what="; ".join(damage[:MAX_DAMAGE]) + (f"; and {more} more" if more > 0 else "")))
    for description in damage:
        records.event("error", "JournalDamaged", f"journal-damaged: {description}")
