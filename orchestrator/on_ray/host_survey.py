"""Collects the versions of the machines of a Ray cluster, with a short task on each."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.fleet.host_greeting import HostGreeting
from orchestrator.on_ray.ray_nodes import HEAD, RayNode

THE_HEAD = "the head"  # of the cluster, which may also be a host
GREETING_S = 30.0  # for all machines together; a task starts a process, which takes a second on an idle machine


def greet(nodes: Iterable[RayNode], timeout_s: float = GREETING_S) -> dict[str, HostGreeting | str]:
    """Returns the report of each machine by its label, and of ``THE_HEAD``, or why there is none. Blocks for at most
    ``timeout_s``.

    The task is a function of the standard library, which runs this process's interpreter there: that of the machine's
    Ray may have no corewright, or another version.
    """
    run: Any = ray.remote(num_cpus=0, max_retries=0)(subprocess.run)
    command = [sys.executable, "-m", "orchestrator.on_ray.own_greeting"]
    places: dict[str, dict[str, Any]] = {
        node.label: {"scheduling_strategy": NodeAffinitySchedulingStrategy(node.id, soft=False)} for node in nodes
    }
    replies = {
        run.options(**place).remote(command, capture_output=True, text=True, cwd="/", timeout=timeout_s): label
        for label, place in (places | {THE_HEAD: {"resources": HEAD}}).items()
    }
    done, silent = ray.wait(list(replies), num_returns=len(replies), timeout=timeout_s)
    reports: dict[str, HostGreeting | str] = {}
    for reply in silent:
        ray.cancel(reply, force=True)
        reports[replies[reply]] = f"it has not run a task within {timeout_s:.0f} s"
    for reply in done:
        reports[replies[reply]] = _report(reply)
    return reports


def _report(reply: Any) -> HostGreeting | str:
    try:
        ended: subprocess.CompletedProcess[str] = ray.get(reply)
    except FileNotFoundError:  # a RayTaskError is also an instance of its cause
        return f"it has no {sys.executable}, the interpreter of this version of corewright"
    except ray.exceptions.RayError as error:
        lines = [line for line in str(error).splitlines() if "Error: " in line] or [type(error).__name__]
        return f"corewright does not run there: {lines[-1].strip()}"
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        return f"corewright does not run there: {lines[-1]}"
    return msgspec.json.decode(ended.stdout, type=HostGreeting)
