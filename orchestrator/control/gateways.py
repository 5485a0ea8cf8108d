"""Runs the gateways of a fleet on a joined cluster, and knows all gateways by their reports."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.control.effects import ClusterClient
from orchestrator.control.fleet_state import FleetState
from orchestrator.control.host_conditions import hosts_leaving
from orchestrator.messages.fleet_status import GatewayInFleet
from orchestrator.messages.gateway_places import GATEWAY_LOST_S, GatewayPlace, wanted_gateways
from orchestrator.messages.key_usage import KeyUsageExchange
from orchestrator.scaling.demand_report import DemandReply, DemandReport
from workers.host.task_boundary import task_boundary

log = logging.getLogger(__name__)

RETRY_S = 30.0  # between two changes, unless other places are wanted


@dataclass(frozen=True)
class _Heard:
    """A gateway that reports."""

    report: DemandReport
    at: float  # on the state's clock


class Gateways:
    """The gateways of one controller's fleet, on its event loop."""

    def __init__(self, state: FleetState, cluster: ClusterClient) -> None:
        self._state = state
        self._cluster = cluster
        self._heard: dict[str, _Heard] = {}  # by gateway
        self._usage = KeyUsageExchange()
        self._places: frozenset[GatewayPlace] = frozenset()  # wanted now
        self._requested: frozenset[GatewayPlace] | None = None  # by the last change
        self._problems: Mapping[str, str] = {}  # of the last change, by label of the machine
        self._change: asyncio.Task[None] | None = None
        self._due = float("-inf")  # when the next change may begin if the same places are wanted

    # Reports

    def receive(self, report: DemandReport) -> DemandReply:
        """Receive a gateway's report. Returns what it must know of the others."""
        self._heard[report.gateway] = _Heard(report, self._state.clock())
        self._forget_silent()
        return DemandReply(usage=self._usage.receive(report.gateway, report.usage))

    def _forget_silent(self) -> None:
        oldest = self._state.clock() - GATEWAY_LOST_S
        for name in [name for name, heard in self._heard.items() if heard.at < oldest]:
            del self._heard[name]
            self._usage.forget(name)

    @property
    def exporter(self) -> str | None:
        """The machine whose gateway exports the metrics of the whole fleet: a scrape of all must not count them twice.
        None: any."""
        return min((heard.report.place for heard in self._heard.values() if heard.report.place), default=None)

    def serving(self) -> list[DemandReport]:
        """Returns the last reports of the gateways that accept connections and are ready."""
        self._forget_silent()
        reports = [heard.report for heard in self._heard.values()]
        return [report for report in reports if report.address and not report.unready]

    # Places

    def round(self) -> None:
        """Start a change if gateways are missing, or where none should be."""
        state = self._state
        if not state.settings.joined or (self._change is not None and not self._change.done()):
            return
        now = state.clock()
        ended = {host for host, leaving in hosts_leaving(state).items() if now >= leaving.stop_at}
        self._places = wanted_gateways(state.settings.gateways_on, self._cluster.living_machines(), ended | state.lost)
        self._forget_silent()
        silent = {place.label for place in self._places} - {heard.report.place for heard in self._heard.values()}
        if self._places != self._requested or (silent and now >= self._due):
            self._requested, self._due = self._places, now + RETRY_S
            self._change = asyncio.get_running_loop().create_task(self._run(self._places))

    async def _run(self, places: frozenset[GatewayPlace]) -> None:
        with task_boundary(log, "the gateways are not changed; it is retried", on_error=self._failed):
            problems = await self._cluster.run_gateways(places)
            for label, problem in sorted(problems.items()):
                if self._problems.get(label) != problem:
                    self._state.records.event("error", "GatewayNotStarted", f"on {label}: {problem}")
            self._problems = problems

    def _failed(self, error: Exception) -> None:
        self._problems = {place.label: f"Ray Serve does not start it: {error}" for place in self._places}

    def stop(self) -> None:
        """Cancel a change."""
        if self._change is not None:
            self._change.cancel()

    def draining(self) -> list[str]:
        """Returns the labels of the machines whose gateways must send their clients away."""
        if not self._state.settings.joined:
            return []
        records = self._state.records.state
        leaving = records.drains | records.departures.keys()
        return sorted(machine.place.label for machine in self._cluster.living_machines() if machine.host in leaving)

    def requests(self) -> Mapping[str, int]:
        """Returns the number of requests in the gateways by the planner's host."""
        hosts = {machine.place.label: machine.host for machine in self._cluster.living_machines()}
        requests = Counter[str]()
        for report in (heard.report for heard in self._heard.values()):
            if (host := hosts.get(report.place)) is not None:
                requests[host] += sum(model.waiting + model.live for model in report.models)
        return requests

    def status(self) -> list[GatewayInFleet]:
        """Returns the gateways of a joined cluster for `status`: one entry for each machine where one should be."""
        draining = self.draining()
        reports: dict[str, DemandReport] = {}
        for heard in self._heard.values():  # the spare gateway of a machine reports, too, and has no address
            report = heard.report
            if report.address or report.place not in reports:
                reports[report.place] = report
        hosts = {machine.place.label: machine.host for machine in self._cluster.living_machines()}
        return [
            _status(place.label, hosts.get(place.label), reports.get(place.label), self._problems, draining)
            for place in sorted(self._places)
        ]


def _status(
    label: str, host: str | None, report: DemandReport | None, problems: Mapping[str, str], draining: list[str]
) -> GatewayInFleet:
    serves = report is not None and bool(report.address)
    if serves and label in draining:
        state, reason = "draining", None
    elif report is not None and serves:
        state, reason = ("ready", None) if not report.unready else ("not ready", report.unready)
    else:
        state, reason = "starting" if label not in problems else "failed", problems.get(label)
    return GatewayInFleet(
        machine=label,
        host=host,
        address=report.address if report is not None and serves else None,
        state=state,
        reason=reason,
        version=None if report is None else report.version or None,
        routes_age_s=None if report is None else report.routes_age_s,
    )
