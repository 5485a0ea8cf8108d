"""docs/engines.md: what engines can do, and every feature of the guides with its field and test, or why it has none."""

from __future__ import annotations

import ast
import os
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from placements.engines.options import FIELDS, UNSERVED, Scope, known_options
from placements.engines.registry import Engine
from placements.spec.schema import ModelSpec, Spec
from tests.spec_reference import ENGINE_TABLES, renewed

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "engines.md"
GUIDES = sorted(path.stem for path in (ROOT / "tests" / "features").glob("*.txt"))
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
FIELD = re.compile(r"`([a-z_]+)[:`]")
OPTION = re.compile(r"`engine_options: \{(\w+):")
ENGINES: dict[str, Engine] = {
    "lmi": "transformers-neuronx",
    "nxd-inference": "nxd-inference",
    "transformers-neuronx": "transformers-neuronx",
}


class Row(NamedTuple):
    """One line of a table."""

    feature: str
    here: str  # the field of the spec, or what stands for it
    shown: str  # the test, or the reason


def features(guide: str) -> list[str]:
    return (ROOT / "tests" / "features" / f"{guide}.txt").read_text().splitlines()


def rows(guide: str) -> list[Row]:
    """Those of the table below the heading that names the guide."""
    section = PAGE.read_text().partition(f"<!-- features: {guide} -->")[2].partition("<!-- end -->")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    return [Row(*(cell.strip() for cell in line.strip("|").split(" | "))) for line in lines if "---" not in line]


@cache
def functions_of(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("guide", GUIDES)
def test_every_feature_of_the_guides_has_its_row(guide: str) -> None:
    """In the guide's order, each once."""
    assert [row.feature for row in rows(guide)] == features(guide)


@pytest.mark.parametrize("guide", GUIDES)
def test_every_row_names_tests_that_exist_or_a_reason(guide: str) -> None:
    """A feature that is there names at least one test; one that is not begins with "No:" and says why."""
    for row in rows(guide):
        names = TEST.findall(row.shown)
        assert names or len(row.shown) > len("No: ") + 10, row
        assert bool(names) != row.shown.startswith("No:"), row
        for path, name in names:
            assert name in functions_of(path), f"{row.feature}: {path} has no {name}"


@pytest.mark.parametrize("guide", GUIDES)
def test_every_field_that_a_row_names_exists(guide: str) -> None:
    """A name in backquotes, up to a colon, is a field of a model or of the spec, or an option of an engine."""
    fields = {*ModelSpec.model_fields, *Spec.model_fields}
    for row in rows(guide):
        assert set(FIELD.findall(row.here)) <= fields, row


@pytest.mark.parametrize("guide", GUIDES)
def test_every_option_that_a_row_names_may_be_given(guide: str) -> None:
    """It is one of the engine's package, and none that a field stands for or that is refused."""
    scope = Scope(ENGINES[guide], None, "", "inf2")
    tables = (f"{scope.package}.NeuronConfig", scope.package)
    taken = {name for of in (FIELDS, UNSERVED) for table in tables for name in of.get(table, ())}
    options = {name for row in rows(guide) for name in OPTION.findall(row.here)}
    assert options <= known_options(scope).keys()
    assert not options & taken


def test_the_tables_of_engines_are_those_of_their_capabilities() -> None:
    """Generated from them: UPDATE_GOLDEN=1 writes them anew."""
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(renewed(PAGE.read_text(), ENGINE_TABLES))
    page = PAGE.read_text()
    assert re.findall(r"<!-- generated from the engines: (\w+) -->", page) == list(ENGINE_TABLES)
    assert page == renewed(page, ENGINE_TABLES)
