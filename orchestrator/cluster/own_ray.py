"""The Ray cluster that `up` starts on its machine, and ends."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from orchestrator.cluster.nodes import HOST_LABEL, host_label
from orchestrator.cluster.ray_names import core_resources, ray_name
from placements.facts.topology import Host
from workers.host.host_facts import usable_cpus
from workers.host.task_boundary import task_boundary

log = logging.getLogger(__name__)

NODES_STOP_S = 2.5  # for all further nodes together: a second to stop cleanly, then they are killed
OBJECT_STORE_BYTES = 100 * 2**20  # tokens use sockets: Ray's store is almost empty
STARTS = 8  # of workers at once, at least: the demo has as many; Ray's limit is the CPUs, and waiting ones count, too
BOARD = Path(__file__).parent / "replica_board.json"  # see `name_board`
UID = "corewright-replicas"
VARIABLE = "RAY_GRAFANA_DATA_DASHBOARD_UID"  # set by users for a board of their own

# All nodes are on one machine. A dead raylet refuses the connection: its host is lost after three attempts, in 3 s. An
# unresponsive one, on a busy machine or because it was stopped, has 3 timeouts and 2 periods, 32 s: its loss would end
# the fleet.
HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 3,
}


class OwnRay:
    """A cluster of the fleet's own, with a Ray node for each emulated host. It ends with this process."""

    def __init__(self, name: str, hosts: Sequence[Host], *, dashboard: bool) -> None:
        """``name`` is the fleet's."""
        self._name = name
        self._hosts = hosts
        self._dashboard = dashboard
        self._further: list[Any] = []  # the Ray nodes of the hosts except the first

    def start(self, folder: Path, proceed: Callable[[], None]) -> dict[str, Any]:
        """Start it, with its files in ``folder``, and return Ray's addresses. ``proceed`` is called before each node.

        Must run on the main thread: a raylet dies with the thread that made it. Raises RuntimeError or another error of
        Ray if it does not start.
        """
        proceed()
        addresses = self._start_head(folder)
        for index, host in enumerate(self._hosts[1:], start=1):
            proceed()
            self._further.append(add_node(index, cores=host.cores, cpus=len(usable_cpus())))
        return addresses

    def _start_head(self, folder: Path) -> dict[str, Any]:
        os.environ.setdefault("RAY_worker_niceness", "0")
        os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # the monitor kills replicas while they load
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.pop("NEURON_RT_VISIBLE_CORES", None)  # the raylet misreads a range as one accelerator
        os.environ.pop("NEURON_RT_NUM_CORES", None)
        os.environ.pop("RAY_ADDRESS", None)
        name_board()
        cpus = len(usable_cpus())
        with _node_parameters(dashboard_agent_listen_port=0, include_log_monitor=False):  # not arguments of `init`
            context = ray.init(
                num_cpus=cpus,
                resources=core_resources(max((host.cores for host in self._hosts), default=0)),
                labels={HOST_LABEL: host_label(0)},
                include_dashboard=self._dashboard,
                dashboard_host="127.0.0.1",
                object_store_memory=OBJECT_STORE_BYTES,
                namespace=ray_name(self._name),
                log_to_driver=False,
                logging_level="error",
                _temp_dir=str(folder),
                _node_ip_address="127.0.0.1",
                _system_config={**HEALTH_CHECKS, "worker_maximum_startup_concurrency": max(cpus, STARTS)},
            )
        if self._dashboard:
            write_board(Path(context.address_info["session_dir"]))
        return dict(context.address_info)

    @property
    def is_connected(self) -> bool:
        return bool(ray.is_initialized())

    def stop(self) -> None:
        """Stop the further nodes concurrently, then the first."""
        stopping = [
            threading.Thread(
                target=node.kill_all_processes, kwargs={"check_alive": False, "allow_graceful": True}, daemon=True
            )
            for node in self._further
        ]
        for thread in stopping:
            thread.start()
        deadline = time.monotonic() + NODES_STOP_S
        for thread in stopping:
            thread.join(max(0.0, deadline - time.monotonic()))
        ray.shutdown()


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
    """Start the Ray node of a further emulated host, and wait until it is registered. It inherits the environment
    (token, fleet's mark) and uses the first node's session folder. Raises RuntimeError or another error of Ray if it
    does not start.

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


def name_board() -> None:
    """Has a Ray that this process starts embed the Grafana board of the replicas, if Grafana runs.

    Ray 2.60 embeds two boards in its dashboard's Metrics tab by their uids: its own for tasks and nodes, which other
    pages use as well, and its own for Ray Data, which no fleet uses. Ours takes the place of the second: its uid by
    Ray's variable, its content in the file that Ray writes for a Grafana of its own configuration.
    """
    os.environ.setdefault(VARIABLE, UID)


def write_board(session: Path) -> None:
    """Replaces the board that Ray has written for Ray Data, which has the same uid now. Requires that Ray's dashboard
    has started, in the folder ``session``."""
    if os.environ.get(VARIABLE) != UID:
        return
    root = Path(os.environ.get("RAY_METRICS_OUTPUT_ROOT") or session / "metrics")
    folder = Path(os.environ.get("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR") or root / "grafana" / "dashboards")
    with task_boundary(log, "Grafana will not find the board of the replicas"):
        shutil.copyfile(BOARD, folder / "data_grafana_dashboard.json")
