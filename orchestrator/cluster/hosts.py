"""The host actors of a fleet, one on each Ray node: found or started, admitted or left out, and called."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Collection
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.cluster.calls import Head, cause_of_death
from orchestrator.cluster.host_actor import HostActor
from orchestrator.cluster.host_greeting import own_greeting, unfit
from orchestrator.cluster.nodes import ClusterNodes, RayNode
from orchestrator.cluster.ray_names import HOST_ACTOR
from orchestrator.cluster.survey import GREETING_S
from orchestrator.control.effects import HostLost
from orchestrator.process.awake_clock import AwakeClock
from workers.artifacts.fetch.progress import FetchStatus
from workers.artifacts.store.store import StoreSettings
from workers.host.host_facts import NODE_VARIABLE, node_mark
from workers.host.lifetime import Process, end_process
from workers.host.task_boundary import task_boundary

log = logging.getLogger(__name__)

CALL_DEADLINE_S = 10.0  # a call takes a millisecond: no reply within this time means a hung process
CONFIRM_DEATH_S = 10.0
NEAR_S = 3.0  # for a reply of a host actor that has just replied


class HostActors:
    """The handles of a fleet's host actors. Used from one event loop."""

    def __init__(
        self, head: Head, nodes: ClusterNodes, clock: AwakeClock, store: StoreSettings, home: str, namespace: str
    ) -> None:
        """``namespace`` and ``home``, on a cluster that others started, distinguish the fleet's replicas from those of
        other fleets."""
        self._head = head
        self._nodes = nodes
        self._clock = clock
        self._namespace = namespace
        self._store = store
        self._home = home
        self._actors: dict[str, Any] = {}  # by node id
        self._processes: dict[str, Process] = {}  # by node id

    async def of(self, node: RayNode) -> Any:
        """Returns the node's actor. Raises an error of Ray, or asyncio.TimeoutError while the head is away."""
        if node.id not in self._actors:
            self._actors[node.id] = await self._head.ask(partial(self._start, node), f"host/{node.id}")
        return self._actors[node.id]

    async def prepare(self, node: RayNode) -> None:
        """Start the node's actor before the first call, if the head replies."""
        with task_boundary(log, "the host actor of %s is not started yet", node.label, level=logging.WARNING):
            await self.of(node)

    def forget(self, node: RayNode) -> None:
        """Find the node's actor again at its next call."""
        self._actors.pop(node.id, None)

    def environment(self, node: RayNode) -> dict[str, str]:
        """Returns the variables of replicas by which a later node of the machine recognizes them."""
        mark = self._mark(node)
        return {} if mark is None else {NODE_VARIABLE: mark}

    def _mark(self, node: RayNode) -> str | None:
        return node_mark(f"{self._namespace}{self._home}", node.label, node.id) if self._nodes.are_joined else None

    def _start(self, node: RayNode) -> Any:
        return HostActor.options(  # type: ignore[attr-defined]
            name=f"{HOST_ACTOR}{node.label}",
            namespace=self._namespace,
            get_if_exists=True,
            lifetime="detached",
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        ).remote(self._store, self._home, self._mark(node))

    async def ask(self, node: RayNode, deadline_s: float, method: str, *arguments: Any) -> Any:
        """Returns the reply of the node's actor within ``deadline_s``. Raises an error of Ray, or
        asyncio.TimeoutError."""
        return await self._clock.within(getattr(await self.of(node), method).remote(*arguments), deadline_s)

    async def replies(self, host: str, method: str, about: Any, each_s: float) -> AsyncGenerator[Any, None]:
        """Poll a host until the operation ends, and yield its status until its outcome. Raises HostLost.

        A restarted host actor resumes the operation. A streaming generator of Ray would not: its retry skips as many
        items as were consumed, so the outcome can be lost. It also continues after its consumer has died.
        """
        waiter, ended = secrets.token_hex(8), False
        try:
            while not ended:
                reply = await self.call(host, method, waiter, about, each_s)
                ended = not isinstance(reply, FetchStatus)
                yield reply
        finally:
            if not ended and (node := self._nodes.living(host)) is not None:
                actor = self._actors.get(node.id)
                if actor is not None:
                    actor.stop_waiting.remote(waiter)

    async def call(self, host: str | None, method: str, *arguments: Any) -> Any:
        """Returns the reply of the host's actor, or of another one on the same machine if its Ray node is dead: they
        share one kernel. Raises HostLost if none replies."""
        silent: set[str] = set()
        if host is not None and host not in self._nodes.names:  # of a revision that is being resolved
            self._nodes.names.append(host)
            await self._nodes.refresh()
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
                actor = await self.of(target)
                reply = await self.ask(target, CONFIRM_DEATH_S + CALL_DEADLINE_S, method, *arguments)
                await self._note_process(target)
                return reply
            except RayTaskError:
                raise  # it has replied with a failure
            except (RayError, asyncio.TimeoutError) as error:
                if isinstance(error, asyncio.TimeoutError) and await self._end_hung(target):
                    continue  # Ray starts another one
                self._processes.pop(target.id, None)
                current = self._actors.get(target.id)
                if current is not None and current is not actor:
                    continue  # it was replaced meanwhile
                log.warning("the host actor of %s does not reply: %s", target.label, str(error).partition("\n")[0])
                self.forget(target)
                silent.add(target.id)
                await self._nodes.refresh()

    async def _note_process(self, node: RayNode) -> None:
        """Remember the process of a host actor, which cannot be asked for it once it hangs."""
        if node.id not in self._processes:
            with contextlib.suppress(RayError, asyncio.TimeoutError):
                self._processes[node.id] = Process(*await self.ask(node, NEAR_S, "process"))

    async def _end_hung(self, node: RayNode) -> bool:
        """Kills a host actor that does not reply although its node lives. Returns whether it was running: its children
        end with it. A machine that is cut off cannot run the kill."""
        process = self._processes.pop(node.id, None)
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


class HostAdmission:
    """Judges each new host of a joined cluster once, by what it reports about itself. Used from one event loop."""

    def __init__(self, nodes: ClusterNodes, actors: HostActors, emulated: Collection[str]) -> None:
        """``emulated`` are the instance types whose machines have no devices."""
        self._nodes = nodes
        self._actors = actors
        self._emulated = emulated
        self._greeted: dict[str, asyncio.Task[None]] = {}  # by node id

    def greet(self) -> None:
        """Ask the machines that are new hosts for their versions."""
        used = set(self._nodes.labels.values())
        for node in self._nodes.all:
            if node.alive and node.label in used and node.id not in self._greeted:
                self._greeted[node.id] = asyncio.get_running_loop().create_task(self._judge(node))

    async def _judge(self, node: RayNode) -> None:
        """Leave the machine out if it cannot be a host."""
        while True:
            try:
                reply = await self._actors.ask(node, GREETING_S, "greeting")
                break
            except (RayError, asyncio.TimeoutError) as error:
                if isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError):
                    reply = f"corewright does not run there: {cause_of_death(error)}"
                    break
                log.warning("%s does not report its version: %s", node.label, error)
            await asyncio.sleep(GREETING_S)
            if not any(other.id == node.id and other.alive for other in self._nodes.all):
                return
        reason = unfit(reply, own_greeting(), emulated=node.instance in self._emulated)
        if reason is not None:
            log.error("%s is left out: %s", node.label, reason)
            self._nodes.unfit[node.id] = reason
            self._actors.forget(node)
