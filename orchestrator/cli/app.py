"""The Typer application `corewright`: its table of commands, the options that they share, and the smallest commands."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]  # it has no __all__
from typer.core import TyperGroup

import placements
from orchestrator.cli.output import Format, complain, say, show
from orchestrator.process.failure import Failed
from orchestrator.process.version import corewright_version
from placements.spec.problems import has_errors

if TYPE_CHECKING:  # most commands read no spec
    from orchestrator.control.resolve.spec_file import SpecFile
    from placements.spec.schema import ModelSpec, Spec

T = TypeVar("T", bound=str)
Command = TypeVar("Command", bound=Callable[..., None])

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
        "verify": "verify",
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


def option(metavar: str, help: str, *names: str, default: str | bool = True, **settings: Any) -> Any:
    """Returns an option with a value. ``default``: its text in the help, or False for none."""
    return typer.Option(*names, metavar=metavar, help=help, show_default=default, **settings)


def switch(name: str, help: str, *names: str, **settings: Any) -> Any:
    """Returns an option without a value."""
    return typer.Option(name, *names, help=help, **settings)


def argument(metavar: str, help: str, *, default: str | bool = True, **settings: Any) -> Any:
    """Returns a positional argument. ``default``: its text in the help, or False for none."""
    return typer.Argument(metavar=metavar, help=help, show_default=default, **settings)


SPEC_HELP = "Path to the spec (YAML); - reads standard input."
SpecArgument = Annotated[str, argument("SPEC", SPEC_HELP)]
OptionalSpecArgument = Annotated[str | None, argument("SPEC", SPEC_HELP, default="the running fleet's spec")]
ModelArgument = Annotated[str, argument("MODEL", "Name of a model in the spec.", autocompletion=names_of("models"))]
FormatOption = Annotated[Format, typer.Option("--output", "-o", help="Output format.")]
WaitOption = Annotated[bool, switch("--wait", "Wait until the rollout ends, and report its events.")]
TimeoutOption = Annotated[
    float | None,
    option("S", "Timeout of --wait, in seconds; the rollout continues after it.", default="no timeout", min=0),
]
YesOption = Annotated[bool, switch("--yes", "Skip the confirmation prompt.")]
OfflineOption = Annotated[bool, switch("--offline", "Ignore the running fleet.")]
SpeedsOption = Annotated[Path | None, option("FILE", "Measured speeds, as written by `trace export --speeds`.")]
FollowOption = Annotated[bool, switch("--follow", "Continue with new output until Ctrl-C.", "-f")]


def one_of(option: str, value: str, choices: Iterable[T]) -> T:
    """Returns the value of an option as one of the choices. Raises typer.BadParameter."""
    for choice in choices:
        if choice == value:
            return choice
    raise typer.BadParameter(f"{value!r} is not one of {', '.join(choices)}", param_hint=option)


def valid_spec(file: SpecFile, consequence: str) -> Spec:
    """Returns the spec of a file without errors. Otherwise prints its problems and the ``consequence``, and exits."""
    if file.spec is not None and not has_errors(file.problems):
        return file.spec
    complain(file.problems)
    say(f"{file.name} has errors: {consequence}")
    raise typer.Exit(FAILED)


def known_model(file: SpecFile, name: str) -> ModelSpec:
    """Returns the model of a spec. Raises Failed if there is none."""
    assert file.spec is not None
    if (model := file.spec.model(name)) is not None:
        return model
    hint = f"it has {', '.join(item.name for item in file.spec.models)}"
    raise Failed("model-unknown", f"{file.name} has no model {name}", hint)


def with_options(options: Mapping[str, Any]) -> Callable[[Command], Command]:
    """Gives a command an option for each annotation, in place of its parameter ``**name``; one that is not given is
    None."""

    def changed(command: Command) -> Command:
        parameters = inspect.signature(command, eval_str=True).parameters.values()
        own = [item for item in parameters if item.kind is not inspect.Parameter.VAR_KEYWORD]
        kind = inspect.Parameter.KEYWORD_ONLY
        added = [inspect.Parameter(name, kind, default=None, annotation=item) for name, item in options.items()]
        command.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        command.__annotations__ = {item.name: item.annotation for item in (*own, *added)}
        return command

    return changed


@contextlib.contextmanager
def bad_parameter(option: str) -> Iterator[None]:
    """Converts a ValueError about the value of an option to wrong usage."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def group(name: str, help: str, **settings: Any) -> typer.Typer:
    """Returns a new command that has subcommands."""
    subcommands = typer.Typer(
        name=name, help=help, no_args_is_help=True, add_completion=False, rich_markup_mode=None, **settings
    )
    app.add_typer(subcommands)
    return subcommands


class Shell(str, Enum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@app.command()
def completion(shell: Annotated[Shell, argument("bash|zsh|fish", "The shell that reads the script.")]) -> None:
    """Print a script that completes commands, options, and the names of models, replicas and hosts."""
    script = get_completion_script(prog_name="corewright", complete_var=COMPLETE, shell=shell.value)
    show(None, Format.TABLE, script)


@app.command()
def version(output: FormatOption = Format.TABLE) -> None:
    """Show the version."""
    show({"version": corewright_version()}, output, corewright_version())
