"""The command `corewright`: what its commands have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.output import Format

if TYPE_CHECKING:
    from orchestrator.cli.client import AdminClient

USAGE = 64  # EX_USAGE of sysexits.h
FAILED = 1
CHANGES = 2
INTERRUPTED = 130  # as a shell tells of SIGINT

app = typer.Typer(
    name="corewright",
    help="Fits models to NeuronCores: one YAML file, several language models, one OpenAI-compatible address.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
SpecArgument = Annotated[str, typer.Argument(metavar="SPEC", help="The YAML file; - is standard input.")]
OptionalSpecArgument = Annotated[
    str | None, typer.Argument(metavar="SPEC", help="The YAML file; - is standard input. Without: the fleet's own.")
]
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="A model of the spec.")]
FormatOption = Annotated[Format, typer.Option("--output", "-o", help="Form of the data on stdout.")]
WaitOption = Annotated[bool, typer.Option("--wait", help="Follow the rollout to its end.")]
TimeoutOption = Annotated[
    float | None, typer.Option(min=0, metavar="S", help="With --wait: give up after so many seconds.")
]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
OfflineOption = Annotated[bool, typer.Option("--offline", help="Leave a running fleet out of it.")]
FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")]


def the_fleet() -> AdminClient:
    """The fleet that a command is about. Raises Failed `no-fleet`."""
    from orchestrator.cli import client  # 30 ms, which a command without a fleet need not wait for

    return client.the_fleet()


def group(name: str, help: str) -> typer.Typer:
    """A command with commands of its own."""
    made = typer.Typer(name=name, help=help, no_args_is_help=True, add_completion=False, rich_markup_mode=None)
    app.add_typer(made)
    return made
