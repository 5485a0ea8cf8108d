"""Implements the controller's effects with Ray: named actors, each on the node of its host."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec.structs
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.fleet.cluster_names import HOST_ACTOR, ray_name
from orchestrator.fleet.effects import CoreOwner, HostLost, HostReport, ReplicaDied, Survivor, actor_name
from orchestrator.fleet.host_greeting import unfit
from orchestrator.fleet.machine_claims import MachineClaims
from orchestrator.on_ray.calls import within
from orchestrator.on_ray.host_actor import HostActor
from orchestrator.on_ray.host_requests import end_host_actors, refused_types, request_machines
from orchestrator.on_ray.host_survey import GREETING_S
from orchestrator.on_ray.own_greeting import greeting
from orchestrator.on_ray.ray_kv import RayKeyValues
from orchestrator.on_ray.ray_nodes import RayNode, draining_nodes, host_labels, ray_nodes
from orchestrator.process.awake_clock import AwakeClock
from placements.facts.topology import Host
from workers.artifacts.fetch.artifact_fetcher import FetchedArtifact, WantedArtifact
from workers.artifacts.fetch.progress import FetchStatus
from workers.artifacts.store.store_settings import StoreSettings
from workers.host.interpreter import Interpreter
from workers.messages.metric_family import MetricFamily
from workers.messages.notice import Notice, earliest
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure, ReplicaStatus
from workers.serving.dataplane import TLS_SCHEME
from workers.serving.replica import Replica

log = logging.getLogger(__name__)

T = TypeVar("T")

WATCH_S = 5.0  # a watch returns at least this often
CALL_DEADLINE_S = 10.0  # a call takes a millisecond: no reply within this time means a hung process
ADOPT_S = 3.0  # deadline of a live replica's description, while no requests are accepted
CONFIRM_DEATH_S = 10.0
KEEP_S = 10.0  # deadline of the requests for machines
REPORT_S = 0.5  # deadline of one host's notice, while a round waits for all
LONG_S = 2.0  # one poll of a long operation
FETCH_S = 0.5  # the same of a fetch, whose progress is reported
UNKNOWN_ENDS = (
    "its process ended without an error: killed by a signal (out of memory?), or crashed",
    "the connection to its process was closed",
)
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
    ) -> None:
        """``store`` has the settings of each host's artifact store, ``home`` is the path of each host's home, and
        ``name`` the fleet's; the caller runs ``clock``. ``emulated``, on a cluster that others started: the
        instance types whose machines have no devices."""
        self._store = store
        self._home = home
        self._clock = clock
        self._namespace = ray_name(name)
        self._claims = None if emulated is None else MachineClaims(RayKeyValues(), name)
        self._name = name
        self._names: list[str] = []  # the planner's hosts
        self._kept: frozenset[str] | None = None  # those that are used; None: all
        self._labels: dict[str, str] = {}  # of Ray nodes, by the planner's host names
        self._here: str = ray.get_runtime_context().get_node_id()
        self._nodes: list[RayNode] = ray_nodes()
        self._refreshing = asyncio.Lock()
        self._emulated = emulated or ()
        self._greeted: dict[str, asyncio.Task[None]] = {}  # by node id
        self._unfit: dict[str, str] = {}  # reasons, by node id
        self._host_actors: dict[str, Any] = {}  # by node id
        self._answered: set[str] = set()  # replicas that have replied: a later timeout means a hang
        self._actors: dict[str, Any] = {}
        self._configs: dict[str, ReplicaConfig] = {}
        self._processes: dict[str, tuple[int, float]] = {}  # pid and start of replicas that their hosts watch

    def fetch(self, wanted: WantedArtifact, host: str) -> AsyncGenerator[FetchStatus | FetchedArtifact | Failure, None]:
        return self._replies(host, "fetch", wanted, FETCH_S)

    async def held_sources(self, sources: Collection[str]) -> Mapping[str, frozenset[str]]:
        async def held_by(host: str) -> frozenset[str]:
            try:
                return frozenset(await self._call(host, "stored_sources", list(sources)))
            except (HostLost, RayTaskError) as error:
                log.warning("%s does not report which sources it stores: %s", host, error)
                return frozenset()

        hosts = list(self._labels)
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
            if not ended and (node := self._node_of(host)) is not None and node.alive:
                self._host_actor(node).stop_waiting.remote(waiter)

    async def start(self, config: ReplicaConfig) -> None:
        node = self._node_of(config.host)
        if node is None or not node.alive:
            await self._refresh_nodes()
            node = self._node_of(config.host)
        if node is None or not node.alive:
            raise HostLost(f"the Ray node of {config.host} is gone")
        config = self._reachable(config, node)
        name = actor_name(config.model, config.replica, config.epoch)
        self._configs[name] = config
        named = type(f"Replica[{config.model}]", (Replica,), {})  # the dashboard shows the class name
        shown = ray.remote(concurrency_groups={"ctl": 8})(named)
        interpreter = {} if config.python is None else {"py_executable": config.python}
        self._actors[name] = shown.options(
            name=name,
            namespace=self._namespace,
            lifetime="detached",  # it survives a restart of the controller
            num_cpus=0,
            resources={f"nc{core}": 1.0 for core in config.cores},
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            runtime_env={"env_vars": config.env, **interpreter},
        ).remote(config)

    def _reachable(self, config: ReplicaConfig, node: RayNode) -> ReplicaConfig:
        """Returns the configuration with an address for gateways of other machines, if there can be any."""
        if not config.listen and self._claims is None:
            return config
        address = f"[{node.address}]" if ":" in node.address else node.address
        return msgspec.structs.replace(config, listen=f"{TLS_SCHEME}://{address}:0")

    def add_hosts(self, names: Iterable[str], kept: frozenset[str] | None = None) -> None:
        """Add the planner's hosts, in its order, so that ``lost_hosts`` reports missing ones. ``kept`` as in
        ``keep_hosts``."""
        self._names.extend(names)
        self._kept = kept
        self._labels = self._bind()
        used = set(self._labels.values())
        for node in self._nodes:
            if node.alive and (node.label in used or node.id == self._here):
                self._host_actor(node)  # before the first call

    def _bind(self) -> dict[str, str]:
        if self._claims is None:
            return host_labels(self._names)
        names = [name for name in self._names if self._kept is None or name in self._kept]
        return self._claims.bind(names, [node for node in self._nodes if node.id not in self._unfit])

    def _greet(self) -> None:
        """Ask the machines of a joined cluster that are new hosts for their versions."""
        used = set(self._labels.values())
        for node in self._nodes:
            if node.alive and node.label in used and node.id not in self._greeted:
                self._greeted[node.id] = asyncio.get_running_loop().create_task(self._judge(node))

    async def _judge(self, node: RayNode) -> None:
        """Leave the machine out if it cannot be a host."""
        try:
            reply = await self._clock.within(self._host_actor(node).greeting.remote(), GREETING_S)
        except RayActorError as error:
            reply = f"corewright does not run there: {_death(error)}"
        except (RayError, asyncio.TimeoutError) as error:
            log.warning("%s does not report its version: %s", node.label, error)
            return
        reason = unfit(reply, greeting(), emulated=node.instance in self._emulated)
        if reason is not None:
            log.error("%s is left out: %s", node.label, reason)
            self._unfit[node.id] = reason
            self._host_actors.pop(node.id, None)

    async def watch(self, name: str, seen: int) -> ReplicaStatus:
        # A starting process cannot reply yet; the controller's start deadline covers it.
        deadline = WATCH_S + CALL_DEADLINE_S if name in self._answered else None
        try:
            reply = self._actors[name].watch.remote(seen, WATCH_S)
            status: ReplicaStatus = await (reply if deadline is None else self._clock.within(reply, deadline))
            self._answered.add(name)
        except asyncio.TimeoutError:
            message = f"it has not replied for {WATCH_S + CALL_DEADLINE_S:.0f} s: its process hangs"
            raise ReplicaDied(message) from None
        except RayTaskError as error:
            raise ReplicaDied(f"the actor failed: {error.cause}") from None
        except RayError as error:
            death = _death(error)
            ending = await self._ending(name) if death in UNKNOWN_ENDS else None
            raise ReplicaDied(death if ending is None else f"its process {ending}") from None
        if name not in self._processes and (config := self._configs.get(name)) is not None:
            self._processes[name] = status.pid, status.started
            if (node := self._node_of(config.host)) is not None and node.alive:
                self._host_actor(node).watch_process.remote(status.pid, status.started)
        return status

    async def _ending(self, name: str) -> str | None:
        """Returns how the replica's process ended, as reported by its host."""
        if name not in self._processes:
            return None
        config, process = self._configs[name], self._processes[name]
        try:
            ending: str | None = await self._call(config.host, "process_exit", *process, config.log)
        except (HostLost, RayError):
            return None
        return f"{ending}: manually, or by the kernel when out of memory" if ending == BY_SIGKILL else ending

    async def set_adapters(self, config: ReplicaConfig) -> Failure | None:
        name = actor_name(config.model, config.replica, config.epoch)
        try:
            failure: Failure | None = await self._actors[name].set_adapters.remote(config)
        except RayError as error:
            raise ReplicaDied(_death(error)) from None
        return failure

    async def drain(self, name: str, timeout_s: float) -> bool:
        try:
            return bool(await self._actors[name].drain.remote(timeout_s))
        except RayError:
            return True

    async def end(self, name: str, pid: int | None, started: float | None, host: str | None = None) -> bool:
        actor = self._actors.get(name)
        if actor is not None:
            with contextlib.suppress(RayActorError, ValueError):
                ray.kill(actor, no_restart=True)
        if pid is None or started is None:
            dead = actor is None or await self._is_dead(actor)
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
            node = self._node_of(host)
            return node is None or not node.alive

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
            if (node := self._node_of(host)) is not None and node.alive:
                raise  # unknown owners must not be reported as none
            return {}
        return {core: CoreOwner(pid, command) for core, (pid, command) in held.items()}

    async def device_metrics(self, host: str) -> list[MetricFamily]:
        node = self._node_of(host)
        if node is None or not node.alive:
            return []  # no other host has these metrics
        measured: list[MetricFamily] = await self._host_actor(node).device_metrics.remote()
        return measured

    async def lost_hosts(self) -> frozenset[str]:
        await self._refresh_nodes()
        living = {node.label for node in self._nodes if node.alive and node.id not in self._unfit}
        return frozenset(name for name in self._names if self._labels.get(name) not in living)

    async def keep_hosts(self, hosts: Collection[str], elastic: Collection[Host]) -> Mapping[str, str]:
        self._kept = frozenset(hosts)
        await self._refresh_nodes()
        living = {node.label for node in self._nodes if node.alive and node.id not in self._unfit}
        requests = [host for host in elastic if self._labels.get(host.name) not in living]
        present = [node.id for node in self._nodes if node.alive and node.cores]
        used = {node.label for node in self._nodes if node.label in self._labels.values() or node.id == self._here}

        def keep() -> dict[str, str]:
            end_host_actors(self._name, used)
            request_machines(self._name, requests, present)
            return refused_types() if requests else {}

        for node in self._nodes:
            if node.label not in used:
                self._host_actors.pop(node.id, None)
        refused = await asyncio.to_thread(within, keep, KEEP_S)
        for node in self._nodes:
            if node.alive and node.instance is not None and node.id in self._unfit:
                refused[node.instance] = f"{node.label} is left out: {self._unfit[node.id]}"
        types = {host.name.rpartition("/")[0] for host in requests}
        return {name: reason for name, reason in refused.items() if name in types}

    async def host_reports(self) -> Mapping[str, HostReport]:
        draining = await asyncio.to_thread(draining_nodes)
        living = {name: node for name in self._names if (node := self._node_of(name)) is not None and node.alive}

        async def report(node: RayNode) -> HostReport | None:
            try:
                notice = await self._clock.within(self._host_actor(node).notice.remote(), REPORT_S)
            except (RayError, asyncio.TimeoutError) as error:
                log.debug("the host actor of %s reports no notices: %s", node.label, error)
                if node.id not in draining:
                    return None
                notice = None
            drain = Notice(cause="drain by Ray", until=draining[node.id]) if node.id in draining else None
            return HostReport(node.id, earliest((notice, drain)))

        reports = await asyncio.gather(*map(report, living.values()))
        return {name: report for name, report in zip(living, reports, strict=True) if report is not None}

    async def _refresh_nodes(self) -> None:
        async with self._refreshing:
            self._nodes = await asyncio.to_thread(ray_nodes)
            self._labels = await asyncio.to_thread(self._bind)
            if self._claims is not None:
                self._greet()

    def _node_of(self, host: str | None) -> RayNode | None:
        """Returns the Ray node of a host, preferably a live one; without ``host``, the node of this process."""
        label = None if host is None else self._labels.get(host)
        nodes = [node for node in self._nodes if (node.id == self._here if host is None else node.label == label)]
        return max(nodes, key=lambda node: node.alive, default=None)

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
        if host is not None and host not in self._names:  # of a revision that is being resolved
            self._names.append(host)
            await self._refresh_nodes()
        while True:
            node = self._node_of(host)
            machine = node or self._node_of(None)
            near = [other for other in self._nodes if machine is not None and other.address == machine.address]
            order = near if node is None else [node, *near]
            target = next((candidate for candidate in order if candidate.alive and candidate.id not in silent), None)
            if target is None:
                raise HostLost(f"no host actor replies for {host or 'this host'}")
            try:
                call = getattr(self._host_actor(target), method).remote(*arguments)
                return await self._clock.within(call, CONFIRM_DEATH_S + CALL_DEADLINE_S)
            except RayTaskError:
                raise  # it has replied with a failure
            except (RayError, asyncio.TimeoutError) as error:
                log.warning("the host actor of %s does not reply: %s", target.label, str(error).partition("\n")[0])
                self._host_actors.pop(target.id, None)
                silent.add(target.id)
                await self._refresh_nodes()

    def _host_actor(self, node: RayNode) -> Any:
        if node.id not in self._host_actors:
            self._host_actors[node.id] = HostActor.options(  # type: ignore[attr-defined]
                name=HOST_ACTOR + node.label,
                namespace=self._namespace,
                get_if_exists=True,
                lifetime="detached",
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            ).remote(self._store, self._home)
        return self._host_actors[node.id]

    async def survivors(self) -> tuple[Sequence[Survivor], Mapping[str, int]]:
        names = [
            entry["name"]
            for entry in ray.util.list_named_actors(all_namespaces=True)
            if entry["namespace"] == self._namespace
            and "/" in entry["name"]
            and not entry["name"].startswith(HOST_ACTOR)
        ]
        survivors = await asyncio.gather(*(self._survivor(name) for name in names))
        lost: dict[str, int] = {}
        for name, survivor in zip(names, survivors, strict=True):
            if survivor is None:
                id, _, epoch = name.rpartition(".")
                lost[id] = max(int(epoch), lost.get(id, 0))
        return [survivor for survivor in survivors if survivor is not None], lost

    async def _survivor(self, name: str) -> Survivor | None:
        """Returns the replica's description; None if it does not reply, which kills it."""
        try:
            actor = ray.get_actor(name, self._namespace)
        except ValueError:
            return None
        try:
            config, status = await self._clock.within(actor.describe.remote(), ADOPT_S)
        except (RayError, asyncio.TimeoutError) as error:
            log.warning("%s does not reply and is killed: %s", name, error)
            ray.kill(actor, no_restart=True)
            return None
        self._actors[name], self._configs[name] = actor, config
        self._answered.add(name)
        return Survivor(config, status)

    async def _is_dead(self, actor: Any) -> bool:
        try:
            await self._clock.within(actor.watch.remote(0, 0.0), CALL_DEADLINE_S)
        except RayActorError:
            return True
        except (RayError, asyncio.TimeoutError):
            return False
        return False


def _death(error: RayError) -> str:
    """Returns Ray's cause of an actor's death, without its advice and frames."""
    text = str(error)
    if "killed by `ray.kill`" in text:
        return "it was killed"
    if "SYSTEM_ERROR" in text:  # Ray noticed only the closed connection
        return UNKNOWN_ENDS[0]
    if "is not schedulable" in text:
        return "its host is lost"
    if "temporarily unavailable" in text:  # the connection was closed before Ray knows the cause
        return UNKNOWN_ENDS[1]
    if "creation task" in text:
        return text.strip().splitlines()[-1]
    return text.splitlines()[0] if text else type(error).__name__
