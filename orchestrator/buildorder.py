"""Which compiles of this host run at once: as many as its memory allows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from workers.config import ReplicaConfig


@dataclass(frozen=True, kw_only=True)
class Job:
    """One build: of all models whose replicas look for the same artifacts."""

    models: tuple[str, ...]
    config: ReplicaConfig  # of the first of them
    keys: tuple[str, ...]  # of its artifacts; empty where they follow only from weights that nobody has read yet
    need_gib: float  # of this host's memory while it is compiled
    complete: bool = False  # nothing is to be compiled


def startable(waiting: Sequence[Job], running: Collection[Job], *, memory_gib: float, jobs: int) -> tuple[Job, ...]:
    """Which of ``waiting``, in their order, are begun beside those that run.

    1. At most ``jobs`` run at once.
    2. Their needs together stay within ``memory_gib``; one that does not fit lets those behind it pass.
    3. A job that needs more than all of it runs alone: what it needs is an estimate.
    """
    begun: list[Job] = []
    used = sum(job.need_gib for job in running)
    for job in waiting:
        if len(running) + len(begun) >= jobs:  # 1
            break
        alone = not running and not begun
        if alone or used + job.need_gib <= memory_gib:  # 3, 2
            begun.append(job)
            used += job.need_gib
    return tuple(begun)
