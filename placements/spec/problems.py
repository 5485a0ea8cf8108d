"""Problems of a spec or a command, their rendering as text, and the positions of a spec's keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Path = tuple[str | int, ...]  # ("models", "tiny", "cores", 0)


@dataclass(frozen=True)
class SourcePosition:
    """Line and column of a key, or of an item of a list, both counted from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class SourcePositions:
    """The positions of one file's keys. All instances compare equal, so that positions do not affect equality."""

    filename: str = field(default="<spec>", compare=False)
    positions: Mapping[Path, SourcePosition] = field(default_factory=dict, compare=False, repr=False)

    def where(self, *path: str | int) -> str:
        """Returns "file:line:column" of the path or of the nearest key above it; "" for a spec without a file."""
        position = nearest(self.positions, path)
        return "" if position is None else f"{self.filename}:{position.line}:{position.column}"


def nearest(positions: Mapping[Path, SourcePosition], path: Path) -> SourcePosition | None:
    """Returns the position of the path or of the nearest key above it."""
    above = (path[:length] for length in range(len(path), -1, -1))
    return next((positions[key] for key in above if key in positions), None)


Severity = Literal["error", "warning"]

MAX_TEXT = 2000  # characters of ``what`` or ``hint``
_COLORS = {"error": "\x1b[1;31m", "warning": "\x1b[1;33m", "place": "\x1b[1m", "hint": "\x1b[2m"}
_PLAIN = "\x1b[0m"


@dataclass(frozen=True)
class Problem:
    """What is wrong, where, and how to fix it. ``id`` is stable, in kebab-case, and listed in docs/errors.md."""

    id: str
    severity: Severity
    where: str  # "file:line:column", or "" if the problem has no position in a file
    what: str  # the problem, with the value as written
    hint: str = ""  # how to fix it; "" if unknown

    def __post_init__(self) -> None:
        object.__setattr__(self, "what", printable(self.what))
        object.__setattr__(self, "hint", printable(self.hint))

    @property
    def line(self) -> str:
        """The problem on one line, in the form of replica failures."""
        return f"{self.id}: {self.what} ({self.hint})"

    def as_dict(self) -> dict[str, str]:
        """Returns the JSON of `validate -o json`."""
        return {"id": self.id, "severity": self.severity, "where": self.where, "what": self.what, "hint": self.hint}


def printable(text: str) -> str:
    """Makes untrusted text safe to print: escapes control characters and truncates long text."""
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}... ({len(text)} characters)"
    if text.isprintable():
        return text
    return "".join([part if part.isprintable() else part.encode("unicode_escape").decode() for part in text])


def has_errors(problems: Iterable[Problem]) -> bool:
    """Returns whether any problem is an error."""
    return any(problem.severity == "error" for problem in problems)


def in_order(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Returns the distinct problems in the order of the file, those without a position last. The sort is stable."""
    return tuple(sorted(dict.fromkeys(problems), key=_place))


def _place(problem: Problem) -> tuple[bool, str, int, int]:
    file, line, column = ([*problem.where.rsplit(":", 2), "", ""])[:3]
    if not (line.isdecimal() and column.isdecimal()):
        return (not problem.where, problem.where, 0, 0)
    return (False, file, int(line), int(column))


def render(problems: Iterable[Problem], *, color: bool = False) -> str:
    """Renders problems as text: a line "where: severity: id: what" for each, and a line with its hint.

    Ends with a newline unless there are no problems. ``color`` adds ANSI codes.
    """

    def paint(style: str, text: str) -> str:
        return f"{_COLORS[style]}{text}{_PLAIN}" if color else text

    lines = []
    for problem in problems:
        position = paint("place", problem.where) + ": " if problem.where else ""
        lines.append(f"{position}{paint(problem.severity, problem.severity)}: {problem.id}: {problem.what}\n")
        if problem.hint:
            lines.append(f"    {paint('hint', 'hint: ' + problem.hint)}\n")
    return "".join(lines)
