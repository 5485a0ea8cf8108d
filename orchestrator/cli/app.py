"""The Typer application `corewright`: its table of commands, the options that they share, and the smallest commands."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]  # it has no __all__
from typer.core import TyperGroup

import placements
from orchestrator.cli.output import Format, show
from orchestrator.process.failure import Failed
from orchestrator.process.version import corewright_version

DEMO = Path(placements.__file__).parent / "examples" / "demo.yaml"
USAGE = 64  # EX_USAGE of sysexits.h
FAILED = 1
CHANGES = 2
COMPLETE = "_COREWRIGHT_COMPLETE"  # Typer's name of the variable with which a shell asks for completions
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
COMPLETION_DEADLINE_S = 2.0  # a shell waits for its completions
MAX_SENTENCE_CHARS = 200  # of a command's first sentence in `--help`, which wraps

COMMANDS = {  # by group of `--help`: each command, in order, and the module that has it
    "Fleet": {"up": "up", "demo": "up", "serve-sagemaker": "serve_sagemaker", "down": "down"},
    "Spec": {
        "init": "init",
        "validate": "plan",
        "schema": "plan",
        "plan": "plan",
        "explain": "explain",
        "import": "import_spec",
        "advise": "advise",
        "simulate": "simulate",
    },
    "Changes": {
        "apply": "apply",
        "diff": "apply",
        "rollout": "apply",
        "scale": "operate",
        "load": "operate",
        "unload": "operate",
    },
    "View": {
        "status": "views",
        "get": "get",
        "describe": "views",
        "events": "views",
        "logs": "views",
        "config": "views",
        "console": "views",
        "top": "top",
        "trace": "trace",
    },
    "Hosts": {
        "cordon": "operate",
        "uncordon": "operate",
        "drain": "operate",
        "hosts": "operate",
        "doctor": "doctor",
        "node-resources": "operate",
    },
    "Models": {"generate": "generate", "bench": "bench", "compile": "compile", "cache": "cache"},
    "Access": {"keys": "keys", "audit": "keys"},
    "Other": {"completion": "app", "version": "app"},
}


class GroupedHelp(TyperGroup):
    """The group of all commands, which `--help` lists in their groups with the whole first sentence of each."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, names in COMMANDS.items():
            commands = {name: self.commands[name] for name in names if name in self.commands}
            if commands:
                with formatter.section(title):
                    formatter.write_dl(
                        [(name, item.get_short_help_str(MAX_SENTENCE_CHARS)) for name, item in commands.items()]
                    )


def names_of(*kinds: str) -> Callable[[], list[str]]:
    """Returns the function that lists the fleet's models, replicas or hosts, for `autocompletion`; they are none
    without a fleet that answers in time."""

    def names() -> list[str]:
        from orchestrator.cli.client import find_fleet
        from orchestrator.cli.listing import items_by_name

        if (client := find_fleet()) is None:
            return []
        try:
            status = client.status(COMPLETION_DEADLINE_S)
        except Failed:
            return []
        return [name for kind in kinds for name in items_by_name(status, kind)]

    return names


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


class Shell(str, Enum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@app.command()
def completion(
    shell: Annotated[Shell, typer.Argument(metavar="bash|zsh|fish", help="The shell that reads the script.")],
) -> None:
    """Print a script that completes commands, options, and the names of models, replicas and hosts."""
    script = get_completion_script(prog_name="corewright", complete_var=COMPLETE, shell=shell.value)
    show(None, Format.TABLE, script)


@app.command()
def version(output: FormatOption = Format.TABLE) -> None:
    """Show the version."""
    show({"version": corewright_version()}, output, corewright_version())
