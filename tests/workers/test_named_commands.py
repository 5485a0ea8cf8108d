"""What errors and logs tell people to type."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from orchestrator.cli.main import application

ROOT = Path(__file__).parents[2]
# A quoted command, or one with what follows a command: an option, a NAME, or a place that is filled in.
QUOTED = re.compile(r"`corewright ([a-z][a-z-]*)")
TYPED = re.compile(r"\bcorewright ([a-z][a-z-]*)(?= (?:-{1,2}[a-z]|[A-Z]{2,}|\{\}))")


def texts(path: Path) -> list[tuple[int, str]]:
    """String literals that are no docstrings, joined where f-strings have a place."""
    text = path.read_text()
    if "corewright " not in text:
        return []
    tree = ast.parse(text)
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    literals = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            literals.append((node.lineno, "".join(map(str, parts))))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (docs | inside):
            literals.append((node.lineno, node.value))
    return literals


def named() -> list[tuple[str, str]]:
    """Where, and the command that is named there."""
    commands = []
    for folder in ("placements", "workers", "orchestrator"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line, text in texts(path):
                words = {*QUOTED.findall(text), *TYPED.findall(text)}
                commands += [(f"{path.relative_to(ROOT)}:{line}", word) for word in sorted(words)]
    return commands


def test_every_command_that_is_named_exists() -> None:
    """A hint that cannot be followed is worse than none."""
    commands = set(application().commands)
    places = named()
    assert len(places) > 20
    assert [(where, word) for where, word in places if word not in commands] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("`corewright check` names those", {"check"}),
        ("run corewright uncordon {}", {"uncordon"}),
        ("corewright unload MODEL frees", {"unload"}),
        ("{} has corewright {}", set()),
        ("corewright and Ray", set()),
    ],
)
def test_a_command_is_told_from_prose(text: str, words: set[str]) -> None:
    """Else the check above would find nothing, or too much."""
    assert {*QUOTED.findall(text), *TYPED.findall(text)} == words
