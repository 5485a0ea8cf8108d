"""Carries out the maintenance of host after host, whose progress is in the journal."""

from __future__ import annotations

from typing import Any

import msgspec.structs

from orchestrator.control.gateways import Gateways
from orchestrator.control.host_watch import HostWatch
from orchestrator.fleet.replica_states import State
from orchestrator.records.journal_records import Cordon, Departure, HostRoll
from orchestrator.rollout.host_roll import RollFacts, next_phase, refusal
from orchestrator.state.fleet_state import FleetState


def roll_status(roll: HostRoll | None) -> dict[str, Any] | None:
    """Returns a maintenance for `status`."""
    if roll is None:
        return None
    return {key: getattr(roll, key) for key in ("hosts", "phase", "wait", "deadline_s", "refusal", "by")}


class HostRolls:
    """The maintenance of one fleet's hosts, on the controller's event loop."""

    def __init__(self, state: FleetState, hosts: HostWatch, gateways: Gateways) -> None:
        self._state = state
        self._hosts = hosts
        self._gateways = gateways

    async def round(self) -> None:
        """Take the next step of the maintenance, if there is one."""
        state, roll = self._state, self._state.records.state.roll
        if roll is None or state.frozen:
            return
        host = roll.hosts[0]
        if all(known.name != host for known in state.hosts):  # an apply has removed it
            self.leave(roll)
            return
        facts = await self._facts(roll, host)
        phase = next_phase(roll.phase, roll.wait, roll.node, facts)
        if phase == "done":
            self.leave(roll)
        elif phase == "draining" and roll.phase == "next":
            self._drain(roll, host, facts.node or "")
        elif phase != roll.phase or facts.refusal != roll.refusal:
            self._report(host, phase, facts.refusal)
            state.records.note(msgspec.structs.replace(roll, phase=phase, refusal=facts.refusal))

    async def _facts(self, roll: HostRoll, host: str) -> RollFacts:
        state = self._state
        settled = all(
            (view := state.views.get(target.id)) is not None and view.state is State.READY
            for target in state.goal.targets
        )
        reason = None
        if roll.phase == "next" and settled:
            reason = await state.in_thread(refusal, state.situation(), host, partly=roll.deadline_s is not None)
        busy = sum(view.host == host and not view.gone for view in state.views.values()) + self._gateways.live_on(host)
        report = self._hosts.reports.get(host)
        return RollFacts(settled, reason, busy, None if report is None else report.node)

    def _drain(self, roll: HostRoll, host: str, node: str) -> None:
        records = self._state.records
        records.note(Cordon(host=host, cores=None, on=True, by=roll.by, drain=True))
        if roll.deadline_s is not None:
            until = self._state.wall() + roll.deadline_s
            records.note(Departure(host=host, on=True, cause=f"maintenance by {roll.by}", until=until))
        records.note(msgspec.structs.replace(roll, phase="draining", node=node, refusal=None))
        message = f"maintenance by {roll.by}: its replicas move to other hosts"
        records.event("info", "HostDraining", message, host=host)

    def _report(self, host: str, phase: str, reason: str | None) -> None:
        if phase == "waiting":
            self._state.records.event("info", "HostEmpty", "it is in maintenance", host=host)
        elif reason is not None:
            message = f"its maintenance waits, since models could not be served without it: {reason}"
            self._state.records.event("warning", "MaintenanceWaits", message, host=host)

    def leave(self, roll: HostRoll) -> None:
        """End the maintenance of the current host, and go on with the next one."""
        for record in self.leaving(roll, roll.by):
            self._state.records.note(record)
        self.report_left(roll, roll.by)

    def leaving(self, roll: HostRoll, by: str, *, stop: bool = False) -> list[Cordon | Departure | HostRoll]:
        """Returns the records by which the maintenance of the current host ends; ``stop``: and that of all others."""
        host, records = roll.hosts[0], list[Cordon | Departure | HostRoll]()
        if roll.phase != "next":
            records.append(Cordon(host=host, cores=None, on=False, by=by))
            departure = self._state.records.state.departures.get(host)
            if departure is not None and not departure.noticed:
                records.append(Departure(host=host, on=False))
        rest = [] if stop else roll.hosts[1:]
        return [*records, msgspec.structs.replace(roll, hosts=rest, phase="next", node="", refusal=None)]

    def report_left(self, roll: HostRoll, by: str, *, stop: bool = False) -> None:
        """Report the end of the maintenance of the current host as events."""
        records = self._state.records
        if roll.phase != "next":
            records.event("info", "Uncordoned", f"its maintenance by {roll.by} is over", host=roll.hosts[0])
        if stop or not roll.hosts[1:]:
            how = f"stopped by {by}" if stop else "every host had its turn"
            records.event("info", "MaintenanceOver", how)
