"""No module of the workers imports itself by way of others, at any time."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def modules() -> dict[str, Path]:
    """By name; of a package its ``__init__``."""
    files = {}
    for path in (ROOT / "workers").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        files[name.removesuffix(".__init__")] = path
    return files


def imported(path: Path, known: set[str]) -> set[str]:
    """Modules of the workers, those within functions too; not those that only the type checker reads."""
    imports: set[str] = set()
    queue: list[ast.AST] = [ast.parse(path.read_text())]
    while queue:
        node = queue.pop()
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            imports |= names & known or {node.module} & known
        elif isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names} & known
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            queue.extend(ast.iter_child_nodes(node))
    return imports


def test_modules_of_the_workers_import_one_way() -> None:
    """A cycle that is hidden in a function is one: neither can be read, or tested, without the other."""
    known = modules()
    graph = {name: imported(path, set(known)) - {name} for name, path in known.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))
