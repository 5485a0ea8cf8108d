"""docs/spec.md describes each field of a spec once, with its default, bounds and tag."""

from __future__ import annotations

import os
import re
from typing import get_args

import pytest
from annotated_types import Ge, Gt, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from orchestrator.control.decisions.changes import Tag, tag_of
from placements.engines.capabilities import Dtype
from placements.engines.options import PACKAGED
from placements.engines.registry import CHOICES, ENGINES, Engine
from placements.facts.checkpoints import FAMILIES
from placements.facts.encoders import EMBEDDING_DECODERS, ENCODERS
from placements.spec.schema import (
    Buckets,
    Compiler,
    Draft,
    GroupQueryAttention,
    HostsSpec,
    ModelSpec,
    Replicas,
    Reserve,
    Spec,
    Spread,
)
from placements.spec.sections import (
    Deadlines,
    EngineSettings,
    Objectives,
    RequestDefaults,
    Scaling,
    Schedule,
    Server,
    Strategy,
    Update,
)
from tests.docs.pages import SPEC, rows, section, words
from tests.spec_reference import TABLES, renewed


def described(prefix: str, kind: type[BaseModel], skipped: tuple[str, ...] = ()) -> dict[str, FieldInfo]:
    fields = {name: field for name, field in kind.model_fields.items() if not field.exclude and name not in skipped}
    return {f"{prefix}{name}": field for name, field in fields.items()}


FIELDS = {
    **described("", Spec, ("models",)),
    **described("hosts.", HostsSpec),
    **described("hosts.reserve.", Reserve),
    **described("", ModelSpec, ("name",)),
    **described("replicas.", Replicas),
    **described("request_defaults.", RequestDefaults),
    **described("update.", Update),
    **described("deadlines.", Deadlines),
    **described("draft.", Draft),
    **described("spread.", Spread),
    **described("server.", Server),
    **described("buckets.", Buckets),
    **described("compiler.", Compiler),
    **described("objectives.", Objectives),
    **described("scaling.", Scaling),
    **described("scaling.schedules.", Schedule),
    **described("engines.ENGINE.", EngineSettings),
}
BESIDE = {"defaults": ("a mapping", "unset"), "models": ("a mapping", "required")}  # no fields of the schema's classes


def default_of(field: FieldInfo) -> str:
    """A default as spec.md writes it."""
    if field.is_required():
        return "required"
    value = field.default
    if value is None:
        return "unset"
    if value == Replicas():
        return "1"
    if isinstance(value, float):
        return f"{value:g}"
    mappings = (Reserve(), Update(), Deadlines(), Buckets(), Compiler(), Objectives(), Scaling(), RequestDefaults())
    empty = dict.fromkeys(("{}", *map(str, mappings)), "{}")
    return {**empty, "()": "[]", "": '""', "False": "false", "True": "true"}.get(str(value), str(value))


def field_rows() -> dict[str, list[str]]:
    documented: dict[str, list[str]] = {}
    for row in rows(SPEC.read_text()):
        if len(row) == 4 and row[0].startswith("`"):
            assert words(row[0])[0] not in documented, f"{row[0]} is described twice"
            documented[words(row[0])[0]] = row
    return documented


def test_every_field_of_the_spec_is_described_once() -> None:
    """And nothing that is no field."""
    assert field_rows().keys() == FIELDS.keys() | BESIDE.keys()


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_has_the_default_and_the_bounds_that_are_described(name: str) -> None:
    """Defaults and bounds are those of placements.spec.schema."""
    field, row = FIELDS[name], field_rows()[name]
    assert row[2].strip("`") == ("unset" if name == "hosts" else default_of(field))
    lowest = next((mark.ge for mark in field.metadata if isinstance(mark, Ge)), None)
    highest = next((mark.le for mark in field.metadata if isinstance(mark, Le)), None)
    above = next((mark.gt for mark in field.metadata if isinstance(mark, Gt)), None)
    if lowest is not None:
        assert f"{lowest} to {highest}" in row[1]
    if above is not None:
        assert f"above {above}, at most {highest}" in row[1]


def test_every_engine_dtype_strategy_and_thread_policy_is_described() -> None:
    """In the order of the code."""
    documented = field_rows()
    assert tuple(words(documented["group_query_attention"][1])) == get_args(GroupQueryAttention)
    assert tuple(words(documented["engine"][1])) == CHOICES
    assert tuple(words(documented["dtype"][1])) == get_args(Dtype)
    assert tuple(words(documented["update.strategy"][1])) == get_args(Strategy)
    policies = next(kind for kind in get_args(ModelSpec.model_fields["threads"].annotation) if get_args(kind))
    assert tuple(words(documented["threads"][1])) == get_args(policies)


def test_every_family_and_engine_option_is_described() -> None:
    """Those that the planner knows."""
    assert tuple(words(section(SPEC, "Families").partition(". ")[0]))[2:] == FAMILIES
    encoders = section(SPEC, "Encoders").partition("The families of encoders are ")[2].partition(". ")[0]
    assert tuple(words(encoders))[: len(ENCODERS)] == ENCODERS
    kinds = {words(row[0])[0]: tuple(words(row[2])) for row in rows(section(SPEC, "Encoders")) if words(row[0])}
    assert kinds == {"embedding": EMBEDDING_DECODERS, "rerank": (), "classification": ()}
    own = {name: engine.options for name, engine in ENGINES.items() if engine.options}
    own = {name: options for name, options in own.items() if ENGINES[name].package not in PACKAGED}
    options = {name for known in own.values() for name in known}
    assert set(words(field_rows()["engine_options"][3])) == options | own.keys()


def test_the_tables_of_the_spec_are_those_of_the_schema_and_the_topology() -> None:
    """Generated from them: UPDATE_GOLDEN=1 writes them anew."""
    page = SPEC.read_text()
    if os.environ.get("UPDATE_GOLDEN"):
        SPEC.write_text(renewed(page))
        page = SPEC.read_text()
    assert re.findall(r"<!-- generated from the \w+: (\w+) -->", page) == list(TABLES)
    assert page == renewed(page)


def update_table(header: str) -> dict[str, list[str]]:
    """The rows of a table of "Updates", by their first word."""
    table = section(SPEC, "Updates").partition(f"| {header} |")[2].partition("\n\n")[0]
    return {words(row[0])[0]: row for row in rows(table) if words(row[0])}


@pytest.mark.parametrize(
    ("engine", "of_a_graph"), [("cpu", "restart"), ("echo", "restart"), ("nxd-inference", "recompile")]
)
def test_every_field_of_a_model_has_the_tag_that_is_described(engine: Engine, of_a_graph: str) -> None:
    """Once, in the table of tags; what a graph is compiled for is a restart where nothing is compiled."""
    table = {tag: words(row[2]) for tag, row in update_table("tag").items()}
    documented = [(name, of_a_graph if tag == "recompile" else tag) for tag, names in table.items() for name in names]
    fields = [name for name, field in ModelSpec.model_fields.items() if not field.exclude and name != "name"]
    assert list(table) == [tag.value for tag in Tag]
    assert sorted(documented) == sorted((name, tag_of(name, engine).value) for name in fields)


def test_every_strategy_is_described() -> None:
    """Each but auto, which chooses among them."""
    assert sorted(update_table("strategy")) == sorted(set(get_args(Strategy)) - {"auto"})
