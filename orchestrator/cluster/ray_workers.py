"""Idle workers of Ray on one machine: ends those that hold an unused lease, and keeps one for each warm process.

A start that takes over a worker which runs nothing yet takes 0.15 s until its actor runs, in place of the second in
which Ray starts a process (measured with Ray 2.60). Ray takes a worker over for an actor of the same job and runtime
environment if it has run nothing before. Those of a job whose driver has ended do not stay, so there are none on a
joined cluster.

The request for a worker is an internal call of Ray, which another version may not have. Ray then runs the command of a
warm process, or a fresh Python, at the time of the start.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import psutil
import ray
from google.protobuf import json_format

from workers.host.host_facts import NODE_VARIABLE
from workers.host.task_boundary import task_boundary

log = logging.getLogger(__name__)

IDLE = "ray::IDLE"


def end_idle_workers(raylet: int, older_s: float, mark: str | None) -> list[int]:
    """Ends the idle workers of a raylet that have run for ``older_s`` seconds, and returns their pids.

    On a joined cluster, ``mark`` is that of the fleet's replicas, whose variables a worker has when Ray leases it for
    one. The idle workers of other jobs may own objects.

    A worker that Ray leases to a GCS which ends meanwhile stays idle, and its cores stay taken: the restarted GCS asks
    only for the return of the leases that were granted before (Ray 2.60). Ray starts other workers when it needs them.
    """
    ended = []
    for worker in psutil.Process(raylet).children(recursive=True):  # some are forks of a warm process
        with contextlib.suppress(psutil.Error):  # it has ended
            if worker.cmdline()[:1] != [IDLE] or time.time() - worker.create_time() < older_s:
                continue
            if worker.environ().get(NODE_VARIABLE) == mark:
                worker.kill()
                ended.append(worker.pid)
    return ended


LOOK_S = 1.0
START_S = 20.0  # a worker that does not exist after this time is requested again
KEPT_S = 24 * 3600  # then Ray may end an idle worker; another one is requested
REQUEST_S = 5.0


class NotInThisRay(Exception):
    """This version of Ray has no request for an idle worker, or another one than `prestart` makes."""


class SpareWorkers:
    """Those of one Ray node, looked after by a thread."""

    def __init__(self, warm: Callable[[], Mapping[str, int]]) -> None:
        """``warm`` returns the pids of the warm processes without a start in progress, by the commands of their
        forks."""
        self._warm = warm
        self._requested: dict[int, float] = {}  # until when one may be starting, by the pid of its warm process
        self._job, self._variables = "", dict[str, str]()
        self._can_request = True
        self._thread = threading.Thread(target=self._run, name="spare workers", daemon=True)

    def keep(self, job: str, variables: dict[str, str]) -> None:
        """Keeps them for actors of this job with these variables in their runtime environments."""
        self._job, self._variables = job, variables
        if self._thread.ident is None:
            self._thread.start()

    def _run(self) -> None:
        while self._can_request:
            with task_boundary(log, "no worker of Ray is kept for the next start"):
                self._look()
            time.sleep(LOOK_S)

    def _look(self) -> None:
        for command, pid in self._warm().items():
            now = time.monotonic()
            if has_spare(pid):
                self._requested.pop(pid, None)
            elif now >= self._requested.get(pid, now):
                self._requested[pid] = now + START_S
                try:
                    prestart(self._job, {"env_vars": self._variables, "py_executable": command})
                except NotInThisRay as error:
                    self._can_request = False
                    log.warning(
                        "Ray %s keeps no worker for the next start, which forks one: %s", ray.__version__, error
                    )
                    return


def has_spare(pid: int) -> bool:
    """Returns whether a fork of a warm process is a worker that runs nothing, or becomes one."""
    with contextlib.suppress(psutil.NoSuchProcess):  # the warm process has ended
        warm = psutil.Process(pid)
        started = warm.cmdline()  # a fork has it until Ray gives it a title
        return any(title[:1] == [IDLE] or title == started for title in map(_title, warm.children()))
    return True


def _title(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def prestart(job: str, runtime_env: dict[str, Any]) -> None:
    """Has Ray start an idle worker on this node for actors of a job with this runtime environment. Raises NotInThisRay,
    and grpc.RpcError if this node does not answer."""
    id = ray.get_runtime_context().get_node_id()
    (node,) = (node for node in ray.nodes() if node["NodeID"] == id)
    try:
        _request_worker(node["NodeManagerAddress"], node["NodeManagerPort"], job, runtime_env)
    except (ImportError, AttributeError, LookupError, TypeError, ValueError, json_format.ParseError) as error:
        raise NotInThisRay(f"{type(error).__name__}: {error}") from error
    except grpc.RpcError as error:
        if error.code() != grpc.StatusCode.UNIMPLEMENTED:
            raise
        raise NotInThisRay(error.details()) from error


def _request_worker(address: str, port: int, job: str, runtime_env: dict[str, Any]) -> None:
    """Raises what the lack of an internal module, function, field or call of Ray raises."""
    from ray._common.network_utils import build_address
    from ray._private.grpc_utils import init_grpc_channel
    from ray._private.utils import get_runtime_env_info
    from ray.core.generated.common_pb2 import Language
    from ray.core.generated.node_manager_pb2 import PrestartWorkersRequest
    from ray.core.generated.node_manager_pb2_grpc import NodeManagerServiceStub
    from ray.runtime_env import RuntimeEnv

    request = PrestartWorkersRequest(
        language=Language.PYTHON, job_id=bytes.fromhex(job), keep_alive_duration_secs=KEPT_S, num_workers=1
    )
    json_format.Parse(get_runtime_env_info(RuntimeEnv(**runtime_env), serialize=True), request.runtime_env_info)
    with init_grpc_channel(build_address(address, port)) as channel:
        NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=REQUEST_S)
