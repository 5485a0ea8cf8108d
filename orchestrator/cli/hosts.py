"""The commands of `hosts`: maintenance of one host after the other."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer

from orchestrator.cli.app import DeadlineOption, FormatOption, group
from orchestrator.cli.client import PLAN_DEADLINE_S, the_fleet
from orchestrator.cli.output import Format, show
from orchestrator.cli.tables import roll_line

hosts = group("hosts", "Maintain one host after the other, while every model is served.")


class Wait(str, Enum):
    NONE = "none"
    OPERATOR = "operator"
    NODE = "node"


@hosts.command("roll")
def roll(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="HOST", help="Hosts, in this order.", show_default="all")
    ] = None,
    wait: Annotated[
        Wait,
        typer.Option(help="What an empty host waits for: none, operator (`hosts continue`), node (a new Ray node)."),
    ] = Wait.NONE,
    deadline_s: DeadlineOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Empty one host, uncordon it, and go on with the next."""
    body = {"hosts": names or [], "wait": wait.value, "deadline_s": deadline_s}
    _show(the_fleet().post("hosts/roll", body, PLAN_DEADLINE_S), output)


@hosts.command("continue")
def go_on(output: FormatOption = Format.TABLE) -> None:
    """Uncordon the host in maintenance, and go on with the next."""
    _show(the_fleet().post("hosts/continue"), output)


@hosts.command("stop")
def stop(output: FormatOption = Format.TABLE) -> None:
    """Uncordon the host in maintenance, and drain no further one."""
    _show(the_fleet().post("hosts/stop"), output)


def _show(reply: dict[str, Any], output: Format) -> None:
    show(reply, output, roll_line(reply) if reply["hosts"] else "no host is left")
