"""The actors of a fleet's replicas: started, watched, found again after a restart of the controller, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.cluster.calls import CRASHED, DISCONNECTED, Head, cause_of_death
from orchestrator.cluster.hosts import CALL_DEADLINE_S, CONFIRM_DEATH_S, NEAR_S, HostActors
from orchestrator.cluster.nodes import ClusterNodes, RayNode
from orchestrator.cluster.ray_names import HOST_ACTOR
from orchestrator.control.decisions.replica_view import actor_name
from orchestrator.control.effects import HostLost, ReplicaDied, Survivor
from orchestrator.process.awake_clock import AwakeClock
from workers.host.lifetime import Process, end_process, is_stopped, pid_space, process_start
from workers.host.task_boundary import task_boundary
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure, ReplicaStatus
from workers.serving.dataplane import TLS_SCHEME
from workers.serving.replica import CONSOLE_VARIABLE, Replica

log = logging.getLogger(__name__)

WATCH_S = 5.0  # a watch returns at least this often
ADOPT_S = 30.0  # deadline of a live replica's description on a joined cluster, whose head may not be whole yet
UNLEASED_S = 60.0  # without a process of the replica, although Ray has its cores free
SILENT_S = 3.0  # deadline of a host that may be cut off
RETRY_S = 0.5
SILENT_RETRY_S = 1.0
LOOKUP_S = 30.0  # deadline of a lookup, which blocks until the head is whole
BY_SIGKILL = "was killed by SIGKILL"


@dataclass(eq=False)
class ReplicaActor:
    """One start of a replica."""

    config: ReplicaConfig
    actor: Any = None  # None: it is not registered
    registers: bool = False  # its actor is being registered: its process may start whenever the head is back
    has_replied: bool = False  # a later timeout means a hang
    process: tuple[int, float] | None = None  # the pid and the start of the process that its host watches


class ReplicaActors:
    """The replicas of a fleet, by their ``actor_name``. Used from one event loop."""

    def __init__(
        self, head: Head, nodes: ClusterNodes, hosts: HostActors, clock: AwakeClock, namespace: str, console: str
    ) -> None:
        """``console`` is the address of the web console, which replicas show in Ray's dashboard."""
        self._head = head
        self._nodes = nodes
        self._hosts = hosts
        self._clock = clock
        self._namespace = namespace
        self._console = console
        self._replicas: dict[str, ReplicaActor] = {}

    async def start(self, config: ReplicaConfig) -> None:
        node = await self._nodes.wait_living(config.place.host)
        if node is None:
            raise HostLost(f"the Ray node of {config.place.host} is gone")
        if config.run.listen or self._nodes.are_joined:  # there can be gateways of other machines
            config = config.with_run(listen=f"{TLS_SCHEME}://{node.url_host}:0")
        name = actor_name(config.model.name, config.place.replica, config.run.epoch)
        replica = self._replicas[name] = ReplicaActor(config, registers=True)
        try:  # without a deadline: it may be registered whenever the head is back
            create = partial(self._create, name, config, node, await self._runtime_env(name, config, node))
            replica.actor = await self._head.ask(create, name, None)
        finally:
            replica.registers = False

    async def _runtime_env(self, name: str, config: ReplicaConfig, node: RayNode) -> dict[str, Any]:
        """Returns the variables and the interpreter of a replica's process. All forks of a warm process get the same,
        so that a spare worker of Ray can become any replica; they set their own variables themselves."""
        shared = self.shared_variables(node)
        command: str | None = None
        if config.run.warm:
            try:
                command = await self._hosts.ask(
                    node, NEAR_S, "warm_command", config.model.engine, config.run.python, config.place.env
                )
            except (RayError, asyncio.TimeoutError) as error:
                log.warning("%s starts as a fresh process: %s", name, str(error).partition("\n")[0])
        if command is not None:
            return {"env_vars": shared, "py_executable": command}
        interpreter = {} if config.run.python is None else {"py_executable": config.run.python}
        return {"env_vars": {**config.place.env, **shared}, **interpreter}

    def shared_variables(self, node: RayNode) -> dict[str, str]:
        """Returns the variables that all replicas of a node have in their runtime environments."""
        return {**self._hosts.environment(node), CONSOLE_VARIABLE: self._console}

    def _create(self, name: str, config: ReplicaConfig, node: RayNode, runtime_env: dict[str, Any]) -> Any:
        """Register the actor of a replica. Blocks while the head is away."""
        return (
            _actor_class(config.model.name)
            .options(
                name=name,
                namespace=self._namespace,
                lifetime="detached",  # it survives a restart of the controller
                num_cpus=0,
                resources={f"nc{core}": 1.0 for core in config.place.cores},
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
                runtime_env=runtime_env,
            )
            .remote(config)
        )

    async def watch(self, name: str, seen: int) -> ReplicaStatus:
        while (replica := self._replicas.get(name)) is not None and replica.actor is not None:
            # A starting process cannot reply yet; the controller's start deadline covers it.
            deadline = WATCH_S + CALL_DEADLINE_S if replica.has_replied else UNLEASED_S
            try:
                status: ReplicaStatus = await self._clock.within(replica.actor.watch.remote(seen, WATCH_S), deadline)
            except asyncio.TimeoutError:
                if not replica.has_replied:
                    await self._free_leases(name, replica.config.place.host)
                elif not await self._is_host_silent(replica.config.place.host):
                    death = f"it has not replied for {WATCH_S + CALL_DEADLINE_S:.0f} s: its process hangs"
                    raise ReplicaDied(death) from None
            except RayTaskError as error:
                raise ReplicaDied(f"the actor failed: {error.cause}") from None
            except RayError as error:
                death = cause_of_death(error)
                if death != DISCONNECTED or not await self._is_host_silent(replica.config.place.host):
                    ending = await self._ending(replica) if death in (CRASHED, DISCONNECTED) else None
                    raise ReplicaDied(death if ending is None else f"its process {ending}") from None
                await asyncio.sleep(SILENT_RETRY_S)
            else:
                replica.has_replied = True
                await self._note_process(replica, status)
                return status
        raise ReplicaDied("it was ended")

    async def _free_leases(self, name: str, host: str) -> None:
        """Ends what may hold the cores that a replica waits for: idle workers with an unused lease."""
        with contextlib.suppress(HostLost, RayError):
            if pids := await self._hosts.call(host, "end_idle_workers", UNLEASED_S):
                log.warning("%s has no process after %.0f s: idle workers ended: %s", name, UNLEASED_S, pids)

    async def _is_host_silent(self, host: str) -> bool:
        """Returns whether the replica's host does not reply either, although Ray has it alive: it may be cut off, and
        serves until Ray's word. The hosts of a fleet's own Ray are this machine."""
        node = self._nodes.living(host) if self._nodes.are_joined else None
        if node is None:
            return False
        try:
            await self._hosts.ask(node, SILENT_S, "greeting")
        except (RayError, asyncio.TimeoutError):
            return True
        return False

    async def _note_process(self, replica: ReplicaActor, status: ReplicaStatus) -> None:
        """Have the replica's host watch its process, whose end Ray may not explain."""
        if replica.process is None:
            replica.process = status.pid, status.started
            if (node := self._nodes.living(replica.config.place.host)) is not None:
                with contextlib.suppress(RayError, asyncio.TimeoutError):
                    (await self._hosts.of(node)).watch_process.remote(status.pid, status.started)

    async def _ending(self, replica: ReplicaActor) -> str | None:
        """Returns how the replica's process ended, as reported by its host."""
        if replica.process is None:
            return None
        try:
            ending: str | None = await self._hosts.call(
                replica.config.place.host, "process_exit", *replica.process, replica.config.run.log
            )
        except (HostLost, RayError):
            return None
        return f"{ending}: manually, or by the kernel when out of memory" if ending == BY_SIGKILL else ending

    async def set_adapters(self, config: ReplicaConfig) -> Failure | None:
        replica = self._replicas.get(actor_name(config.model.name, config.place.replica, config.run.epoch))
        if replica is None or replica.actor is None:
            raise ReplicaDied("it was ended")
        try:
            failure: Failure | None = await replica.actor.set_adapters.remote(config)
        except RayError as error:
            raise ReplicaDied(cause_of_death(error)) from None
        return failure

    async def drain(self, name: str, timeout_s: float) -> bool:
        replica = self._replicas.get(name)
        if replica is None or replica.actor is None:
            return True
        try:
            return bool(await self._clock.within(replica.actor.drain.remote(timeout_s), timeout_s + CALL_DEADLINE_S))
        except asyncio.TimeoutError:
            return False
        except RayError:
            return True

    async def end(self, name: str, pid: int | None, started: float | None, host: str | None = None) -> bool:
        replica = self._replicas.get(name)
        if replica is not None and replica.registers:
            return False
        actor = None if replica is None else replica.actor
        if actor is not None:
            await self._kill(name, actor)
        if pid is None or started is None:
            dead = actor is None or await self._is_dead(actor)
        else:
            dead = await self._confirm_death(pid, started, host)
        if dead:
            self._replicas.pop(name, None)
        return dead

    async def _kill(self, name: str, actor: Any) -> None:
        """Kill the actor of a replica, if Ray's head replies."""
        with contextlib.suppress(RayActorError, ValueError, asyncio.TimeoutError):
            await self._head.ask(partial(ray.kill, actor, no_restart=True), f"kill {name}")

    async def _is_dead(self, actor: Any) -> bool:
        """Returns whether Ray knows that the actor of a replica has ended."""
        try:
            await self._clock.within(actor.watch.remote(0, 0.0), CALL_DEADLINE_S)
        except (RayError, asyncio.TimeoutError) as error:
            return isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError)
        return False

    async def _confirm_death(self, pid: int, started: float, host: str | None) -> bool:
        """Returns whether the process is gone. On a lost machine it is: Ray has declared its node dead."""
        try:
            return bool(await self._hosts.call(host, "confirm_death", pid, started, CONFIRM_DEATH_S))
        except HostLost:
            return self._nodes.living(host) is None

    def actor_ids(self) -> Mapping[str, tuple[str, str]]:
        return {
            name: (replica.actor._actor_id.hex(), node.id)
            for name, replica in self._replicas.items()
            if replica.actor is not None and (node := self._nodes.living(replica.config.place.host)) is not None
        }

    async def survivors(self) -> tuple[Sequence[Survivor], Mapping[str, int]]:
        while True:
            with task_boundary(log, "the fleet's actors are not listed, and Ray is asked again", level=logging.WARNING):
                return await self._find_survivors()
            await asyncio.sleep(SILENT_RETRY_S)

    async def _find_survivors(self) -> tuple[Sequence[Survivor], Mapping[str, int]]:
        """Raises an error of Ray, or asyncio.TimeoutError."""
        entries = await self._head.ask(partial(ray.util.list_named_actors, all_namespaces=True), "actors", LOOKUP_S)
        names = [
            entry["name"]
            for entry in entries
            if entry["namespace"] == self._namespace
            and "/" in entry["name"]
            and not entry["name"].startswith(HOST_ACTOR)
        ]
        survivors = await asyncio.gather(*map(self._survivor, names))
        lost: dict[str, int] = {}
        for name, survivor in zip(names, survivors, strict=True):
            if survivor is None:
                id, _, epoch = name.rpartition(".")
                lost[id] = max(int(epoch), lost.get(id, 0))
        return [survivor for survivor in survivors if survivor is not None], lost

    async def _survivor(self, name: str) -> Survivor | None:
        """Returns the replica if it replies, else kills it."""
        try:
            actor = await self._head.ask(partial(ray.get_actor, name, self._namespace), name, LOOKUP_S)
        except ValueError:
            return None
        try:
            reply_s = ADOPT_S if self._nodes.are_joined else NEAR_S
            config, status = await self._clock.within(_description(actor), reply_s)
        except (RayError, asyncio.TimeoutError) as error:
            log.warning("%s does not reply and is killed: %s", name, error)
            await self._kill(name, actor)
            with task_boundary(log, "the process of %s is not ended", name, level=logging.WARNING):
                await self._head.ask(partial(_end_stopped, actor), f"end {name}", LOOKUP_S)
            return None
        self._replicas[name] = ReplicaActor(config, actor, has_replied=True)
        return Survivor(config, status)


async def _description(actor: Any) -> Any:
    while True:
        try:
            return await actor.describe.remote()
        except ActorUnavailableError:  # the connection to it may come back
            await asyncio.sleep(RETRY_S)


def _end_stopped(actor: Any) -> None:
    """Kills the process of an actor of this machine that was stopped: `ray.kill` asks the process itself."""
    known = ray._private.state.actors(actor._actor_id.hex())
    if known and known["Pid"] and known["Address"]["IPAddress"] == ray.util.get_node_ip_address():
        pid = int(known["Pid"])
        if is_stopped(pid) and (started := process_start(pid)) is not None:
            end_process(Process(pid, started, pid_space()))


@cache  # Ray stores each class once
def _actor_class(model: str) -> Any:
    """Returns the class of a model's replicas, whose name the dashboard shows."""
    return ray.remote(concurrency_groups={"ctl": 8})(type(f"Replica[{model}]", (Replica,), {}))
