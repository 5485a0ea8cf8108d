"""Cores that a failure speaks against: no replica goes there for a while, or until an operator says they are sound."""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.fleet.effects import Suspect
from orchestrator.fleet.snapshot import ReplicaView
from orchestrator.records.journal import Quarantine
from orchestrator.state.fleet_state import FleetState
from placements.facts.core_range import ranges
from placements.facts.topology import Host
from workers.messages.status import Failure, Reaction

SET_ASIDE_S = 120.0  # for cores that the runtime did not give: the tools that show who holds them look every 10 s


def on_failure(state: FleetState, view: ReplicaView, failure: Failure) -> None:
    """Withhold the cores that the failure of ``view`` speaks against.

    ELSEWHERE: its own cores, for a while. QUARANTINE: the cores of the devices that the failure names, as far as they
    are its own, else of all devices that it lies on; a controller that is started again remembers them.
    """
    if view.cores is None or failure.reaction not in (Reaction.ELSEWHERE, Reaction.QUARANTINE):
        return
    suspects = state.suspects.setdefault(view.host, {})
    if failure.reaction is Reaction.ELSEWHERE:
        until = state.clock() + SET_ASIDE_S
        suspects.update({core: Suspect(str(failure), until) for core in view.cores if not _lasting(suspects.get(core))})
        what = f"cores {view.cores} are set aside for {SET_ASIDE_S:.0f} s: {failure}"
        state.tell("warning", "CoresSetAside", what, view=view)
        return
    host = next(host for host in state.hosts if host.name == view.host)
    cores = cores_of_devices(host, view.cores, failure.devices)
    suspects.update({core: Suspect(str(failure)) for core in cores})
    for core in sorted(cores):
        state.note(Quarantine(host=view.host, core=core, on=True, pid=None, command=None, cause=str(failure)))
    what = f"cores {','.join(ranges(cores))} get no replica until `corewright uncordon {view.host}`: {failure}"
    state.tell("error", "CoreQuarantined", what, view=view)


def clear(state: FleetState, host: str, cores: Iterable[int] | None) -> None:
    """An operator says that they are sound; None: all of the host."""
    suspects = state.suspects.get(host, {})
    freed = sorted(suspects if cores is None else set(cores) & suspects.keys())
    for core in freed:
        if _lasting(suspects.pop(core)):
            state.note(Quarantine(host=host, core=core, on=False, pid=None, command=None))
    if freed:
        state.tell("info", "CoreFree", f"cores {','.join(ranges(freed))} get replicas again", host=host)


def expire(state: FleetState) -> None:
    """Cores that were set aside for a while may be tried again."""
    now = state.clock()
    for host, suspects in state.suspects.items():
        over = [core for core, suspect in suspects.items() if suspect.until is not None and suspect.until <= now]
        for core in over:
            del suspects[core]
        if over:
            state.tell("info", "CoreFree", f"cores {','.join(ranges(over))} are tried again", host=host)


def cores_of_devices(host: Host, cores: Iterable[int], devices: Iterable[int]) -> frozenset[int]:
    """All cores of those of ``devices`` on which some of ``cores`` lie; with none of them, of all that these are on."""
    per = host.topology.cores_per_device if host.topology is not None else 1
    own = {core // per for core in cores}
    chosen = own & set(devices) or own
    return frozenset(core for device in chosen for core in range(device * per, (device + 1) * per))


def _lasting(suspect: Suspect | None) -> bool:
    return suspect is not None and suspect.until is None
