"""The Typer application `corewright`, and the arguments and options that its commands share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

import placements
from orchestrator.cli.fleet_names import names_of
from orchestrator.cli.grouped_help import GroupedHelp
from orchestrator.cli.output import Format

DEMO = Path(placements.__file__).parent / "examples" / "demo.yaml"
USAGE = 64  # EX_USAGE of sysexits.h
FAILED = 1
CHANGES = 2
COMPLETE = "_COREWRIGHT_COMPLETE"  # Typer's name of the variable with which a shell asks for completions
INTERRUPTED = 130  # 128 + SIGINT, as shells report it

app = typer.Typer(
    name="corewright",
    cls=GroupedHelp,
    help="Serve several language models on AWS NeuronCores from one YAML file, behind one OpenAI-compatible API.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
SPEC_HELP = "Path to the spec (YAML); - reads standard input."
SpecArgument = Annotated[str, typer.Argument(metavar="SPEC", help=SPEC_HELP)]
OptionalSpecArgument = Annotated[
    str | None,
    typer.Argument(metavar="SPEC", help=SPEC_HELP, show_default="the running fleet's spec"),
]
ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="Name of a model in the spec.", autocompletion=names_of("models"))
]
FormatOption = Annotated[Format, typer.Option("--output", "-o", help="Output format.")]
WaitOption = Annotated[bool, typer.Option("--wait", help="Wait until the rollout ends, and report its events.")]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        metavar="S",
        help="Timeout of --wait, in seconds; the rollout continues after it.",
        show_default="no timeout",
    ),
]
DeadlineOption = Annotated[
    float | None,
    typer.Option(
        min=1,
        metavar="S",
        help="Empty a host within S seconds; replicas without another place stop meanwhile.",
        show_default="no deadline",
    ),
]
YesOption = Annotated[bool, typer.Option("--yes", help="Skip the confirmation prompt.")]
OfflineOption = Annotated[bool, typer.Option("--offline", help="Ignore the running fleet.")]
SpeedsOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Measured speeds, as written by `trace export --speeds`.")
]
FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Continue with new output until Ctrl-C.")]


@contextlib.contextmanager
def bad_parameter(option: str) -> Iterator[None]:
    """Converts a ValueError about the value of an option to wrong usage."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def group(name: str, help: str) -> typer.Typer:
    """Returns a new command that has subcommands."""
    subcommands = typer.Typer(name=name, help=help, no_args_is_help=True, add_completion=False, rich_markup_mode=None)
    app.add_typer(subcommands)
    return subcommands
