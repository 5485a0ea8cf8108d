"""Starts, stops and lists Ray's nodes on one machine."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.fleet.cluster_names import ray_name
from orchestrator.fleet.effects import Loss
from orchestrator.fleet.gateway_places import ClusterMachine, GatewayPlace
from orchestrator.fleet.host_binding import Member
from orchestrator.fleet.node_declaration import CORE_RESOURCE, INSTANCE_LABEL, core_resources
from orchestrator.on_ray.grafana_board import name_board, write_board

CONTROLLER = "controller"  # the name of the actor
NODES_STOP_S = 2.5  # for all further nodes together: a second to stop cleanly, then they are killed
OBJECT_STORE_BYTES = 100 * 2**20  # tokens use sockets: Ray's store is almost empty
STARTS = 8  # of workers at once, at least: the demo has as many; Ray's limit is the CPUs, and waiting ones count, too
HOST_LABEL = "corewright-host"  # of a Ray node: the host that it represents; default: its address
IDLE_TERMINATION = 4  # Ray's number of this cause of a node's death
HEAD_RESOURCE = "node:__internal_head__"
HEAD = {HEAD_RESOURCE: 0.001}  # a share of the resource that Ray gives the head, and each new head

# All nodes are on one machine. A dead raylet refuses the connection: its host is lost after three attempts, in 3 s. An
# unresponsive one, on a busy machine or because it was stopped, has 3 timeouts and 2 periods, 32 s: its loss would end
# the fleet.
HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 3,
}


def host_label(index: int) -> str:
    """Returns the Ray node label of the planner's host ``index``."""
    return f"emu-{index}"


def host_labels(names: Iterable[str]) -> dict[str, str]:
    """Returns the label of each host, given the names in the planner's order."""
    return {name: host_label(index) for index, name in enumerate(names)}


def start_ray(folder: Path, name: str, *, cores: int, cpus: int, dashboard: bool) -> dict[str, Any]:
    """Start a private Ray for the fleet ``name``, whose processes die with this thread's process. Returns Ray's
    addresses.

    Raises RuntimeError if Ray does not start.
    """
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # the monitor kills replicas while they load
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.pop("NEURON_RT_VISIBLE_CORES", None)  # the raylet misreads a range as one accelerator
    os.environ.pop("NEURON_RT_NUM_CORES", None)
    os.environ.pop("RAY_ADDRESS", None)
    name_board()
    with _node_parameters(dashboard_agent_listen_port=0, include_log_monitor=False):  # not arguments of `init`
        context = ray.init(
            num_cpus=cpus,
            resources=core_resources(cores),
            labels={HOST_LABEL: host_label(0)},
            include_dashboard=dashboard,
            dashboard_host="127.0.0.1",
            object_store_memory=OBJECT_STORE_BYTES,
            namespace=ray_name(name),
            log_to_driver=False,
            logging_level="error",
            _temp_dir=str(folder),
            _node_ip_address="127.0.0.1",
            _system_config={**HEALTH_CHECKS, "worker_maximum_startup_concurrency": max(cpus, STARTS)},
        )
    if dashboard:
        write_board(Path(context.address_info["session_dir"]))
    return dict(context.address_info)


def join_ray(address: str, name: str) -> dict[str, Any]:
    """Connect to the Ray cluster at ``address`` (`HOST:PORT`, `auto`) for the fleet ``name``. Returns Ray's addresses.

    Blocks for half a minute if the head does not reply. Raises ConnectionError, RuntimeError (versions differ) or
    another error of Ray.
    """
    context = ray.init(address=address, namespace=ray_name(name), log_to_driver=False, logging_level="error")
    return dict(context.address_info)


@contextlib.contextmanager
def _node_parameters(**parameters: Any) -> Iterator[None]:
    """Make ``ray.init`` start a node with these parameters.

    At the fixed default port, 52365, the dashboard agent of a machine's second Ray has no port and is never registered:
    the dashboard then shows no logs, "Agent for node id ... doesn't exist" (Ray 2.60). The log monitor only sends the
    output of workers to drivers, which ``log_to_driver`` turns off: it takes 2 % of a CPU and 70 MB.
    """
    module = ray._private.parameter
    plain = module.RayParams
    module.RayParams = functools.partial(plain, **parameters)
    try:
        yield
    finally:
        module.RayParams = plain


