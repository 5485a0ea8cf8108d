"""All Ray calls: starting Ray on one machine, the named actors, and what the controller does to replicas."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.effects import ReplicaDied, Survivor, actor_name
from workers import host
from workers.claims import held_cores
from workers.config import ReplicaConfig
from workers.replica import Replica
from workers.status import ReplicaStatus

log = logging.getLogger(__name__)

NAMESPACE = "corewright"
CONTROLLER = "controller"
WATCH_S = 5.0  # a watch answers at least this often
CALL_DEADLINE_S = 10.0  # silence for longer is a hung process: a call takes a millisecond
ADOPT_S = 3.0  # for a living replica to say what it is, while nobody is served anew
CONFIRM_DEATH_S = 10.0
OBJECT_STORE_BYTES = 100 * 2**20  # tokens go over sockets: Ray's store stays all but empty

# Health checks that find a dead host in seconds; at Ray's defaults it takes 13 s, and 65 s for a frozen one.
_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


def core_resources(cores: int) -> dict[str, float]:
    """The custom resources that a node with that many NeuronCores declares: one a core, so that Ray itself refuses a
    second actor on the same core."""
    return {f"nc{core}": 1.0 for core in range(cores)}


def start_ray(folder: Path, *, cores: int, cpus: int, dashboard: bool) -> dict[str, Any]:
    """Start a Ray of our own, whose processes die with this thread's process. Gives Ray's addresses.

    Raises RuntimeError when Ray does not come up.
    """
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # the monitor kills replicas while they load
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.pop("NEURON_RT_VISIBLE_CORES", None)  # the raylet misreads a range as one accelerator
    os.environ.pop("NEURON_RT_NUM_CORES", None)
    os.environ.pop("RAY_ADDRESS", None)
    context = ray.init(
        num_cpus=cpus,
        resources=core_resources(cores),
        labels={"corewright-host": "emu-0"},
        include_dashboard=dashboard,
        dashboard_host="127.0.0.1",
        object_store_memory=OBJECT_STORE_BYTES,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level="error",
        _temp_dir=str(folder),
        _node_ip_address="127.0.0.1",
        _system_config=_HEALTH_CHECKS,
    )
    return dict(context.address_info)


def stop_ray() -> None:
    """End the Ray that ``start_ray`` started."""
    ray.shutdown()


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=16)
class HostActor:
    """What the controller asks of one host (one for each Ray node)."""

    def confirm_death(self, pid: int, started: float, deadline_s: float) -> bool:
        return host.confirm_death(pid, started, deadline_s)

    def log_tail(self, path: str, lines: int) -> list[str]:
        return host.log_tail(Path(path), lines)

    def held_cores(self, claims: str) -> dict[int, int | None]:
        return held_cores(Path(claims))


class RayCluster:
    """``effects.Cluster`` on one machine's Ray. Used from one event loop."""

    def __init__(self) -> None:
        node = ray.get_runtime_context().get_node_id()
        self._here = NodeAffinitySchedulingStrategy(node, soft=False)
        self._host = HostActor.options(  # type: ignore[attr-defined]
            name=f"host/{node[:8]}", namespace=NAMESPACE, get_if_exists=True, scheduling_strategy=self._here
        ).remote()
        self._actors: dict[str, Any] = {}

    async def start(self, config: ReplicaConfig) -> None:
        name = actor_name(config.model, config.replica, config.epoch)
        named = type(f"Replica[{config.model}]", (Replica,), {})  # the dashboard shows the class's name
        shown = ray.remote(concurrency_groups={"ctl": 8})(named)
        self._actors[name] = shown.options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",  # a controller that is started again finds it alive
            num_cpus=0,
            resources={f"nc{core}": 1.0 for core in config.cores},
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=self._here,
            runtime_env={"env_vars": config.env},
        ).remote(config)

    async def watch(self, name: str, seen: int) -> ReplicaStatus:
        try:
            status: ReplicaStatus = await asyncio.wait_for(
                _of(self._actors[name].watch.remote(seen, WATCH_S)), WATCH_S + CALL_DEADLINE_S
            )
        except asyncio.TimeoutError:
            what = f"it has not answered for {WATCH_S + CALL_DEADLINE_S:.0f} s: its process hangs"
            raise ReplicaDied(what) from None
        except RayTaskError as error:
            raise ReplicaDied(f"the actor failed: {error.cause}") from None
        except RayError as error:
            raise ReplicaDied(_death(error)) from None
        return status

    async def drain(self, name: str, timeout_s: float) -> bool:
        try:
            return bool(await self._actors[name].drain.remote(timeout_s))
        except RayError:
            return True

    async def end(self, name: str, pid: int | None, started: float | None) -> bool:
        actor = self._actors.get(name)
        if actor is not None:
            with contextlib.suppress(RayActorError, ValueError):
                ray.kill(actor, no_restart=True)
        if pid is None or started is None:
            dead = actor is None or await self._is_dead(actor)
        else:
            dead = bool(await self._host.confirm_death.remote(pid, started, CONFIRM_DEATH_S))
        if dead:
            self._actors.pop(name, None)
        return dead

    async def log_tail(self, path: str, lines: int) -> list[str]:
        tail: list[str] = await self._host.log_tail.remote(path, lines)
        return tail

    async def held_cores(self, claims: str) -> dict[int, int | None]:
        held: dict[int, int | None] = await self._host.held_cores.remote(claims)
        return held

    async def survivors(self) -> tuple[Sequence[Survivor], Mapping[str, int]]:
        names = [
            entry["name"]
            for entry in ray.util.list_named_actors(all_namespaces=True)
            if entry["namespace"] == NAMESPACE and "/" in entry["name"] and not entry["name"].startswith("host/")
        ]
        found = await asyncio.gather(*(self._survivor(name) for name in names))
        lost: dict[str, int] = {}
        for name, survivor in zip(names, found, strict=True):
            if survivor is None:
                id, _, epoch = name.rpartition(".")
                lost[id] = max(int(epoch), lost.get(id, 0))
        return [survivor for survivor in found if survivor is not None], lost

    async def _survivor(self, name: str) -> Survivor | None:
        """What the replica says of itself; None, and its end, when it says nothing."""
        try:
            actor = ray.get_actor(name, NAMESPACE)
        except ValueError:
            return None
        try:
            config, status = await asyncio.wait_for(_of(actor.describe.remote()), ADOPT_S)
        except (RayError, asyncio.TimeoutError) as error:
            log.warning("%s does not answer and is ended: %s", name, error)
            ray.kill(actor, no_restart=True)
            return None
        self._actors[name] = actor
        return Survivor(config, status)

    async def _is_dead(self, actor: Any) -> bool:
        try:
            await asyncio.wait_for(_of(actor.watch.remote(0, 0.0)), CALL_DEADLINE_S)
        except RayActorError:
            return True
        except (RayError, asyncio.TimeoutError):
            return False
        return False


async def _of(reference: Any) -> Any:
    return await reference


def _death(error: RayError) -> str:
    """Ray's account of an actor's death, without its advice and frames."""
    text = str(error)
    if "killed by `ray.kill`" in text:
        return "it was ended"
    if "SYSTEM_ERROR" in text:  # Ray saw only the end of its connection
        return "its process ended without a word: killed by a signal (for want of memory?), or crashed"
    if "creation task" in text:
        return text.strip().splitlines()[-1]
    return text.splitlines()[0] if text else type(error).__name__
