"""The operations on replicas and hosts beside the spec: scale, load, unload, cordon and drain."""

from __future__ import annotations

from orchestrator.api.operation import (
    OperatedFleet,
    exclusive,
    is_host,
    missing_object,
    model_of,
    refuse_changed,
    refuse_frozen,
    refuse_on_hold,
    refuse_over_max,
    view_of,
    write,
)
from orchestrator.api.revisions import replace_replica, set_rollout
from orchestrator.api.schemas import (
    HostCores,
    HostOrReplica,
    ModelName,
    ModelScale,
    OperationRefused,
    ReplacedReplica,
    ReplicaCount,
)
from orchestrator.control.decisions.host_demand import refusal
from orchestrator.control.fleet_goal import situation_of
from orchestrator.control.host_conditions import clear_quarantine
from orchestrator.control.journal.journal_records import Cordon, Departure, Scale
from orchestrator.messages.fleet_status import HostInFleet
from placements.facts.core_range import CoreRange
from placements.spec.schema import ModelSpec


@exclusive
async def scale(fleet: OperatedFleet, request: ReplicaCount, by: str) -> ModelScale:
    """Sets the number of replicas, which can be below the spec's ``min``; None: back to the spec."""
    refuse_changed(fleet, request.check_index)
    refuse_on_hold(fleet)
    return await _scale(fleet, model_of(fleet, request.model), request.count, by)


async def _scale(fleet: OperatedFleet, model: ModelSpec, count: int | None, by: str) -> ModelScale:
    refuse_over_max(model, count)
    counts = fleet.state.counts
    before = counts.desired(model)
    await write(fleet, Scale(model=model.name, count=count, by=by))
    counts.woken.discard(model.name)
    fleet.controller.scaler.end_manual_scaling(model, before if count is None else 0)
    target = "as in the spec" if count is None else str(count)
    fleet.state.records.event("info", "Scaled", f"{target} by {by}", model=model.name)
    fleet.controller.wake_up()
    return ModelScale(model=model.name, scaled=count, wanted=counts.desired(model))


@exclusive
async def load(fleet: OperatedFleet, request: ModelName, by: str) -> ModelScale:
    """Starts a replica of a model that has none."""
    refuse_changed(fleet, request.check_index)
    refuse_on_hold(fleet)
    model = model_of(fleet, request.model)
    if wanted := fleet.state.counts.desired(model):
        return ModelScale(model=model.name, scaled=None, wanted=wanted)
    return await _scale(fleet, model, None if model.replicas.min else 1, by)


@exclusive
async def unload(fleet: OperatedFleet, request: ModelName, by: str) -> ModelScale:
    """Stops all replicas until ``load``; requests do not start one."""
    refuse_changed(fleet, request.check_index)
    refuse_on_hold(fleet)
    model = model_of(fleet, request.model)
    await write(fleet, Scale(model=model.name, count=None, by=by, sleep=True))
    fleet.state.counts.woken.discard(model.name)
    fleet.controller.scaler.end_manual_scaling(model, 0)
    message = f"by {by}: nothing starts it until `corewright load`"
    fleet.state.records.event("info", "Unloaded", message, model=model.name)
    fleet.controller.wake_up()
    return ModelScale(model=model.name, scaled=0, wanted=0)


@exclusive
async def cordon(fleet: OperatedFleet, request: HostCores, by: str) -> HostInFleet:
    """Excludes the host, or these of its cores, from new placements."""
    cores = _cores_of(fleet, request)
    await write(fleet, Cordon(host=request.host, cores=cores, on=True, by=by))
    return _cordoned(fleet, request, by, on=True)


