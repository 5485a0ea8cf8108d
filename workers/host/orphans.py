"""Ends the replicas of a machine's former Ray node: a cut-off or frozen one ends them seconds after its successor may
have started."""

from __future__ import annotations

import contextlib
import logging

import psutil

from workers.host.host_facts import confirm_death
from workers.host.lifetime import process_start

log = logging.getLogger(__name__)

NODE_VARIABLE = "COREWRIGHT_RAY_NODE"  # in the environment of each replica on a joined cluster


def mark_of(fleet: str, machine: str, node: str) -> str:
    """Returns the value of the variable for a fleet's replicas on one Ray node of a machine."""
    return f"{fleet}|{machine}|{node}"


def is_orphan(mark: str, current: str) -> bool:
    """True if the replica with a mark belongs to a former node of the machine of the ``current`` mark."""
    return mark != current and mark.rpartition("|")[0] == current.rpartition("|")[0]


def end_orphans(current: str, deadline_s: float) -> list[int]:
    """Kills the replicas of former nodes, with their processes. Returns the pids of those that still exist after
    ``deadline_s`` for each."""
    orphans = {}
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):
            mark = psutil.Process(pid).environ().get(NODE_VARIABLE, "")
            if is_orphan(mark, current) and (started := process_start(pid)) is not None:
                orphans[pid] = started
    if orphans:
        log.warning("processes of this machine's former Ray node are killed: %s", sorted(orphans))
    return [pid for pid, started in orphans.items() if not confirm_death(pid, started, deadline_s)]