def add_node(index: int, *, cores: int, cpus: int) -> Any:
    """Start the Ray node of a further emulated host, and wait until it is registered. Pass it to ``stop_ray``.

    Must run on the main thread: the raylet dies with the thread that made it. It inherits the environment (token,
    fleet's mark) and uses the first node's session folder. Raises RuntimeError or another error of Ray if it does not
    start.

    This uses Ray's own class in this process instead of `ray start --address --block`. Measured with Ray 2.60 on 2
    shared cores: 1.1 to 2.1 s and 139 MB (proportional; raylet 15, dashboard agent 76, runtime env agent 48) for each
    node, against 3.9 s and 282 MB with `ray start`, which keeps two more Python processes and of which two concurrent
    ones took one socket name and killed each other.
    """
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    head = ray._private.worker.global_worker.node
    parameters = RayParams(
        gcs_address=head.gcs_address,
        node_ip_address=head.node_ip_address,
        num_cpus=cpus,
        resources=core_resources(cores),
        labels={HOST_LABEL: host_label(index)},
        object_store_memory=OBJECT_STORE_BYTES,
        include_log_monitor=False,  # one per machine
        dashboard_agent_listen_port=0,  # at its default the agent tries the first node's port for 4 s
        min_worker_port=0,
        max_worker_port=0,
    )
    # no exit hook: it would replace our signal handlers. The "reaper" is the kernel's parent-death signal.
    return Node(parameters, head=False, shutdown_at_exit=False, spawn_reaper=True)


def stop_ray(further: Sequence[Any] = ()) -> None:
    """Stop the ``further`` nodes concurrently, then the Ray that ``start_ray`` started."""
    stopping = [
        threading.Thread(
            target=node.kill_all_processes, kwargs={"check_alive": False, "allow_graceful": True}, daemon=True
        )
        for node in further
    ]
    for thread in stopping:
        thread.start()
    deadline = time.monotonic() + NODES_STOP_S
    for thread in stopping:
        thread.join(max(0.0, deadline - time.monotonic()))
    ray.shutdown()


def leave_ray() -> None:
    """Disconnect from the cluster that was joined."""
    ray.shutdown()


def here() -> NodeAffinitySchedulingStrategy:
    """Returns the strategy that schedules only on the Ray node of this process."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def own_interpreter() -> dict[str, Any]:
    """Returns the option that runs an actor in this process's interpreter, at the same path on the actor's machine,
    instead of that of Ray there. The actors that it starts inherit the option."""
    return {"runtime_env": {"py_executable": sys.executable}}


@dataclass(frozen=True)
class RayNode(Member):
    """A Ray node as Ray last reported it."""

    id: str
    address: str  # of the machine: emulated hosts share one
    loss: Loss | None = None  # of a dead one
    is_head: bool = False
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def url_host(self) -> str:
        """The address as in a URL."""
        return f"[{self.address}]" if ":" in self.address else self.address

    def machine(self, host: str | None) -> ClusterMachine:
        """Returns it as a place of gateways; ``host`` is the planner's."""
        return ClusterMachine(GatewayPlace(self.label, self.id), self.address, host, self.is_head, self.labels)


def ray_nodes() -> list[RayNode]:
    """Returns every node that Ray knows, including dead ones. Takes 2 ms."""
    return [_ray_node(node) for node in ray.nodes()]


def draining_nodes() -> dict[str, float | None]:
    """Returns the nodes that Ray drains, with the Unix time of their end; None: there is no deadline. Blocks while
    Ray's head is away."""
    draining = ray._private.state.state.get_draining_nodes()
    return {id: deadline_ms / 1000 if deadline_ms else None for id, deadline_ms in draining.items()}


def _ray_node(node: dict[str, Any]) -> RayNode:
    resources, address = node["Resources"], node["NodeManagerAddress"]
    return RayNode(
        label=node["Labels"].get(HOST_LABEL, address),
        instance=node["Labels"].get(INSTANCE_LABEL),
        alive=node["Alive"],
        cores=sum(CORE_RESOURCE.fullmatch(name) is not None for name in resources),
        cpus=int(resources.get("CPU", 0)),
        id=node["NodeID"],
        address=address,
        loss=None if node["Alive"] else loss_of(node.get("DeathReason", 0), node.get("DeathReasonMessage", "")),
        is_head=HEAD_RESOURCE in resources,
        labels=node["Labels"],
    )


def loss_of(reason: int, message: str) -> Loss:
    """Returns Ray's cause of a node's death, by its number (`NodeDeathInfo.Reason`) and its text."""
    text = " ".join(message.split()).rstrip(".")
    expected = reason == IDLE_TERMINATION
    return Loss(f"its Ray node is gone: {text}" if text else "its Ray node is gone", expected)
