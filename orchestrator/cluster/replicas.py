"""The replicas"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from orchestrator.cluster.calls import Head
from orchestrator.fleet.cluster_names import HOST_ACTOR
from orchestrator.fleet.effects import Survivor
from orchestrator.process.awake_clock import AwakeClock
from workers.host.lifetime import Process, end_process, is_stopped, pid_space, process_start
from workers.host.task_boundary import task_boundary

log = logging.getLogger(__name__)

LOOKUP_S = 30.0  # deadline of a lookup, which blocks until the head is whole
RETRY_S = 0.5
DEAD_S = 10.0


async def find_survivors(
    head: Head, clock: AwakeClock, namespace: str, reply_s: float
) -> tuple[Sequence[tuple[Survivor, Any]], Mapping[str, int]]:
    """Returns the living replicas with their actors, and the epochs by id of those that have not replied within
    ``reply_s`` and were killed. Raises an error of Ray, or asyncio.TimeoutError."""
    entries = await head.ask(partial(ray.util.list_named_actors, all_namespaces=True), "actors", LOOKUP_S)
    names = [
        entry["name"]
        for entry in entries
        if entry["namespace"] == namespace and "/" in entry["name"] and not entry["name"].startswith(HOST_ACTOR)
    ]
    replies = await asyncio.gather(*(_survivor(head, clock, namespace, name, reply_s) for name in names))
    lost: dict[str, int] = {}
    for name, survivor in zip(names, replies, strict=True):
        if survivor is None:
            id, _, epoch = name.rpartition(".")
            lost[id] = max(int(epoch), lost.get(id, 0))
    return [survivor for survivor in replies if survivor is not None], lost


async def _survivor(
    head: Head, clock: AwakeClock, namespace: str, name: str, reply_s: float
) -> tuple[Survivor, Any] | None:
    try:
        actor = await head.ask(partial(ray.get_actor, name, namespace), name, LOOKUP_S)
    except ValueError:
        return None
    try:
        config, status = await clock.within(_description(actor), reply_s)
    except (RayError, asyncio.TimeoutError) as error:
        log.warning("%s does not reply and is killed: %s", name, error)
        await kill(head, name, actor)
        with task_boundary(log, "the process of %s is not ended", name, level=logging.WARNING):
            await head.ask(partial(_end_stopped, actor), f"end {name}", LOOKUP_S)
        return None
    return Survivor(config, status), actor


def _end_stopped(actor: Any) -> None:
    """Kills the process of an actor of this machine that was stopped: `ray.kill` asks the process itself."""
    known = ray._private.state.actors(actor._actor_id.hex())
    if known and known["Pid"] and known["Address"]["IPAddress"] == ray.util.get_node_ip_address():
        pid = int(known["Pid"])
        if is_stopped(pid) and (started := process_start(pid)) is not None:
            end_process(Process(pid, started, pid_space()))


async def _description(actor: Any) -> Any:
    while True:
        try:
            return await actor.describe.remote()
        except ActorUnavailableError:  # the connection to it may come back
            await asyncio.sleep(RETRY_S)


async def kill(head: Head, name: str, actor: Any) -> None:
    """Kill the actor of a replica, if Ray's head replies."""
    with contextlib.suppress(RayActorError, ValueError, asyncio.TimeoutError):
        await head.ask(partial(ray.kill, actor, no_restart=True), f"kill {name}")


async def is_dead(clock: AwakeClock, actor: Any) -> bool:
    """Returns whether Ray knows that the actor of a replica has ended."""
    try:
        await clock.within(actor.watch.remote(0, 0.0), DEAD_S)
    except ActorUnavailableError:
        return False
    except RayActorError:
        return True
    except (RayError, asyncio.TimeoutError):
        return False
    return False
