"""Implements the controller's effects with Ray: named actors, each on the node of its host."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import msgspec.structs
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.cluster.calls import CRASHED, DISCONNECTED, Head, RayKeyValues, cause_of_death, retried
from orchestrator.cluster.gateways import run_gateways
from orchestrator.cluster.hosts import HostActors, HostAdmission
from orchestrator.cluster.nodes import (
    ClusterNodes,
    RayNode,
    draining_nodes,
    end_host_actors,
    refused_types,
    request_machines,
)
from orchestrator.cluster.replicas import find_survivors, is_dead, kill
from orchestrator.fleet.cluster_names import ray_name
from orchestrator.fleet.effects import CoreOwner, HostLost, HostReport, Loss, ReplicaDied, Survivor, actor_name
from orchestrator.fleet.gateway_places import ClusterMachine, GatewayPlace
from orchestrator.fleet.machine_claims import MachineClaims
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.process.awake_clock import AwakeClock
from placements.facts.topology import Host
from workers.artifacts.fetch.artifact_fetcher import FetchedArtifact, WantedArtifact
from workers.artifacts.fetch.progress import FetchStatus
from workers.artifacts.store.store_settings import StoreSettings
from workers.host.interpreter import Interpreter
from workers.host.lifetime import Process, end_process
from workers.host.task_boundary import task_boundary
from workers.messages.metric_family import MetricFamily
from workers.messages.notice import Notice, earliest
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure, ReplicaStatus
from workers.serving.dataplane import TLS_SCHEME
from workers.serving.replica import CONSOLE_VARIABLE, Replica

log = logging.getLogger(__name__)

T = TypeVar("T")

WATCH_S = 5.0  # a watch returns at least this often
CALL_DEADLINE_S = 10.0  # a call takes a millisecond: no reply within this time means a hung process
ADOPT_S = 30.0  # deadline of a live replica's description: Ray finds it only once the head is whole
NEAR_S = 3.0  # the same on the fleet's own Ray, whose head has not been away
UNLEASED_S = 60.0  # without a process of the replica, although Ray has its cores free
SILENT_S = 3.0  # deadline of a host that may be cut off
SILENT_RETRY_S = 1.0
CONFIRM_DEATH_S = 10.0
KEEP_S = 10.0  # deadline of the requests for machines
REPORT_S = 0.5  # deadline of one host's notice, while a round waits for all
LONG_S = 2.0  # one poll of a long operation
FETCH_S = 0.5  # the same of a fetch, whose progress is reported
BY_SIGKILL = "was killed by SIGKILL"


class RayCluster:
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
        ``name`` the fleet's; the caller runs ``clock``. On a cluster that others started,
        ``emulated`` are the instance types whose machines have no devices, and ``gateway`` has the settings of the
        gateways that the controller runs there. ``console`` is the address of the web console, which replicas show
        in Ray's dashboard."""
        self._clock = clock
        self._namespace = ray_name(name)
        self._name = name
        self._gateway = gateway
        self._console = console
        self._is_joined = emulated is not None
        self._head = Head(clock)
        claims = retried(lambda: MachineClaims(RayKeyValues(), name)) if self._is_joined else None
        self._nodes = ClusterNodes(self._head, clock, claims)
        mark = f"{self._namespace}{home}" if self._is_joined else None
        self._host_actors = HostActors(self._head, self._namespace, store, home, mark)
        self._admission = HostAdmission(self._nodes, self._host_actors, clock, emulated or ())
        self._answered: set[str] = set()  # replicas that have replied: a later timeout means a hang
        self._preparing: list[asyncio.Task[None]] = []
        self._creating: set[str] = set()  # replicas whose actors are being registered
        self._actors: dict[str, Any] = {}
        self._configs: dict[str, ReplicaConfig] = {}
        self._processes: dict[str, tuple[int, float]] = {}  # pid and start of replicas that their hosts watch
        self._host_processes: dict[str, Process] = {}  # those of host actors, by node

    def fetch(self, wanted: WantedArtifact, host: str) -> AsyncGenerator[FetchStatus | FetchedArtifact | Failure, None]:
        return self._replies(host, "fetch", wanted, FETCH_S)

    async def held_sources(self, sources: Collection[str]) -> Mapping[str, frozenset[str]]:
        async def held_by(host: str) -> frozenset[str]:
            try:
                return frozenset(await self._call(host, "stored_sources", list(sources)))
            except (HostLost, RayTaskError) as error:
                log.warning("%s does not report which sources it stores: %s", host, error)
                return frozenset()

        hosts = list(self._nodes.labels)
        return dict(zip(hosts, await asyncio.gather(*map(held_by, hosts)), strict=True))

    async def check(self, config: ReplicaConfig) -> Failure | None:
        ended = await self._outcome("check", config)
        return ended if isinstance(ended, Failure) else None

    async def foresee(self, config: ReplicaConfig) -> Sequence[str] | Failure:
        prediction = await self._outcome("foresee", config)
        trouble = prediction.what if isinstance(prediction, Failure) else prediction.trouble
        if trouble:
            return Failure("foresee-failed", f"cannot predict what {config.model} would compile: {trouble}")
        missing: list[str] = prediction.missing
        return missing

    async def compile(self, config: ReplicaConfig) -> Failure | None:
        ended = await self._outcome("compile", config)
        return ended if isinstance(ended, Failure) else None

    async def _outcome(self, operation: str, config: ReplicaConfig) -> Any:
        return [reply async for reply in self._replies(config.host, operation, config, LONG_S)][-1]

    async def _replies(
        self, host: str, operation: str, about: WantedArtifact | ReplicaConfig, each_s: float
    ) -> AsyncGenerator[Any, None]:
        """Poll a host until the operation ends, and yield its status until its outcome.

        A restarted host actor resumes the operation. A streaming generator of Ray would not: its retry skips as many
        items as were consumed, so the outcome can be lost. It also continues after its consumer has died.
        """
        waiter, ended = secrets.token_hex(8), False
        try:
            while not ended:
                reply = await self._call(host, operation, waiter, about, each_s)
                ended = not isinstance(reply, FetchStatus)
                yield reply
        finally:
            if not ended and (node := self._nodes.living(host)) is not None:
                actor = self._host_actors.known(node)
                if actor is not None:
                    actor.stop_waiting.remote(waiter)

    async def start(self, config: ReplicaConfig) -> None:
        node = await self._nodes.wait_living(config.host)
        if node is None:
            raise HostLost(f"the Ray node of {config.host} is gone")
        if config.listen or self._is_joined:  # there can be gateways of other machines
            config = msgspec.structs.replace(config, listen=f"{TLS_SCHEME}://{node.url_host}:0")
        name = actor_name(config.model, config.replica, config.epoch)
        self._configs[name] = config
        self._creating.add(name)
        try:  # without a deadline: it may be registered whenever the head is back
            create = partial(self._create, name, config, node, await self._runtime_env(name, config, node))
            self._actors[name] = await self._head.ask(create, name, None)
        finally:
            self._creating.discard(name)

    async def _runtime_env(self, name: str, config: ReplicaConfig, node: RayNode) -> dict[str, Any]:
        """Returns the variables and the interpreter of a replica's process. All forks of a warm process get the same,
        so that a spare worker of Ray can become any replica; they set their own variables themselves."""
        shared = self._shared_variables(node)
        if (command := await self._warm_command(name, config, node)) is not None:
            return {"env_vars": shared, "py_executable": command}
        interpreter = {} if config.python is None else {"py_executable": config.python}
        return {"env_vars": {**config.env, **shared}, **interpreter}

    async def _warm_command(self, name: str, config: ReplicaConfig, node: RayNode) -> str | None:
        if not config.warm:
            return None
        try:
            actor = await self._host_actors.of(node)
            reply = actor.warm_command.remote(config.engine, config.python, config.env)
            command: str | None = await self._clock.within(reply, NEAR_S)
        except (RayError, asyncio.TimeoutError) as error:
            log.warning("%s starts as a fresh process: %s", name, str(error).partition("\n")[0])
            return None
        return command

    def _shared_variables(self, node: RayNode) -> dict[str, str]:
        return {**self._host_actors.environment(node), CONSOLE_VARIABLE: self._console}

    def _create(self, name: str, config: ReplicaConfig, node: RayNode, runtime_env: dict[str, Any]) -> Any:
        """Register the actor of a replica. Blocks while the head is away."""
        shown = _actor_class(config.model)
        return shown.options(
            name=name,
            namespace=self._namespace,
            lifetime="detached",  # it survives a restart of the controller
            num_cpus=0,
            resources={f"nc{core}": 1.0 for core in config.cores},
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            runtime_env=runtime_env,
        ).remote(config)

    def add_hosts(self, names: Iterable[str], kept: frozenset[str] | None = None) -> None:
        """Add the planner's hosts, in its order, so that ``lost_hosts`` reports missing ones. ``kept`` as in
        ``keep_hosts``."""
        self._nodes.kept = kept
        self._nodes.add(names)
        used = self._nodes.used()
        for node in self._nodes.all:
            if node.alive and node.label in used:
                self._preparing.append(asyncio.get_running_loop().create_task(self._host_actors.prepare(node)))

    async def _refresh_nodes(self) -> None:
        if await self._nodes.refresh() and self._is_joined:
            self._admission.greet()

    async def watch(self, name: str, seen: int) -> ReplicaStatus:
        while (actor := self._actors.get(name)) is not None:
            # A starting process cannot reply yet; the controller's start deadline covers it.
            deadline = WATCH_S + CALL_DEADLINE_S if name in self._answered else UNLEASED_S
            try:
                reply = actor.watch.remote(seen, WATCH_S)
                status: ReplicaStatus = await self._clock.within(reply, deadline)
            except asyncio.TimeoutError:
                if name not in self._answered:
                    await self._free_leases(name)
                    continue
                death = f"it has not replied for {WATCH_S + CALL_DEADLINE_S:.0f} s: its process hangs"
                if not await self._host_is_silent(name):
                    raise ReplicaDied(death) from None
            except RayTaskError as error:
                raise ReplicaDied(f"the actor failed: {error.cause}") from None
            except RayError as error:
                death = cause_of_death(error)
                if death != DISCONNECTED or not await self._host_is_silent(name):
                    ending = await self._ending(name) if death in (CRASHED, DISCONNECTED) else None
                    raise ReplicaDied(death if ending is None else f"its process {ending}") from None
                await asyncio.sleep(SILENT_RETRY_S)
            else:
                self._answered.add(name)
                await self._note_process(name, status)
                return status
        raise ReplicaDied("it was ended")

    async def _free_leases(self, name: str) -> None:
        """Ends what may hold the cores that a replica waits for: workers that Ray has leased to nobody."""
        if (config := self._configs.get(name)) is not None:
            with contextlib.suppress(HostLost, RayError):
                if pids := await self._call(config.host, "end_idle_workers", UNLEASED_S):
                    log.warning("%s has no process after %.0f s: idle workers ended: %s", name, UNLEASED_S, pids)

    async def _host_is_silent(self, name: str) -> bool:
        """Returns whether the replica's host does not reply either, although Ray has it alive: it may be cut off, and
        serves until Ray's word. The hosts of a fleet's own Ray are this machine."""
        config = self._configs.get(name)
        node = None if config is None or not self._is_joined else self._nodes.living(config.host)
        if node is None:
            return False
        try:
            await self._clock.within((await self._host_actors.of(node)).greeting.remote(), SILENT_S)
        except (RayError, asyncio.TimeoutError):
            return True
        return False

    async def _note_process(self, name: str, status: ReplicaStatus) -> None:
        """Have the replica's host watch its process, whose end Ray may not explain."""
        if name not in self._processes and (config := self._configs.get(name)) is not None:
            self._processes[name] = status.pid, status.started
            if (node := self._nodes.living(config.host)) is not None:
                with contextlib.suppress(RayError, asyncio.TimeoutError):
                    (await self._host_actors.of(node)).watch_process.remote(status.pid, status.started)

    async def _ending(self, name: str) -> str | None:
        """Returns how the replica's process ended, as reported by its host."""
        config, process = self._configs.get(name), self._processes.get(name)
        if config is None or process is None:
            return None
        try:
            ending: str | None = await self._call(config.host, "process_exit", *process, config.log)
        except (HostLost, RayError):
            return None
        return f"{ending}: manually, or by the kernel when out of memory" if ending == BY_SIGKILL else ending

    async def set_adapters(self, config: ReplicaConfig) -> Failure | None:
        actor = self._actors.get(actor_name(config.model, config.replica, config.epoch))
        if actor is None:
            raise ReplicaDied("it was ended")
        try:
            failure: Failure | None = await actor.set_adapters.remote(config)
        except RayError as error:
            raise ReplicaDied(cause_of_death(error)) from None
        return failure

    async def drain(self, name: str, timeout_s: float) -> bool:
        actor = self._actors.get(name)
        if actor is None:
            return True
        try:
            return bool(await self._clock.within(actor.drain.remote(timeout_s), timeout_s + CALL_DEADLINE_S))
        except asyncio.TimeoutError:
            return False
        except RayError:
            return True

    async def end(self, name: str, pid: int | None, started: float | None, host: str | None = None) -> bool:
        if name in self._creating:
            return False  # its process may start whenever the head is back
        actor = self._actors.get(name)
        if actor is not None:
            await kill(self._head, name, actor)
        if pid is None or started is None:
            dead = actor is None or await is_dead(self._clock, actor)
        else:
            dead = await self._confirm_death(pid, started, host)
        if dead:
            for mapping in (self._actors, self._configs, self._processes):
                mapping.pop(name, None)
            self._answered.discard(name)
        return dead

    async def _confirm_death(self, pid: int, started: float, host: str | None) -> bool:
        """Returns whether the process is gone. On a lost machine it is: Ray has declared its node dead."""
        try:
            return bool(await self._call(host, "confirm_death", pid, started, CONFIRM_DEATH_S))
        except HostLost:
            return self._nodes.living(host) is None

    async def log_tail(self, path: str, lines: int, host: str | None = None) -> list[str]:
        return await self._call_or([], host, "log_tail", path, lines)

    async def log_part(
        self, path: str, offset: int | None, most: int, lines: int, host: str | None = None
    ) -> tuple[str, int]:
        return await self._call_or(("", offset or 0), host, "log_part", path, offset, most, lines)

    async def fault_in_log(self, path: str, host: str | None = None) -> Failure | None:
        return await self._call_or(None, host, "fault_in_log", path)

    async def interpreter(self, python: str | None, host: str | None = None) -> Interpreter:
        interpreter: Interpreter = await self._call(host, "interpreter", python)
        return interpreter

    async def held_cores(self, claims: str | None, host: str | None = None) -> dict[int, CoreOwner]:
        try:
            held = await self._call(host, "held_cores", claims)
        except HostLost:
            if self._nodes.living(host) is not None:
                raise  # unknown owners must not be reported as none
            return {}
        return {core: CoreOwner(pid, command) for core, (pid, command) in held.items()}

    async def device_metrics(self, host: str) -> list[MetricFamily]:
        node = self._nodes.living(host)
        if node is None:
            return []  # no other host has these metrics
        measured: list[MetricFamily] = await (await self._host_actors.of(node)).device_metrics.remote()
        return measured

    async def lost_hosts(self) -> Mapping[str, Loss]:
        await self._refresh_nodes()
        return self._nodes.lost()

    async def keep_hosts(self, hosts: Collection[str], elastic: Collection[Host]) -> Mapping[str, str]:
        self._nodes.kept = frozenset(hosts)
        await self._refresh_nodes()
        lost, used = self._nodes.lost(), self._nodes.used()
        requests = [host for host in elastic if host.name in lost]
        present = [node.id for node in self._nodes.all if node.alive and node.cores]

        def keep() -> dict[str, str]:
            end_host_actors(self._name, used)
            request_machines(self._name, requests, present)
            return refused_types() if requests else {}

        for node in self._nodes.all:
            if node.label not in used:
                self._host_actors.forget(node)
        refused = {**await self._head.ask(keep, "machines", KEEP_S), **self._nodes.left_out()}
        types = {host.name.rpartition("/")[0] for host in requests}
        return {name: reason for name, reason in refused.items() if name in types}

    def living_machines(self) -> Sequence[ClusterMachine]:
        return self._nodes.machines()

    async def run_gateways(self, places: Collection[GatewayPlace]) -> Mapping[str, str]:
        if self._gateway is None:
            return {}
        return await run_gateways(self._name, self._gateway, places, self._head, self._clock)

    async def stand_by(self, host: str, engines: Mapping[str, str | None]) -> None:
        node = self._nodes.living(host)
        if node is None:
            raise HostLost(f"the Ray node of {host} is gone")
        try:
            actor = await self._host_actors.of(node)
            job = None if self._is_joined else ray.get_runtime_context().get_job_id()
            reply = actor.stand_by.remote(dict(engines), job, self._shared_variables(node))
            await self._clock.within(reply, CALL_DEADLINE_S)
        except (RayError, asyncio.TimeoutError) as error:
            raise HostLost(f"the host actor of {host} does not keep it ready: {error}") from error

    async def host_reports(self) -> Mapping[str, HostReport]:
        draining = await self._head.ask(draining_nodes, "draining nodes")
        living = {name: node for name in self._nodes.names if (node := self._nodes.living(name)) is not None}

        async def report(node: RayNode) -> HostReport | None:
            try:
                notice = await self._clock.within((await self._host_actors.of(node)).notice.remote(), REPORT_S)
            except (RayError, asyncio.TimeoutError) as error:
                log.debug("the host actor of %s reports no notices: %s", node.label, error)
                if node.id not in draining:
                    return None
                notice = None
            drain = Notice(cause="drain by Ray", until=draining[node.id]) if node.id in draining else None
            return HostReport(node.id, earliest((notice, drain)))

        reports = await asyncio.gather(*map(report, living.values()))
        return {name: report for name, report in zip(living, reports, strict=True) if report is not None}

    async def _call_or(self, default: T, host: str | None, method: str, *arguments: Any) -> T:
        """Returns the reply of the host's actor, as ``_call``; the default for a lost host."""
        try:
            reply: T = await self._call(host, method, *arguments)
        except HostLost:
            return default
        return reply

    async def _call(self, host: str | None, method: str, *arguments: Any) -> Any:
        """Returns the reply of the host's actor, or of another one on the same machine if its Ray node is dead: they
        share one kernel. Raises HostLost if none replies."""
        silent: set[str] = set()
        if host is not None and host not in self._nodes.names:  # of a revision that is being resolved
            self._nodes.names.append(host)
            await self._refresh_nodes()
        while True:
            node = self._nodes.of(host)
            machine = node or self._nodes.of(None)
            near = [other for other in self._nodes.all if machine is not None and other.address == machine.address]
            order = near if node is None else [node, *near]
            target = next((candidate for candidate in order if candidate.alive and candidate.id not in silent), None)
            if target is None:
                raise HostLost(f"no host actor replies for {host or 'this host'}")
            actor = None
            try:
                actor = await self._host_actors.of(target)
                call = getattr(actor, method).remote(*arguments)
                reply = await self._clock.within(call, CONFIRM_DEATH_S + CALL_DEADLINE_S)
                await self._note_host_process(target, actor)
                return reply
            except RayTaskError:
                raise  # it has replied with a failure
            except (RayError, asyncio.TimeoutError) as error:
                if isinstance(error, asyncio.TimeoutError) and await self._end_hung(target):
                    continue  # Ray starts another one
                self._host_processes.pop(target.id, None)
                current = self._host_actors.known(target)
                if current is not None and current is not actor:
                    continue  # it was replaced meanwhile
                log.warning("the host actor of %s does not reply: %s", target.label, str(error).partition("\n")[0])
                self._host_actors.forget(target)
                silent.add(target.id)
                await self._refresh_nodes()

    async def _note_host_process(self, node: RayNode, actor: Any) -> None:
        """Remember the process of a host actor, which cannot be asked for it once it hangs."""
        if node.id not in self._host_processes:
            with contextlib.suppress(RayError, asyncio.TimeoutError):
                process = await self._clock.within(actor.process.remote(), NEAR_S)
                self._host_processes[node.id] = Process(*process)

    async def _end_hung(self, node: RayNode) -> bool:
        """Kills a host actor that does not reply although its node lives. Returns whether it was running: its children
        end with it. A machine that is cut off cannot run the kill."""
        process = self._host_processes.pop(node.id, None)
        if process is None:
            return False
        log.error("the host actor of %s hangs and is replaced (pid %d)", node.label, process.pid)
        near = self._nodes.of(None)
        if near is not None and near.address == node.address:
            end_process(process)
            return True
        place = NodeAffinitySchedulingStrategy(node.id, soft=False)
        task = ray.remote(num_cpus=0)(end_process).options(scheduling_strategy=place).remote(process)
        with contextlib.suppress(RayError, asyncio.TimeoutError):
            await self._clock.within(task, CALL_DEADLINE_S)
            return True
        return False

    def actor_ids(self) -> Mapping[str, tuple[str, str]]:
        return {
            name: (actor._actor_id.hex(), node.id)
            for name, actor in self._actors.items()
            if name in self._configs and (node := self._nodes.living(self._configs[name].host)) is not None
        }

    async def survivors(self) -> tuple[Sequence[Survivor], Mapping[str, int]]:
        find = partial(find_survivors, self._head, self._clock, self._namespace, ADOPT_S if self._is_joined else NEAR_S)
        while True:
            with task_boundary(log, "the fleet's actors are not listed, and Ray is asked again", level=logging.WARNING):
                survivors, lost = await find()
                break
            await asyncio.sleep(SILENT_RETRY_S)
        for survivor, actor in survivors:
            name = actor_name(survivor.config.model, survivor.config.replica, survivor.config.epoch)
            self._actors[name], self._configs[name] = actor, survivor.config
            self._answered.add(name)
        return [survivor for survivor, _ in survivors], lost


@cache  # Ray stores each class once
def _actor_class(model: str) -> Any:
    """Returns the class of a model's replicas, whose name the dashboard shows."""
    return ray.remote(concurrency_groups={"ctl": 8})(type(f"Replica[{model}]", (Replica,), {}))
