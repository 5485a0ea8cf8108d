"""Raylets with emulated cores on this machine, and bare actors on them."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.fleet import until

CORES = 24
DEADLINE_S = 60.0
LIGHT = {"include_log_monitor": False, "object_store_memory": 80_000_000}
SETTINGS = {  # a dead raylet is noticed as on a Ray of `up`'s own
    "RAY_AUTH_MODE": "disabled",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
ENVIRONMENT = {"env_vars": {"BARE": "1"}}  # so that Ray starts a process, as for a replica


class Bare:
    """An actor without any work of its own."""

    def node(self) -> str:
        import ray

        node: str = ray.get_runtime_context().get_node_id()
        return node


class Raylets:
    """A head without cores, and raylets that can be killed and started again. The driver is this process."""

    def __init__(self, stack: contextlib.ExitStack, count: int) -> None:
        import ray
        from ray.cluster_utils import Cluster

        os.environ |= SETTINGS
        os.environ["RAY_TMPDIR"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="cwr-", dir="/tmp"))
        self._cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **LIGHT}
        )
        stack.callback(self._cluster.shutdown)
        self.address: str = self._cluster.address
        for index in range(count):
            self._add(index, wait=False)
        self._cluster.wait_for_nodes()
        ray.init(address=self.address, namespace="bare", log_to_driver=False)
        stack.callback(ray.shutdown)
        self._ray = ray

    def _add(self, index: int, *, wait: bool) -> None:
        resources = {"bare": 1, **{f"nc{core}": 1 for core in range(CORES)}}
        labels = {"corewright-host": f"w{index}", "corewright-instance": "inf2.48xlarge"}
        self._cluster.add_node(wait=wait, num_cpus=1, resources=resources, labels=labels, **LIGHT)

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"] and "nc0" in node["Resources"]]

    def _actor(self, **options: Any) -> Any:
        return self._ray.remote(num_cpus=0, runtime_env=ENVIRONMENT)(Bare).options(**options).remote()

    def bare_start_s(self, cores: int) -> float:
        """Returns the seconds in which one actor on each host, with so many cores, replies. None is left."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = self._nodes()
        until(lambda: self._free() == len(nodes), DEADLINE_S, "the first core of each host is free")
        began = time.perf_counter()
        resources = {f"nc{core}": 1 for core in range(cores)}
        places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
        actors = [self._actor(resources=resources, scheduling_strategy=place) for place in places]
        self._ray.get([actor.node.remote() for actor in actors], timeout=DEADLINE_S)
        seconds = time.perf_counter() - began
        for actor in actors:
            self._ray.kill(actor)
        until(lambda: self._free() == len(nodes), DEADLINE_S, "the cores of the bare actors are free")
        return seconds

    def _free(self) -> int:
        return int(self._ray.available_resources().get("nc0", 0))

    def _restartable(self, node: str) -> Any:
        """Returns an actor on that node which Ray restarts on another one. An affinity would not do: a hard one
        binds its restarts, and a soft one need not be followed."""
        actors = [self._actor(resources={"bare": 1}, max_restarts=-1) for _ in self._nodes()]
        nodes = self._ray.get([actor.node.remote() for actor in actors], timeout=DEADLINE_S)
        for actor, place in zip(actors, nodes, strict=True):
            if place != node:
                self._ray.kill(actor)
        return actors[nodes.index(node)]

    @contextlib.contextmanager
    def lost(self, raylet: int) -> Iterator[tuple[float, Callable[[], float]]]:
        """Kills the raylet with that pid, with a bare actor on its host. Yields the time of the kill, and a function
        that returns when the actor replies again, in seconds after it. Then the host joins again."""
        node = next(node for node in self._cluster.worker_nodes if raylet in _raylets(node))
        [index] = [entry["Labels"]["corewright-host"][1:] for entry in self._nodes() if entry["NodeID"] == node.node_id]
        actor = self._restartable(node.node_id)
        began = time.perf_counter()
        node.kill_raylet()

        def back_s() -> float:
            while time.perf_counter() - began < DEADLINE_S:
                with contextlib.suppress(self._ray.exceptions.RayActorError, self._ray.exceptions.GetTimeoutError):
                    if self._ray.get(actor.node.remote(), timeout=1.0) != node.node_id:
                        return time.perf_counter() - began
                time.sleep(0.01)
            raise RuntimeError(f"the bare actor did not reply within {DEADLINE_S:.0f} s")

        yield began, back_s
        self._ray.kill(actor)
        self._cluster.remove_node(node, allow_graceful=False)
        self._add(int(index), wait=True)


def _raylets(node: Any) -> Sequence[int]:
    """Returns the pids of the node's raylet."""
    from ray._private import ray_constants

    return [info.process.pid for info in node.all_processes.get(ray_constants.PROCESS_TYPE_RAYLET, ())]
