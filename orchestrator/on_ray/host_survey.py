"""Collects the versions of the machines of a Ray cluster, with a short task on each."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.fleet.host_greeting import HostGreeting
from orchestrator.on_ray.ray_nodes import RayNode
from orchestrator.process.version import corewright_version
from workers.host import host_facts as this_host

GREETING_S = 30.0  # for all machines together; a task starts a process, which takes a second on an idle machine


def greeting() -> HostGreeting:
    """Returns the report of this machine."""
    folder = Path(__file__).parent.parent.parent
    return HostGreeting(corewright_version(), str(folder), this_host.has_devices())


def greet(nodes: Iterable[RayNode], timeout_s: float = GREETING_S) -> dict[str, HostGreeting | str]:
    """Returns the report of each machine by its label, or why there is none. Blocks for at most ``timeout_s``."""
    task: Any = ray.remote(num_cpus=0, max_retries=0)(greeting)
    replies = {
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(): node.label
        for node in nodes
    }
    done, silent = ray.wait(list(replies), num_returns=len(replies), timeout=timeout_s) if replies else ([], [])
    reports: dict[str, HostGreeting | str] = {}
    for reply in silent:
        ray.cancel(reply, force=True)
        reports[replies[reply]] = f"it has not run a task within {timeout_s:.0f} s"
    for reply in done:
        try:
            reports[replies[reply]] = ray.get(reply)
        except ray.exceptions.RayError as error:
            lines = [line for line in str(error).splitlines() if "Error: " in line] or [type(error).__name__]
            reports[replies[reply]] = f"corewright does not run there: {lines[-1].strip()}"
    return reports
