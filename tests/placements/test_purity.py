"""placements is pure: it imports little, and reads neither clocks nor files other than its own data."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import placements

HERE = Path(placements.__path__[0])
FILES = sorted(path for path in HERE.rglob("*.py") if "examples" not in path.parts)
ALLOWED = {"placements", "pydantic", "pydantic_core", "yaml", "cronsim", "javaproperties", *sys.stdlib_module_names}
IMPURE = {"time", "socket", "subprocess", "random", "threading", "asyncio", "logging", "os", "io", "shutil", "tempfile"}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and [alias.name for alias in node.names] == ["Random"]:
            continue  # random numbers from a seed are as good as constants
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_only_the_standard_library_and_small_parsers_are_imported() -> None:
    """Neither Ray nor torch, nor the folders above."""
    assert {path.name: sorted(imported(path) - ALLOWED) for path in FILES if imported(path) - ALLOWED} == {}


def test_no_module_can_reach_clocks_files_or_processes() -> None:
    """No standard module for them is imported."""
    assert {path.name: sorted(imported(path) & IMPURE) for path in FILES if imported(path) & IMPURE} == {}


def test_only_tables_of_the_package_are_read_from_files() -> None:
    """Package data, once, when the module is imported."""
    reads = re.compile(r"\b(open|read_text|read_bytes|get_data|iterdir)\(")
    readers = [path.name for path in FILES if reads.search(path.read_text())]
    assert readers == ["tables.py"]


def test_nothing_heavy_is_loaded() -> None:
    """Importing all of it in a fresh process loads neither Ray nor torch nor transformers."""
    paths = [path.relative_to(HERE.parent).with_suffix("") for path in FILES if path.stem != "__init__"]
    modules = ", ".join(".".join(path.parts) for path in paths)
    heavy = {"ray", "torch", "transformers", "workers", "orchestrator"}
    code = f"import sys, {modules}; print({heavy} & set(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(placements.__path__[0]).parent,
    )
    assert run.stdout.strip() == "set()"
