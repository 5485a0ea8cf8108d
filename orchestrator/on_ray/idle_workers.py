"""Kills Ray workers that hold an unused lease."""

from __future__ import annotations

import contextlib
import time

import psutil

from workers.host.orphans import NODE_VARIABLE

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
