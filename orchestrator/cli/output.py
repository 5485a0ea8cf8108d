"""The output of commands: data on stdout, progress and problems on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TextIO

import msgspec

from orchestrator.process.failure import Failed
from orchestrator.process.text_table import Paint
from placements.spec.problems import Problem, render


class Format(str, Enum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


class _Terminal:
    """The streams of data and progress, which ``libraries_to_log`` separates from those that libraries print to."""

    out: TextIO | None = None
    err: TextIO | None = None


def stdout() -> TextIO:
    return _Terminal.out or sys.stdout


def stderr() -> TextIO:
    return _Terminal.err or sys.stderr


@contextlib.contextmanager
def libraries_to_log(path: Path) -> Iterator[None]:
    """Redirect stdout and stderr to the log at ``path``, except the output of ``say`` and ``show``.

    Raises Failed if the log cannot be opened."""
    from orchestrator.process.home import written
    from workers.host import private_file
    from workers.host.host_facts import cut_log

    with written(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(OSError):  # the log does not exist yet
            cut_log(path)
        log = private_file.open_to_append(path)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    _Terminal.out, _Terminal.err = os.fdopen(saved[0], "w"), os.fdopen(saved[1], "w")
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # files on a full disk
                stream.flush()
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        for terminal in (_Terminal.out, _Terminal.err):
            with contextlib.suppress(OSError):
                terminal.close()
        _Terminal.out = _Terminal.err = None


def can_redraw(stream: TextIO) -> bool:
    """Returns whether text on the stream can be replaced: it is a terminal, and not a dumb one."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def use_color(stream: TextIO) -> bool:
    """Returns whether to use colors: on a terminal, unless NO_COLOR is set (https://no-color.org) or it is dumb."""
    return can_redraw(stream) and not os.environ.get("NO_COLOR")


def say(line: str) -> None:
    """Print a line of progress to stderr."""
    stderr().write(line + "\n")
    stderr().flush()


def on_terminal() -> bool:
    """Returns whether a prompt can be answered: stdin and stderr are a terminal."""
    return sys.stdin is not None and sys.stdin.isatty() and stderr().isatty()


def confirmed(question: str, yes: bool) -> bool:
    """Returns whether to continue. Prompts on a terminal unless ``yes``; without a terminal it never prompts."""
    if yes or not on_terminal():
        return True
    stderr().write(f"{question} [y/N] ")
    stderr().flush()
    try:
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        return False


def show(data: Any, format: str, text: str, problems: Sequence[Problem] = (), *, indent: int | None = 2) -> None:
    """Print data to stdout as JSON or YAML; in every other format as ``text``, with ``problems`` on stderr."""
    if format == Format.JSON:
        text = json.dumps(msgspec.to_builtins(data), indent=indent)
    elif format == Format.YAML:
        import yaml

        text = yaml.safe_dump(msgspec.to_builtins(data), sort_keys=False, allow_unicode=True)
    else:
        complain(problems)
    if text:
        stdout().write(text.rstrip("\n") + "\n")
    stdout().flush()


def show_next(item: object, format: str, line: str) -> None:
    """Print one item of a stream, so that a program can read it: as a line of JSON, or in YAML as a list of one."""
    show([item] if format == Format.YAML else item, format, line, indent=None)


def fields_of(item: object, names: str) -> dict[str, Any]:
    """Returns attributes of a value for its JSON; without a value all are None."""
    return {name: None if item is None else getattr(item, name) for name in names.split()}


def write(path: Path, text: str) -> None:
    """Write an output file. Raises Failed."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Failed("output-unwritable", f"{path}: {error.strerror}", "pass another FILE") from None
    say(f"written to {path}")


def complain(problems: Sequence[Problem]) -> None:
    """Print problems to stderr."""
    if problems:
        say(render(problems, color=use_color(stderr())).rstrip("\n"))


def paint_diff(text: str) -> str:
    """Returns a unified diff, with colors on a terminal."""
    if not use_color(stdout()):
        return text
    colors = {"+": "\x1b[32m", "-": "\x1b[31m", "@": "\x1b[36m"}
    lines = [f"{colors[line[0]]}{line}\x1b[0m" if line[:1] in colors else line for line in text.splitlines()]
    return "\n".join(lines) + "\n"


GREEN, YELLOW, RED, FAINT = "32", "33", "31", "2"
COLORS = {
    **dict.fromkeys(("ready", "complete"), GREEN),
    **dict.fromkeys(("pending", "fetching", "compiling", "loading", "starting", "draining", "stopping"), YELLOW),
    **dict.fromkeys(("degraded", "progressing", "canary", "paused", "warning"), YELLOW),
    **dict.fromkeys(("failed", "lost", "rolled back", "rolled_back", "error"), RED),
    **dict.fromkeys(("unloaded", "superseded"), FAINT),
}
COLUMNS = ("STATE", "LEVEL")


def state_paint(stream: TextIO) -> Paint | None:
    """Returns the painter of tables on ``stream``; None if it shows no colors."""
    return paint_state if use_color(stream) else None


def paint_state(column: str, cell: str) -> str:
    """Returns the cell of a state in its color, and every other cell unchanged."""
    color = COLORS.get(cell) if column in COLUMNS else None
    return cell if color is None else f"\x1b[{color}m{cell}\x1b[0m"
