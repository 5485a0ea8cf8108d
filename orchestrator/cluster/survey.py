"""Finds out which machines of a joined cluster can be the hosts of a spec."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.cluster.host_greeting import HostGreeting, unfit
from orchestrator.cluster.machine_claims import Member, bind_hosts
from orchestrator.cluster.nodes import HEAD, RayNode
from orchestrator.cluster.ray_names import NodeDeclaration
from orchestrator.process.failure import Failed
from placements.facts.topology import TOPOLOGIES, Host, Topology
from placements.planner.spec_hosts import DEFAULT_EMULATION


def survey(
    hosts: Sequence[Host],
    members: Sequence[Member],
    greetings: Mapping[str, HostGreeting | str],
    own: HostGreeting,
    taken: Collection[str] = (),
    elastic: bool = False,
) -> Iterator[str]:
    """Yields a line for the machines of each type, each machine that is left out, and each host without a machine.

    ``members`` are the machines of the cluster, ``greetings`` their reports by label, ``own`` that of this process,
    and ``taken`` the machines of other fleets. Raises Failed if no machine can be a host, unless the spec is
    ``elastic``, or if one has fewer core resources than its instance type has cores.
    """
    usable: list[Member] = []
    emulated = emulated_types(hosts)
    for member in members:
        topology = TOPOLOGIES.get(member.instance or "")
        if not member.alive or topology is None:
            continue
        if not member.cores:
            yield f"{member.label} is left out: it has no core resources; {_start_hint(topology)}"
            continue
        if member.cores < topology.cores:
            message = f"{member.label} has {member.cores} core resources, and an {member.instance} has {topology.cores}"
            raise Failed("core-resources-missing", message, _start_hint(topology))
        reason = unfit(greetings.get(member.label, "it has not answered"), own, emulated=topology.instance in emulated)
        if reason is None:
            usable.append(member)
        else:
            yield f"{member.label} is left out: {reason}"
    if not usable and not elastic:
        message = "no machine of the Ray cluster can be a host: it needs core resources and the label "
        message += "corewright-instance, and this version of corewright"
        raise Failed("no-hosts-on-cluster", message, _start_hint(hosts[0].topology if hosts else None))
    for instance, count in Counter(member.instance for member in usable).items():
        kind = ", emulated" if instance in emulated else ""
        yield f"{instance}: {count} machine{'s' if count > 1 else ''}{kind}, corewright {own.version} in {own.folder}"
    bound = bind_hosts((host.name for host in hosts), {}, usable, taken)
    for host in hosts:
        if host.name not in bound:
            then = "one is requested when it is needed" if elastic else "it counts as lost until one joins"
            yield f"{host.name}: no machine of the Ray cluster is free for it; {then}"


def emulated_types(hosts: Sequence[Host]) -> frozenset[str]:
    """Returns the instance types that the spec emulates."""
    return frozenset(host.topology.instance for host in hosts if host.emulated and host.topology is not None)


def _start_hint(topology: Topology | None) -> str:
    """Returns how a machine becomes a host."""
    declaration = NodeDeclaration(topology or TOPOLOGIES[DEFAULT_EMULATION])
    command = f"ray start --address=HEAD:6379 {declaration.arguments}"
    return f"start its Ray node with what `corewright node-resources` prints there: {command}"


THE_HEAD = "the head"  # of the cluster, which may also be a host
GREETING_S = 30.0  # for all machines together; a task starts a process, which takes a second on an idle machine


def greet(nodes: Iterable[RayNode], timeout_s: float = GREETING_S) -> dict[str, HostGreeting | str]:
    """Returns the report of each machine by its label, and of ``THE_HEAD``, or why there is none. Blocks for at most
    ``timeout_s``.

    The task is a function of the standard library, which runs this process's interpreter there: that of the machine's
    Ray may have no corewright, or another version.
    """
    run: Any = ray.remote(num_cpus=0, max_retries=0)(subprocess.run)
    command = [sys.executable, "-m", "orchestrator.cluster.host_greeting"]
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
