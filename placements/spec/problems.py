"""Problem: one finding with its place and remedy, and the only renderer of findings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]

MAX_TEXT = 2000  # characters of a fact or a remedy
_COLORS = {"error": "\x1b[1;31m", "warning": "\x1b[1;33m", "place": "\x1b[1m", "hint": "\x1b[2m"}
_PLAIN = "\x1b[0m"


@dataclass(frozen=True)
class Problem:
    """What is wrong, where, and what mends it. ``id`` is stable kebab-case, listed in docs/errors.md."""

    id: str
    severity: Severity
    where: str  # "file:line:column", or "" when the finding has no place in a file
    what: str  # the fact, with the offending value as written
    hint: str = ""  # the remedy; "" when there is none to name

    def __post_init__(self) -> None:
        object.__setattr__(self, "what", printable(self.what))
        object.__setattr__(self, "hint", printable(self.hint))

    def as_dict(self) -> dict[str, str]:
        """The five fields as `validate -o json` prints them."""
        return {"id": self.id, "severity": self.severity, "where": self.where, "what": self.what, "hint": self.hint}


def printable(text: str) -> str:
    """The text as it may be shown, whoever chose its parts: control characters are escaped, so that they neither move a
    terminal's cursor nor begin a line, and what is very long is cut."""
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}... ({len(text)} characters)"
    if text.isprintable():
        return text
    return "".join([part if part.isprintable() else part.encode("unicode_escape").decode() for part in text])


def has_errors(problems: Iterable[Problem]) -> bool:
    """Whether one of them is more than a warning."""
    return any(problem.severity == "error" for problem in problems)


def in_order(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Each once, in the order of the file; what has no place comes last. Stable, so equal places keep their order."""
    return tuple(sorted(dict.fromkeys(problems), key=_place))


def _place(problem: Problem) -> tuple[bool, str, int, int]:
    file, line, column = ([*problem.where.rsplit(":", 2), "", ""])[:3]
    if not (line.isdecimal() and column.isdecimal()):
        return (not problem.where, problem.where, 0, 0)
    return (False, file, int(line), int(column))


def render(problems: Iterable[Problem], *, color: bool = False) -> str:
    """Text for people: a line "place: severity: id: fact" for each problem, and a line with its remedy.

    Ends with a newline unless there are no problems. ``color`` adds ANSI codes.
    """

    def paint(style: str, text: str) -> str:
        return f"{_COLORS[style]}{text}{_PLAIN}" if color else text

    lines = []
    for problem in problems:
        place = paint("place", problem.where) + ": " if problem.where else ""
        lines.append(f"{place}{paint(problem.severity, problem.severity)}: {problem.id}: {problem.what}\n")
        if problem.hint:
            lines.append(f"    {paint('hint', 'hint: ' + problem.hint)}\n")
    return "".join(lines)
