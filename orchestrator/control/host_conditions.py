"""Which hosts and cores a fleet may use: cordons, drains, departures, and quarantines after failures.

A quarantine lasts for a while, or until an operator clears it.
"""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.control.decisions.departures import LeavingHost, leaving_hosts, replicas_to_end
from orchestrator.control.decisions.replica_view import ReplicaView
from orchestrator.control.decisions.rollout_step import merged
from orchestrator.control.effects import CoreOwner, FailedCore
from orchestrator.control.fleet_state import FleetState
from orchestrator.control.journal.journal_records import Cordoned, Quarantine
from placements.facts.core_range import ranges
from placements.facts.topology import Host
from workers.messages.status import Failure, Reaction

SET_ASIDE_S = 120.0  # for cores that the runtime refused: the tools that show their owner run every 10 s


def hosts_leaving(state: FleetState) -> dict[str, LeavingHost]:
    """Returns the hosts that end at a known time."""
    return leaving_hosts(state.records.state.departures, state.clock() - state.wall())


def replicas_replaced(state: FleetState) -> frozenset[tuple[str, int]]:
    """Returns the (id, epoch) of replicas that need a new process."""
    replaces = ((state.views.get(id), epoch) for id, epoch in state.records.state.replaces.items())
    return frozenset((view.id, view.epoch) for view, epoch in replaces if view is not None and view.epoch <= epoch)


def replicas_ending(state: FleetState) -> frozenset[tuple[str, int]]:
    """Returns the (id, epoch) of replicas that have to end now, by their hosts."""
    leaving = hosts_leaving(state)
    return replicas_to_end(state.views.values(), leaving, state.clock()) if leaving else frozenset()


def blocked_cores(state: FleetState) -> dict[str, frozenset[int]]:
    """Returns the cores by host where no replica may be placed."""
    return merged(cordoned_cores(state), quarantined_cores(state))


def cordoned_cores(state: FleetState) -> dict[str, frozenset[int]]:
    """Returns the cordoned cores by host."""
    cordons = {host: cordon for host in state.hosts if (cordon := cordon_of(state, host.name))}
    return {
        host.name: frozenset(range(host.cores)) if cordon == "whole" else frozenset(cordon)
        for host, cordon in cordons.items()
    }


def cordon_of(state: FleetState, host: str) -> Cordoned:
    """Returns the cordoned cores of a host; one that departs is cordoned as a whole."""
    records = state.records.state
    return "whole" if host in records.departures else records.cordons.get(host, frozenset())


def quarantined_cores(state: FleetState) -> dict[str, frozenset[int]]:
    """Returns the cores that foreign processes hold or that have failed, by host."""
    return {host.name: frozenset(cores) for host in state.hosts if (cores := quarantine_of(state, host.name))}


def quarantine_of(state: FleetState, host: str) -> dict[int, CoreOwner | FailedCore]:
    """Returns the quarantined cores of a host, each with its foreign owner or the failure that caused it."""
    return {**state.foreign_cores.get(host, {}), **state.failed_cores.get(host, {})}


def drained_cores(state: FleetState) -> dict[str, frozenset[int]]:
    """Returns the cores by host whose replicas have to move."""
    drains = state.records.state.drains | state.records.state.departures.keys()
    return {host.name: frozenset(range(host.cores)) for host in state.hosts if host.name in drains}


def quarantine_cores(state: FleetState, view: ReplicaView, failure: Failure) -> bool:
    """Quarantine the cores that the failure of ``view`` implicates. Returns whether there are any.

    ELSEWHERE: its own cores, for a while. QUARANTINE: all cores of the devices that the failure names and the replica
    uses, else of all devices that it uses; they survive a restart of the controller.
    """
    if view.cores is None or failure.reaction not in (Reaction.ELSEWHERE, Reaction.QUARANTINE):
        return False
    failed = state.failed_cores.setdefault(view.host, {})
    if failure.reaction is Reaction.ELSEWHERE:
        until = state.clock() + SET_ASIDE_S
        temporary = [core for core in view.cores if not _is_permanent(failed.get(core))]
        failed.update(dict.fromkeys(temporary, FailedCore(str(failure), until)))
        message = f"cores {view.cores} are set aside for {SET_ASIDE_S:.0f} s: {failure}"
        state.records.event("warning", "CoresSetAside", message, view=view)
        return True
    host = next(host for host in state.hosts if host.name == view.host)
    cores = cores_of_devices(host, view.cores, failure.devices)
    failed.update({core: FailedCore(str(failure)) for core in cores})
    for core in sorted(cores):
        state.records.note(Quarantine(host=view.host, core=core, on=True, pid=None, command=None, cause=str(failure)))
    message = f"cores {','.join(ranges(cores))} are quarantined until `corewright uncordon {view.host}`: {failure}"
    state.records.event("error", "CoreQuarantined", message, view=view)
    return True


def clear_quarantine(state: FleetState, host: str, cores: Iterable[int] | None) -> None:
    """Clear the quarantine of ``cores``, as an operator requested; None: of the whole host."""
    failed = state.failed_cores.get(host, {})
    freed = sorted(failed if cores is None else set(cores) & failed.keys())
    for core in freed:
        if _is_permanent(failed.pop(core)):
            state.records.note(Quarantine(host=host, core=core, on=False, pid=None, command=None))
    if freed:
        state.records.event("info", "CoreFree", f"cores {','.join(ranges(freed))} are available again", host=host)


def expire_quarantines(state: FleetState) -> None:
    """Clear cores whose temporary quarantine has expired."""
    now = state.clock()
    for host, failed in state.failed_cores.items():
        over = [core for core, failure in failed.items() if failure.until is not None and failure.until <= now]
        for core in over:
            del failed[core]
        if over:
            state.records.event(
                "info", "CoreFree", f"cores {','.join(ranges(over))} are no longer set aside", host=host
            )


def cores_of_devices(host: Host, cores: Iterable[int], devices: Iterable[int]) -> frozenset[int]:
    """Returns all cores of the ``devices`` that have some of ``cores``; if none has, of all devices that have some."""
    per = host.topology.cores_per_device if host.topology is not None else 1
    own = {core // per for core in cores}
    chosen = own & set(devices) or own
    return frozenset(core for device in chosen for core in range(device * per, (device + 1) * per))


def _is_permanent(failure: FailedCore | None) -> bool:
    return failure is not None and failure.until is None
