"""The commands `scale`, `load`, `unload`, `cordon`, `uncordon` and `drain`: manual changes beside the spec."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.app import DeadlineOption, FormatOption, ModelArgument, app, bad_parameter
from orchestrator.cli.client import the_fleet
from orchestrator.cli.fleet_names import names_of
from orchestrator.cli.hosts import wait_empty, wait_replaced
from orchestrator.cli.output import Format, show
from placements.facts.core_range import CoreRange
from placements.facts.plural import plural

CoresArgument = Annotated[
    str,
    typer.Argument(
        metavar="HOST[:CORES]",
        help="A host, or some of its cores, such as inf2.48xlarge/0:0-3.",
        autocompletion=names_of("hosts"),
    ),
]


@app.command()
def scale(
    model: ModelArgument,
    count: Annotated[
        str, typer.Argument(metavar="N|auto", help="Number of replicas; auto returns control to the autoscaler.")
    ],
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
        typer.Argument(
            metavar="HOST|REPLICA",
            help="Name of a host, or ID of a replica.",
            autocompletion=names_of("hosts", "replicas"),
        ),
    ],
    deadline_s: DeadlineOption = None,
    keep_served: Annotated[
        bool, typer.Option("--keep-served", help="Refuse a deadline by which a model would have no replica at all.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the host is empty, or the replica is replaced.")
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="S", help="Timeout of --wait, in seconds; the drain continues.", show_default="no timeout"
        ),
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
