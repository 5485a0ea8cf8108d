"""The entry point of `corewright`.

Exit codes: 0 success, 1 failure, 64 wrong usage, 130 Ctrl-C during a wait. `plan`: 0 no changes, 2 changes, 1 errors or
unplaced replicas. `explain`: 0 when `min` replicas are placed, else 1. `diff`: 0 no differences, 2 differences.
`cache verify`: 0 when nothing would be compiled, else 1.
Only the module of the given command is imported, so that each command starts fast.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

import typer
from typer.completion import completion_init  # type: ignore[attr-defined]  # it has no __all__
from typer.core import TyperGroup
from typer.main import get_group

from orchestrator.cli.app import COMMANDS, COMPLETE, FAILED, INTERRUPTED, USAGE, app
from orchestrator.cli.output import complain
from orchestrator.process.failure import Failed
from placements.spec import removed
from placements.spec.problems import Problem


def application(command: str = "") -> TyperGroup:
    """Returns the command line: with the module of ``command`` only, or all if it is not a command."""
    modules = {name: module for commands in COMMANDS.values() for name, module in commands.items()}
    for module in [modules[command]] if command in modules else modules.values():
        import_module(f"orchestrator.cli.{module}")
    group = get_group(app)
    group.commands = {name: group.commands[name] for name in modules if name in group.commands}
    return group


def main() -> None:
    """Run the command line and exit the process."""
    try:
        sys.exit(run(sys.argv[1:]))
    except KeyboardInterrupt:  # before a command has handled it
        sys.exit(INTERRUPTED)


def run(arguments: list[str]) -> int:
    """Run the command line. Returns the exit code."""
    if arguments == ["--version"]:
        arguments = ["version"]
    if (problem := _removed(arguments)) is not None:
        complain([problem])
        return USAGE
    command = application(*(arguments or _words_to_complete())[:1])
    try:
        code = command.main(arguments, prog_name="corewright", standalone_mode=False)
        return int(code or 0)
    except typer.Exit as ended:
        return ended.exit_code
    except typer.Abort:
        return FAILED
    except Failed as error:
        complain([*getattr(error, "problems", ()), error.problem])
        return FAILED
    except BrokenPipeError:
        sys.stderr.close()
        return FAILED
    except Exception as error:
        # Typer vendors click from 0.16 on, so a usage error is recognized by its methods, not by its class.
        if not hasattr(error, "format_message") or not hasattr(error, "show"):
            raise
        if isinstance(message := getattr(error, "message", None), str):
            error.message = message.removeprefix("Value error, ")  # type: ignore[attr-defined]  # newer Typers add it
        error.show()
        return USAGE


def _removed(arguments: Sequence[str]) -> Problem | None:
    """Returns the problem of a command line that was removed; None if it was not."""
    for line, hint in removed.COMMANDS.items():
        words = [word for word in line.split() if not word.startswith("-")]
        options = set(line.split()) - set(words)
        given = {argument.partition("=")[0] for argument in arguments[len(words) :]}
        if list(arguments[: len(words)]) == words and options <= given:
            return Problem("command-removed", "error", "", f"`corewright {line}` was removed", hint)
    return None


def _words_to_complete() -> list[str]:
    """Returns the words of the command line for which a shell wants completions; none if it does not."""
    if COMPLETE not in os.environ:
        return []
    completion_init()
    return (os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")).split()[1:]


if __name__ == "__main__":
    main()
