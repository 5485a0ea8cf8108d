"""Operations on models and hosts beside the spec: `scale`, `load`, `unload`, `cordon`, `uncordon`, `drain`,
`hosts wait` and `node-resources`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

import typer

from orchestrator.cli.app import (
    INTERRUPTED,
    FormatOption,
    ModelArgument,
    app,
    argument,
    bad_parameter,
    group,
    names_of,
    option,
    switch,
)
from orchestrator.cli.client import AdminClient, the_fleet
from orchestrator.cli.output import Format, say, show
from orchestrator.cluster.ray_names import NodeDeclaration
from orchestrator.messages.fleet_status import FleetStatus, HostInFleet
from orchestrator.process.failure import Failed
from placements.facts.core_range import CoreRange
from placements.facts.plural import plural
from placements.facts.topology import TOPOLOGIES, Topology
from workers.host import host_facts as this_host

CoresArgument = Annotated[
    str,
    argument(
        "HOST[:CORES]", "A host, or some of its cores, such as inf2.48xlarge/0:0-3.", autocompletion=names_of("hosts")
    ),
]


@app.command()
def scale(
    model: ModelArgument,
    count: Annotated[str, argument("N|auto", "Number of replicas; auto returns control to the autoscaler.")],
    output: FormatOption = Format.TABLE,
) -> None:
    """Set the number of replicas of a model, overriding the spec."""
    if count != "auto" and not (count.isascii() and count.isdecimal() and len(count) < 6):
        raise typer.BadParameter(f"{count!r} is neither a number nor auto", param_hint="N|auto")
    number = None if count == "auto" else int(count)
    answer = the_fleet().post("scale", {"model": model, "count": number})
    replicas = f"{count} {plural(number or 0, 'replica')}"
    show(answer, output, f"{model}: {'as the spec says' if number is None else replicas}")


@app.command()
def load(model: ModelArgument, output: FormatOption = Format.TABLE) -> None:
    """Start a model that has no replicas."""
    show(the_fleet().post("load", {"model": model}), output, f"{model}: loading")


@app.command()
def unload(model: ModelArgument, output: FormatOption = Format.TABLE) -> None:
    """Stop all replicas of a model until `load`. Requests do not start any."""
    show(the_fleet().post("unload", {"model": model}), output, f"{model}: unloading")


@app.command()
def cordon(where: CoresArgument, output: FormatOption = Format.TABLE) -> None:
    """Stop placing replicas on a host or some of its cores. Running replicas stay."""
    _cordon(where, "cordon", output)


@app.command()
def uncordon(where: CoresArgument, output: FormatOption = Format.TABLE) -> None:
    """Allow placing replicas on a host or some of its cores again."""
    _cordon(where, "uncordon", output)


def _cordon(where: str, verb: str, output: Format) -> None:
    host, _, cores = where.partition(":")
    if ":" in where:
        with bad_parameter("HOST[:CORES]"):
            CoreRange.parse(cores)
    answer = the_fleet().post(verb, {"host": host, "cores": cores or None})
    show(answer, output, f"{host}{f' cores {cores}' if cores else ''}: {verb}ed")


@app.command()
def drain(
    target: Annotated[
        str,
        argument("HOST|REPLICA", "Name of a host, or ID of a replica.", autocompletion=names_of("hosts", "replicas")),
    ],
    deadline_s: Annotated[
        float | None,
        option(
            "S",
            "Empty a host within S seconds; replicas without another place stop meanwhile.",
            default="no deadline",
            min=1,
        ),
    ] = None,
    keep_served: Annotated[
        bool, switch("--keep-served", "Refuse a deadline by which a model would have no replica at all.")
    ] = False,
    wait: Annotated[bool, switch("--wait", "Wait until the host is empty, or the replica is replaced.")] = False,
    timeout: Annotated[
        float | None, option("S", "Timeout of --wait, in seconds; the drain continues.", default="no timeout", min=0)
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Empty a host, or replace one replica. A drained host is cordoned."""
    if keep_served and deadline_s is None:
        raise typer.BadParameter("is for a drain with --deadline-s", param_hint="--keep-served")
    if timeout is not None and not wait:
        raise typer.BadParameter("is for --wait", param_hint="--timeout")
    client = the_fleet()
    body = {"target": target} | ({} if deadline_s is None else {"deadline_s": deadline_s, "keep_served": keep_served})
    reply = client.post("drain", body)
    if not wait:
        show(reply, output, f"{target}: draining")
        return
    if "epoch" in reply:
        wait_replaced(client, target, reply["epoch"], timeout)
        show(reply, output, f"{target}: replaced")
    else:
        show(wait_empty(client, target, timeout), output, f"{target}: empty")


