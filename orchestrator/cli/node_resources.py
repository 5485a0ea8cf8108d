"""The command `node-resources`: what a machine's Ray node must declare to be a host."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.app import FormatOption, app
from orchestrator.cli.output import Format, show
from orchestrator.fleet.node_declaration import NodeDeclaration
from orchestrator.process.failure import Failed
from placements.facts.topology import TOPOLOGIES, Topology
from workers.host import host_facts as this_host

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
    instance: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Instance type.", show_default="this machine's")
    ] = None,
    lnc: Annotated[
        int | None, typer.Option(min=1, max=2, help="Physical cores per logical core, on trn2.", show_default="2")
    ] = None,
    env: Annotated[bool, typer.Option("--env", help="Print lines for an environment file.")] = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Print the options of `ray start` that make a machine a host: its label and its cores."""
    try:
        declaration = NodeDeclaration(topology_of(instance).at_lnc(lnc))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--lnc") from None
    show(declaration.as_dict(), output, declaration.environment if env else declaration.arguments)
