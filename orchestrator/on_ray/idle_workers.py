"""Ends workers of Ray that hold a lease which nobody uses."""

from __future__ import annotations

import contextlib
import time

import psutil

IDLE = "ray::IDLE"


def end_idle_workers(raylet: int, older_s: float) -> list[int]:
    """Ends the idle workers of a raylet that have run for ``older_s`` seconds, and returns their pids.

    A worker that Ray leases to a GCS which ends meanwhile stays idle, and its cores stay taken: the restarted GCS asks
    only for the return of the leases that were granted before (Ray 2.60). Ray starts other workers when it needs them.
    """
    ended = []
    for worker in psutil.Process(raylet).children():
        with contextlib.suppress(psutil.Error):  # it has ended
            if worker.cmdline()[:1] == [IDLE] and time.time() - worker.create_time() >= older_s:
                worker.kill()
                ended.append(worker.pid)
    return ended
