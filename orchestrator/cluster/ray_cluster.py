"""Implements the controller's effects with Ray: named actors, each on the node of its host."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from orchestrator.cluster.calls import Head, RayKeyValues, retried
from orchestrator.cluster.gateways import run_gateways
from orchestrator.cluster.hosts import CALL_DEADLINE_S, HostActors, HostAdmission
from orchestrator.cluster.machine_claims import MachineClaims
from orchestrator.cluster.nodes import (
    ClusterNodes,
    RayNode,
    draining_nodes,
    end_host_actors,
    refused_types,
    request_machines,
)
from orchestrator.cluster.ray_names import ray_name
from orchestrator.cluster.replicas import ReplicaActors
from orchestrator.control.effects import CoreOwner, HostLost, HostReport, LogText, Loss, StartStep
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.messages.gateway_places import ClusterMachine, GatewayPlace
from orchestrator.process.awake_clock import AwakeClock
from placements.facts.topology import Host
from workers.artifacts.fetch.artifact_fetcher import FetchedArtifact, WantedArtifact
from workers.artifacts.fetch.progress import FetchStatus
from workers.artifacts.store.store import StoreSettings
from workers.host.interpreter import Interpreter
from workers.messages.metric_family import MetricFamily
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure, Notice, earliest

log = logging.getLogger(__name__)

KEEP_S = 10.0  # deadline of the requests for machines
REPORT_S = 0.5  # deadline of one host's notice, while a round waits for all
LONG_S = 2.0  # one poll of a long operation
FETCH_S = 0.5  # the same of a fetch, whose progress is reported


class RayCluster(ReplicaActors):
    """An ``effects.ClusterClient`` on Ray nodes. Used from one event loop."""

    def __init__(
        self,
        store: StoreSettings,
        *,
        clock: AwakeClock,
        home: str,
        name: str,
        emulated: Collection[str] | None = None,
        gateway: GatewaySettings | None = None,
        console: str = "",
    ) -> None:
        """``store`` has the settings of each host's artifact store, ``home`` is the path of each host's home, and
        ``name`` the fleet's; the caller runs ``clock``. On a cluster that others started, ``emulated`` are the
        instance types whose machines have no devices, and ``gateway`` has the settings of the gateways that the
        controller runs there. ``console`` is the address of the web console, which replicas show in Ray's dashboard."""
        head, is_joined, namespace = Head(clock), emulated is not None, ray_name(name)
        claims = retried(lambda: MachineClaims(RayKeyValues(), name)) if is_joined else None
        nodes = ClusterNodes(head, clock, claims)
        hosts = HostActors(head, nodes, clock, store, home, namespace)
        super().__init__(head, nodes, hosts, clock, namespace, console)
        self._name = name
        self._gateway = gateway
        if emulated is not None:
            nodes.on_refresh = HostAdmission(nodes, hosts, emulated).greet
        self._preparing: list[asyncio.Task[None]] = []

    def add_hosts(self, names: Iterable[str], kept: frozenset[str] | None = None) -> None:
        """Add the planner's hosts, in its order, so that ``lost_hosts`` reports missing ones. ``kept`` as in
        ``keep_hosts``."""
        self._nodes.kept = kept
        self._nodes.add(names)
        used = self._nodes.used()
        for node in self._nodes.all:
            if node.alive and node.label in used:
                self._preparing.append(asyncio.get_running_loop().create_task(self._hosts.prepare(node)))

    # The cluster

    async def lost_hosts(self) -> Mapping[str, Loss]:
        await self._nodes.refresh()
        return self._nodes.lost()

    def living_machines(self) -> Sequence[ClusterMachine]:
        return self._nodes.machines()

    async def keep_hosts(self, hosts: Collection[str], elastic: Collection[Host]) -> Mapping[str, str]:
        self._nodes.kept = frozenset(hosts)
        await self._nodes.refresh()
        lost, used = self._nodes.lost(), self._nodes.used()
        requests = [host for host in elastic if host.name in lost]
        present = [node.id for node in self._nodes.all if node.alive and node.cores]

        def keep() -> dict[str, str]:
            end_host_actors(self._name, used)
            request_machines(self._name, requests, present)
            return refused_types() if requests else {}

        for node in self._nodes.all:
            if node.label not in used:
                self._hosts.forget(node)
        refused = {**await self._head.ask(keep, "machines", KEEP_S), **self._nodes.left_out()}
        types = {host.name.rpartition("/")[0] for host in requests}
        return {name: reason for name, reason in refused.items() if name in types}

    async def run_gateways(self, places: Collection[GatewayPlace]) -> Mapping[str, str]:
        if self._gateway is None:
            return {}
        return await run_gateways(self._name, self._gateway, places, self._head, self._clock)

    async def host_reports(self) -> Mapping[str, HostReport]:
        draining = await self._head.ask(draining_nodes, "draining nodes")
        living = {name: node for name in self._nodes.names if (node := self._nodes.living(name)) is not None}

        async def report(node: RayNode) -> HostReport | None:
            try:
                notice = await self._hosts.ask(node, REPORT_S, "notice")
            except (RayError, asyncio.TimeoutError) as error:
                log.debug("the host actor of %s reports no notices: %s", node.label, error)
                if node.id not in draining:
                    return None
                notice = None
            drain = Notice(cause="drain by Ray", until=draining[node.id]) if node.id in draining else None
            return HostReport(node.id, earliest((notice, drain)))

        reports = await asyncio.gather(*map(report, living.values()))
        return {name: report for name, report in zip(living, reports, strict=True) if report is not None}

    async def held_sources(self, sources: Collection[str]) -> Mapping[str, frozenset[str]]:
        async def held_by(host: str) -> frozenset[str]:
            try:
                return frozenset(await self._hosts.call(host, "stored_sources", list(sources)))
            except (HostLost, RayTaskError) as error:
                log.warning("%s does not report which sources it stores: %s", host, error)
                return frozenset()

        hosts = list(self._nodes.labels)
        return dict(zip(hosts, await asyncio.gather(*map(held_by, hosts)), strict=True))

    # One host

    def fetch(self, wanted: WantedArtifact, host: str) -> AsyncGenerator[FetchStatus | FetchedArtifact | Failure, None]:
        return self._hosts.replies(host, "fetch", wanted, FETCH_S)

    async def prepare(self, step: StartStep, config: ReplicaConfig) -> Sequence[str] | Failure:
        ended: Any = [reply async for reply in self._hosts.replies(config.place.host, step, config, LONG_S)][-1]
        if step == "foresee":
            trouble = ended.what if isinstance(ended, Failure) else ended.trouble
            if trouble:
                return Failure("foresee-failed", f"cannot predict what {config.model.name} would compile: {trouble}")
            missing: list[str] = ended.missing
            return missing
        return ended if isinstance(ended, Failure) else ()

    async def stand_by(self, host: str, engines: Mapping[str, str | None]) -> None:
        node = self._nodes.living(host)
        if node is None:
            raise HostLost(f"the Ray node of {host} is gone")
        job = None if self._nodes.are_joined else ray.get_runtime_context().get_job_id()
        try:
            await self._hosts.ask(node, CALL_DEADLINE_S, "stand_by", dict(engines), job, self.shared_variables(node))
        except (RayError, asyncio.TimeoutError) as error:
            raise HostLost(f"the host actor of {host} does not keep it ready: {error}") from error

    async def read_log(
        self, path: str, lines: int, host: str | None = None, offset: int | None = None, *, ended: bool = False
    ) -> LogText:
        try:
            part: LogText = await self._hosts.call(host, "read_log", path, lines, offset, ended)
        except HostLost:
            return LogText("", offset or 0)
        return part

    async def interpreter(self, python: str | None, host: str | None = None) -> Interpreter:
        interpreter: Interpreter = await self._hosts.call(host, "interpreter", python)
        return interpreter

    async def held_cores(self, claims: str | None, host: str | None = None) -> dict[int, CoreOwner]:
        try:
            held = await self._hosts.call(host, "held_cores", claims)
        except HostLost:
            if self._nodes.living(host) is not None:
                raise  # unknown owners must not be reported as none
            return {}
        return {core: CoreOwner(pid, command) for core, (pid, command) in held.items()}

    async def device_metrics(self, host: str) -> list[MetricFamily]:
        node = self._nodes.living(host)
        if node is None:
            return []  # no other host has these metrics
        measured: list[MetricFamily] = await (await self._hosts.of(node)).device_metrics.remote()
        return measured