@exclusive
async def uncordon(fleet: OperatedFleet, request: HostCores, by: str) -> HostInFleet:
    """Removes the cordon of the host, or of these of its cores."""
    host, cores, journal = request.host, _cores_of(fleet, request), fleet.state.records.state
    if cores is not None and journal.cordons.get(host) == "whole":
        fact = f"{host} is cordoned as a whole: single cores cannot be uncordoned"
        raise OperationRefused("cordoned-whole", fact, f"run corewright uncordon {host}, then cordon the other cores")
    departure = journal.departures.get(host)
    if departure is not None and departure.noticed:
        raise OperationRefused(
            "host-leaving", f"{host} ends: {departure.cause}", "it is uncordoned when the notice is over"
        )
    await write(fleet, Cordon(host=host, cores=cores, on=False, by=by))
    if departure is not None:
        await write(fleet, Departure(host=host, on=False))
    clear_quarantine(fleet.state, host, cores)
    return _cordoned(fleet, request, by, on=False)


def _cordoned(fleet: OperatedFleet, request: HostCores, by: str, *, on: bool) -> HostInFleet:
    which = "the host" if request.cores is None else f"cores {request.cores}"
    fleet.state.records.event("info", "Cordoned" if on else "Uncordoned", f"{which} by {by}", host=request.host)
    fleet.controller.wake_up()
    return _host_status(fleet, request.host)


@exclusive
async def drain(fleet: OperatedFleet, request: HostOrReplica, by: str) -> HostInFleet | ReplacedReplica:
    """Moves the replicas of a host elsewhere and cordons it; or replaces one replica, given by its id.

    With ``deadline_s`` the host is empty by then: replicas without another place stop. With ``keep_served`` too, that
    is refused if a model would have no replica at all.
    """
    refuse_changed(fleet, request.check_index)
    refuse_frozen(fleet, "drain")
    if is_host(fleet, request.target):
        return await _drain_host(fleet, request, by)
    view = view_of(fleet, request.target)
    if request.deadline_s is not None:
        fact = f"{request.target} is not a host"
        raise OperationRefused("deadline-of-replica", fact, "deadline_s is for hosts", status=422)
    await replace_replica(fleet, view, by)
    await set_rollout(fleet, "progressing", f"{view.id} is replaced, by {by}", "RolloutRestarted")
    return ReplacedReplica(replica=view.id, epoch=view.epoch)


async def _drain_host(fleet: OperatedFleet, request: HostOrReplica, by: str) -> HostInFleet:
    state, host, deadline_s = fleet.state, request.target, request.deadline_s
    if deadline_s is None or request.keep_served:
        missing = await state.in_thread(refusal, situation_of(state), host, partly=deadline_s is not None)
        if missing is not None:
            fact = f"{host} cannot be drained: {missing}"
            raise OperationRefused("drain-no-room", fact, "scale down or unload a model first")
    await write(fleet, Cordon(host=host, cores=None, on=True, by=by, drain=True))
    within = "" if deadline_s is None else f" within {deadline_s:g} s"
    if deadline_s is not None:
        await write(fleet, Departure(host=host, on=True, cause=f"drain by {by}", until=state.wall() + deadline_s))
    state.records.event("info", "HostDraining", f"by {by}: its replicas move to other hosts{within}", host=host)
    fleet.controller.wake_up()
    return _host_status(fleet, host)


def _cores_of(fleet: OperatedFleet, request: HostCores) -> list[int] | None:
    """Returns the numbers of the cores; None: the whole host. Raises OperationRefused."""
    hosts = fleet.state.hosts
    machine = next((candidate for candidate in hosts if candidate.name == request.host), None)
    if machine is None:
        raise missing_object("host-unknown", request.host, [candidate.name for candidate in hosts])
    if request.cores is None:
        return None
    try:
        chosen = CoreRange.parse(request.cores)
    except ValueError as error:
        raise OperationRefused("bad-range", str(error), "use a core or a range, like 3 or 4-7", status=422) from None
    if chosen.last >= machine.cores:
        fact = f"{request.cores} is not on {machine.name}, which has the cores 0-{machine.cores - 1}"
        raise OperationRefused("bad-range", fact, "corewright get hosts lists the hosts", status=422)
    return list(chosen)


def _host_status(fleet: OperatedFleet, name: str) -> HostInFleet:
    return next(host for host in fleet.controller.status().hosts if host.name == name)