POLL_S = 0.5
DRAIN_CONTINUES = "the drain continues; `corewright uncordon HOST` ends that of a host"

hosts = group("hosts", "Wait for a host, between the steps of its maintenance.")


@hosts.command("wait")
def wait(
    name: Annotated[str, argument("HOST", "Name of the host.", autocompletion=names_of("hosts"))],
    after: Annotated[str | None, option("NODE", "Wait until its Ray node is not NODE.", default="any")] = None,
    timeout: Annotated[float | None, option("S", "Timeout, in seconds.", default="no timeout", min=0)] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Wait until the host is there, and every replica that has a place is ready."""

    def unmet(status: FleetStatus) -> str | None:
        host = host_of(status, name)
        if host.state != "ready" or host.node in (None, after):
            return f"{name} is not back"
        return None if status.settled else "not every replica is ready"

    status = wait_until(the_fleet(), unmet, timeout, "see `corewright status`")
    show(host_of(status, name), output, f"{name}: ready")


def wait_until(
    client: AdminClient, unmet: Callable[[FleetStatus], str | None], timeout_s: float | None, hint: str
) -> FleetStatus:
    """Returns the status once its condition holds, also over a restart of the controller.

    Raises Failed `wait-late` with what ``unmet`` returns at the timeout, and typer.Exit on Ctrl-C."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        while True:
            status = client.read(FleetStatus, "status", retry=True)
            reason = unmet(status)
            if reason is None:
                return status
            if deadline is not None and time.monotonic() >= deadline:
                raise Failed("wait-late", f"after {timeout_s:g} s {reason}", hint)
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        say("stopped waiting")
        raise typer.Exit(INTERRUPTED) from None


def wait_empty(client: AdminClient, name: str, timeout_s: float | None) -> HostInFleet:
    """Returns a drained host once it has neither replicas nor requests. Raises Failed if it is uncordoned meanwhile."""

    def unmet(status: FleetStatus) -> str | None:
        host = host_of(status, name)
        if not host.draining:
            raise Failed("drain-ended", f"{name} was uncordoned meanwhile", "corewright drain begins again")
        return f"{name} is not empty: {host.busy} replicas and requests" if host.busy else None

    return host_of(wait_until(client, unmet, timeout_s, DRAIN_CONTINUES), name)


def wait_replaced(client: AdminClient, id: str, epoch: int, timeout_s: float | None) -> None:
    """Returns once the replica of that epoch is gone, and its successor is ready."""

    def unmet(status: FleetStatus) -> str | None:
        runs = any((replica.id, replica.epoch) == (id, epoch) for replica in status.replicas)
        return f"{id} is not replaced" if runs or not status.settled else None

    wait_until(client, unmet, timeout_s, DRAIN_CONTINUES)


def host_of(status: FleetStatus, name: str) -> HostInFleet:
    """Returns the host of that name. Raises Failed."""
    host = next((host for host in status.hosts if host.name == name), None)
    if host is None:
        names = ", ".join(host.name for host in status.hosts)
        raise Failed("host-unknown", f"the fleet has no host {name}", f"existing hosts: {names or 'none'}")
    return host


TYPES = ", ".join(TOPOLOGIES)


def topology_of(instance: str | None) -> Topology:
    """Returns the topology of an instance type, by default this machine's. Raises Failed if it has none."""
    name = instance or this_host.instance_type()
    if (topology := TOPOLOGIES.get(name or "")) is not None:
        return topology
    machine = "has no Neuron devices" if name is None else f"is of type {name}, which is not supported"
    message = f"this machine {machine}" if instance is None else f"{instance} is not a supported instance type"
    raise Failed("no-neuron-instance", message, f"set --instance to one of {TYPES}; without devices it is emulated")


@app.command("node-resources")
def node_resources(
    instance: Annotated[str | None, option("TYPE", "Instance type.", default="this machine's")] = None,
    lnc: Annotated[
        int | None,
        typer.Option(min=1, max=2, help="Physical cores per logical core, on trn2 and trn3.", show_default="2"),
    ] = None,
    env: Annotated[bool, switch("--env", "Print lines for an environment file.")] = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Print the options of `ray start` that make a machine a host: its label and its cores."""
    try:
        declaration = NodeDeclaration(topology_of(instance).at_lnc(lnc))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--lnc") from None
    show(declaration.as_dict(), output, declaration.environment if env else declaration.arguments)
