"""Data to stdout, everything else to stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TextIO

from orchestrator.process.failure import Failed
from placements.spec.problems import Problem, render


class Format(str, Enum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


class _Terminal:
    """Where data and progress go: looked up at each use, so that ``libraries_to_log`` can keep them apart from what
    libraries print."""

    out: TextIO | None = None
    err: TextIO | None = None


def stdout() -> TextIO:
    return _Terminal.out or sys.stdout


def stderr() -> TextIO:
    return _Terminal.err or sys.stderr


@contextlib.contextmanager
def libraries_to_log(path: Path) -> Iterator[None]:
    """Within it, all that is printed goes to the log at ``path``, except what ``say`` and ``show`` print. Raises Failed
    where the log cannot be opened."""
    from orchestrator.process.home import written
    from workers.host.host_facts import cut_log

    with written(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(OSError):  # there is none yet
            cut_log(path)
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    _Terminal.out, _Terminal.err = os.fdopen(kept[0], "w"), os.fdopen(kept[1], "w")
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # files on a full disk
                stream.flush()
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
        for terminal in (_Terminal.out, _Terminal.err):
            with contextlib.suppress(OSError):
                terminal.close()
        _Terminal.out = _Terminal.err = None


def use_color(stream: TextIO) -> bool:
    """Whether to colour: on a terminal, unless NO_COLOR is set (https://no-color.org) or the terminal is dumb."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def say(line: str) -> None:
    """Progress, for a person."""
    stderr().write(line + "\n")
    stderr().flush()


def on_terminal() -> bool:
    """Whether a person can confirm: standard input and standard error are a terminal."""
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


def show(data: Any, format: Format, table: str) -> None:
    """Data, for a program or a person; ``table`` is its form for a person."""
    if format is Format.JSON:
        stdout().write(json.dumps(data, indent=2) + "\n")
    elif format is Format.YAML:
        import yaml

        stdout().write(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))
    elif table:
        stdout().write(table.rstrip("\n") + "\n")
    stdout().flush()


def write(path: Path, text: str) -> None:
    """A file that was asked for. Raises Failed."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Failed("output-unwritable", f"{path}: {error.strerror}", "another FILE") from None
    say(f"written to {path}")


def complain(problems: Sequence[Problem]) -> None:
    """Problems, for a person."""
    if problems:
        say(render(problems, color=use_color(stderr())).rstrip("\n"))


def paint_diff(text: str) -> str:
    """A unified diff, coloured on a terminal."""
    if not use_color(stdout()):
        return text
    colors = {"+": "\x1b[32m", "-": "\x1b[31m", "@": "\x1b[36m"}
    lines = [f"{colors[line[0]]}{line}\x1b[0m" if line[:1] in colors else line for line in text.splitlines()]
    return "\n".join(lines) + "\n"
