"""Builds the status of a fleet's hosts. Read-only."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from orchestrator.control.effects import CoreOwner, FailedCore
from orchestrator.control.fleet_state import FleetState
from orchestrator.control.host_conditions import cordon_of, drained_cores, quarantine_of
from orchestrator.messages.fleet_status import (
    AnnouncedEnd,
    CoreLease,
    FetchProgress,
    HostInFleet,
    QuarantinedCore,
    StartingHost,
)
from placements.facts.core_range import ranges
from placements.facts.topology import Host

log = logging.getLogger(__name__)


def host_statuses(state: FleetState, nodes: Mapping[str, str | None], requests: Mapping[str, int]) -> list[HostInFleet]:
    """Returns the hosts that the fleet uses. ``nodes`` are their Ray nodes, ``requests`` those in their gateways."""
    kept = state.kept
    return [
        _host_status(state, host, nodes.get(host.name), requests.get(host.name, 0))
        for host in state.hosts
        if host.name in kept
    ]


def _host_status(state: FleetState, host: Host, node: str | None, requests: int) -> HostInFleet:
    busy = sum(not view.gone for view in state.views.of_host(host.name)) + requests
    leases = {
        view.id: view.cores for view in state.views.of_host(host.name) if view.cores is not None and not view.gone
    }
    leased = sum(len(cores) for cores in leases.values())
    occupied = {core for cores in leases.values() for core in cores}
    withheld = quarantine_of(state, host.name)
    quarantined = set(withheld) - occupied
    reserved = set(host.reserved_cores) - occupied - quarantined
    free = set(range(host.cores)) - occupied - quarantined - reserved
    balanced = leased + len(free) + len(quarantined) + len(reserved) == host.cores
    if not balanced:
        log.error("%s: cores do not add up: %s leased, %s free", host.name, leases, sorted(free))
    cordoned = cordon_of(state, host.name)
    departure = state.records.state.departures.get(host.name)
    free_cordoned = free if cordoned == "whole" else free & cordoned
    use = state.uses.waiting().get(host.name)
    starting = None
    if use is not None:
        starting = StartingHost(since=round(use.at, 3), reason=state.uses.why_waiting(host.name))
    return HostInFleet(
        name=host.name,
        instance=None if host.topology is None else host.topology.instance,
        emulated=host.emulated,
        lost=host.name in state.lost and starting is None,
        starting=starting,
        cores=host.cores,
        leased=leased,
        free=len(free - free_cordoned),
        free_cordoned=len(free_cordoned),
        quarantined=len(quarantined),
        reserved=len(reserved),
        reserved_cores=ranges(reserved),
        balanced=balanced,
        cordoned="all" if cordoned == "whole" else ranges(cordoned),
        draining=host.name in drained_cores(state),
        busy=busy,
        node=node,
        leaving=None if departure is None else AnnouncedEnd(cause=departure.cause, until=departure.until),
        quarantine=[_quarantined(core, why) for core, why in sorted(withheld.items())],
        fetches=_fetches_on(state, host.name),
        leases=[CoreLease(replica=id, cores=str(cores)) for id, cores in sorted(leases.items())],
    )


def _fetches_on(state: FleetState, host: str) -> list[FetchProgress]:
    """Returns the progress of the host's fetches. Those of a source may be shared, and are shown once."""
    fetches = [view.fetch for view in state.views.of_host(host) if view.fetch is not None]
    fetches += [status for (_, _, name), status in state.fetches.items() if name == host]
    return [FetchProgress.of(status) for status in {status.source: status for status in fetches}.values()]


def _quarantined(core: int, why: CoreOwner | FailedCore) -> QuarantinedCore:
    if isinstance(why, CoreOwner):
        return QuarantinedCore(core=core, pid=why.pid, command=why.command, cause=None)
    return QuarantinedCore(core=core, pid=None, command=None, cause=why.cause)
