"""The operations beside the spec: scale, load, unload, cordon and drain."""

from __future__ import annotations

from typing import Any

from orchestrator.api.fleet_operation import exclusive, missing_object
from orchestrator.api.refused import OperationRefused
from orchestrator.api.rollout_operations import RolloutOperations
from orchestrator.fleet.fleet_status import HostInFleet
from orchestrator.records.journal_records import Cordon, Departure, Scale
from orchestrator.rollout.host_drain import refusal
from orchestrator.state.quarantine import clear
from placements.facts.core_range import CoreRange


class ReplicaOperations(RolloutOperations):
    """Manual changes of replicas and hosts."""

    @exclusive
    async def scale(self, model: str, count: int | None, by: str, check_index: int | None = None) -> dict[str, Any]:
        """Sets the number of replicas, which can be below the spec's ``min``; None: back to the spec."""
        self._refuse_changed(check_index)
        return await self._scale(model, count, by)

    async def _scale(self, model: str, count: int | None, by: str) -> dict[str, Any]:
        self._refuse_on_hold()
        spec = self._model(model)
        if count is not None and count > spec.replicas.max:
            what = f"{model}: {count} replicas are more than the spec's max of {spec.replicas.max}"
            raise OperationRefused("scale-over-max", what, "raise replicas.max in the spec and apply it")
        before = self._state.counts.desired(spec)
        await self._write(Scale(model=model, count=count, by=by))
        self._state.counts.woken.discard(model)
        self._controller.scaler.end_manual_scaling(spec, before if count is None else 0)
        wanted = self._state.counts.desired(spec)
        target = "as in the spec" if count is None else str(count)
        self._state.records.event("info", "Scaled", f"{target} by {by}", model=model)
        self._controller.wake_up()
        return {"model": model, "scaled": count, "wanted": wanted}

    @exclusive
    async def load(self, model: str, by: str, check_index: int | None = None) -> dict[str, Any]:
        self._refuse_changed(check_index)
        self._refuse_on_hold()
        spec = self._model(model)
        if wanted := self._state.counts.desired(spec):
            return {"model": model, "scaled": None, "wanted": wanted}
        return await self._scale(model, None if spec.replicas.min else 1, by)

    @exclusive
    async def unload(self, model: str, by: str, check_index: int | None = None) -> dict[str, Any]:
        """Stops all replicas until ``load``; requests do not start one."""
        self._refuse_changed(check_index)
        self._refuse_on_hold()
        spec = self._model(model)
        await self._write(Scale(model=model, count=None, by=by, sleep=True))
        self._state.counts.woken.discard(model)
        self._controller.scaler.end_manual_scaling(spec, 0)
        self._state.records.event(
            "info", "Unloaded", f"by {by}: nothing starts it until `corewright load`", model=model
        )
        self._controller.wake_up()
        return {"model": model, "scaled": 0, "wanted": 0}

    @exclusive
    async def cordon(self, host: str, cores: str | None, on: bool, by: str) -> HostInFleet:
        """Excludes the host, or these of its cores, from new placements; ``on`` false removes the cordon."""
        chosen = self._cores_of(host, cores)
        if chosen is not None and not on and self._state.records.state.cordons.get(host) == "whole":
            what = f"{host} is cordoned as a whole: single cores cannot be uncordoned"
            raise OperationRefused(
                "cordoned-whole", what, f"run corewright uncordon {host}, then cordon the other cores"
            )
        departure = self._state.records.state.departures.get(host)
        if departure is not None and not on and departure.noticed:
            what = f"{host} ends: {departure.cause}"
            raise OperationRefused("host-leaving", what, "it is uncordoned when the notice is over")
        await self._write(Cordon(host=host, cores=chosen, on=on, by=by))
        if departure is not None and not on:
            await self._write(Departure(host=host, on=False))
        which = "the host" if cores is None else f"cores {cores}"
        self._state.records.event("info", "Cordoned" if on else "Uncordoned", f"{which} by {by}", host=host)
        if not on:
            clear(self._state, host, chosen)
        self._controller.wake_up()
        return self._host_status(host)

    @exclusive
    async def drain(
        self,
        target: str,
        by: str,
        deadline_s: float | None = None,
        check_index: int | None = None,
        *,
        keep_served: bool = False,
    ) -> HostInFleet | dict[str, Any]:
        """Moves the replicas of a host elsewhere and cordons it; or replaces one replica, given by its id.

        With ``deadline_s`` it is empty by then: replicas without another place stop. With ``keep_served`` too, that is
        refused if a model would have no replica at all.
        """
        self._refuse_changed(check_index)
        self._refuse_frozen("drain")
        if any(host.name == target for host in self._state.hosts):
            if deadline_s is None or keep_served:
                await self._refuse_without_room(target, partly=deadline_s is not None)
            await self._write(Cordon(host=target, cores=None, on=True, by=by, drain=True))
            within = "" if deadline_s is None else f" within {deadline_s:g} s"
            if deadline_s is not None:
                until = self._state.wall() + deadline_s
                await self._write(Departure(host=target, on=True, cause=f"drain by {by}", until=until))
            message = f"by {by}: its replicas move to other hosts{within}"
            self._state.records.event("info", "HostDraining", message, host=target)
            self._controller.wake_up()
            return self._host_status(target)
        view = self._view(target)
        if deadline_s is not None:
            raise OperationRefused(
                "deadline-of-replica", f"{target} is not a host", "deadline_s is for hosts", status=422
            )
        await self._replace(view, by)
        await self._set_rollout("progressing", f"{view.id} is replaced, by {by}", "RolloutRestarted")
        return {"replica": view.id, "epoch": view.epoch}

    async def _refuse_without_room(self, host: str, *, partly: bool) -> None:
        """Refuses to drain a host whose ready replicas do not fit on the others; ``partly``: not one of a model."""
        missing = await self._state.in_thread(refusal, self._state.situation(), host, partly=partly)
        if missing is not None:
            raise OperationRefused(
                "drain-no-room", f"{host} cannot be drained: {missing}", "scale down or unload a model first"
            )

    def _cores_of(self, host: str, cores: str | None) -> list[int] | None:
        machine = next((candidate for candidate in self._state.hosts if candidate.name == host), None)
        if machine is None:
            raise missing_object("host-unknown", host, [candidate.name for candidate in self._state.hosts])
        if cores is None:
            return None
        try:
            chosen = CoreRange.parse(cores)
        except ValueError as error:
            raise OperationRefused(
                "bad-range", str(error), "use a core or a range, like 3 or 4-7", status=422
            ) from None
        if chosen.last >= machine.cores:
            what = f"{cores} is not on {host}, which has the cores 0-{machine.cores - 1}"
            raise OperationRefused("bad-range", what, "corewright get hosts lists the hosts", status=422)
        return list(chosen)

    def _host_status(self, name: str) -> HostInFleet:
        return next(host for host in self._controller.status().hosts if host.name == name)
