"""The operations on all hosts: maintenance of one after the other."""

from __future__ import annotations

from typing import Any

from orchestrator.api.fleet_operation import exclusive, missing_object
from orchestrator.api.refused import Refused
from orchestrator.api.replica_operations import ReplicaOperations
from orchestrator.control.host_rolls import roll_status
from orchestrator.records.journal_records import HostRoll
from orchestrator.rollout.host_roll import Wait, refusal

NO_ROLL: dict[str, Any] = {"hosts": []}


class HostOperations(ReplicaOperations):
    """The maintenance of hosts."""

    @exclusive
    async def roll_hosts(self, hosts: list[str], wait: Wait, deadline_s: float | None, by: str) -> dict[str, Any]:
        """Drains host after host; by default all that live and are not cordoned. Refused if a model could not be served
        without one of them."""
        self._refuse_frozen("drain")
        state = self._state
        if state.records.state.roll is not None:
            raise Refused(
                "roll-in-progress", "a maintenance of hosts is in progress", "run corewright hosts stop first"
            )
        names = [host.name for host in state.hosts]
        for name in hosts:
            if name not in names:
                raise missing_object("host-unknown", name, names)
        usable = [name for name in names if name not in state.lost and state.cordon(name) != "whole"]
        chosen = list(dict.fromkeys(hosts)) or usable
        situation = state.situation()
        for name in chosen:
            missing = await state.in_thread(refusal, situation, name, partly=deadline_s is not None)
            if missing is not None:
                hint = "add a host, scale down or unload a model first"
                if deadline_s is None:
                    hint += "; or set a deadline, which allows fewer replicas meanwhile"
                raise Refused("roll-no-room", f"without {name} models could not be served: {missing}", hint)
        roll = HostRoll(hosts=chosen, phase="next", wait=wait, deadline_s=deadline_s, by=by)
        if chosen:
            await self._write(roll)
            state.records.event("info", "MaintenanceBegins", f"by {by}: {', '.join(chosen)}")
            self._controller.wake_up()
        return roll_status(roll if chosen else None) or NO_ROLL

    @exclusive
    async def continue_roll(self, by: str) -> dict[str, Any]:
        """Ends the maintenance of the current host, which is empty, and goes on with the next one."""
        roll = self._roll()
        if roll.phase != "waiting":
            what = f"{roll.hosts[0]} is not in maintenance yet: its phase is {roll.phase}"
            raise Refused("roll-not-waiting", what, "corewright status shows the progress")
        return await self._leave(roll, by, stop=False)

    @exclusive
    async def stop_roll(self, by: str) -> dict[str, Any]:
        """Ends the maintenance: the current host is used again, and no further one is drained."""
        return await self._leave(self._roll(), by, stop=True)

    def _roll(self) -> HostRoll:
        roll = self._state.records.state.roll
        if roll is None:
            raise Refused("no-roll", "no maintenance of hosts is in progress", "corewright hosts roll begins one")
        return roll

    async def _leave(self, roll: HostRoll, by: str, *, stop: bool) -> dict[str, Any]:
        rolls = self._controller.rolls
        for record in rolls.leaving(roll, by, stop=stop):
            await self._write(record)
        rolls.report_left(roll, by, stop=stop)
        self._controller.wake_up()
        return roll_status(self._state.records.state.roll) or NO_ROLL
