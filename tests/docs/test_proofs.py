"""Every row of docs/security.md and docs/failures.md has tests that prove it, and every test that is named exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, SECURITY, rows, section
from tests.docs.proofs import PROOFS

TESTS = ROOT / "tests"
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


@cache
def names_of_tests(path: Path) -> frozenset[str]:
    """The names of the test functions of a file, collected without running it; those of classes, too."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def missing(named: list[tuple[str, str]]) -> list[str]:
    """Those of the tests that no file of that path, or of that name in any folder, has."""
    return [
        f"{file}::{test}" for file, test in named if not any(test in names_of_tests(path) for path in TESTS.rglob(file))
    ]


def first_cells(page: Path, heading: str) -> list[str]:
    """Of the first table below the heading, without those of its lower headings."""
    return [row[0] for row in rows(re.split(r"^## ", section(page, heading), flags=re.MULTILINE)[0])[2:]]


@pytest.mark.parametrize(("page", "heading"), PROOFS, ids=lambda value: getattr(value, "stem", value))
def test_every_row_has_a_proof(page: Path, heading: str) -> None:
    """In the order of the page, and no proof is of a row that is gone."""
    proofs = PROOFS[page, heading]
    cells = first_cells(page, heading)
    assert [next((key for key in proofs if cell.startswith(key)), cell) for cell in cells] == list(proofs)
    assert all(proofs.values())


def test_every_proof_exists() -> None:
    named = [id for proofs in PROOFS.values() for tests in proofs.values() for id in tests]
    assert missing([(file, test) for file, _, test in (id.partition("::") for id in named)]) == []


def test_every_test_that_the_security_page_names_exists() -> None:
    """Each guarantee of the page names the tests that verify it."""
    named = NAMED.findall(SECURITY.read_text())
    assert missing(named) == []
    assert len(named) > 30


def test_every_attack_names_its_tests() -> None:
    """In the last cell of its row."""
    attacks = rows(section(SECURITY, "Attacks tried"))[2:]
    assert [row[0] for row in attacks if not NAMED.search(row[3])] == []
    assert len(attacks) > 20
