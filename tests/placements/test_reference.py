from __future__ import annotations

import pytest

from placements.facts.topology import DEGREES, TOPOLOGIES
from placements.spec.json_schema import json_schema
from placements.spec.schema import (
    Buckets,
    Compiler,
    Draft,
    HostsSpec,
    ModelSpec,
    Replicas,
    Reserve,
    Spread,
)
from placements.spec.sections import Deadlines, EngineSettings, Objectives, Scaling, Schedule, Update
from tests.spec_reference import TABLES, renewed


def rows(name: str) -> dict[str, list[str]]:
    """The rows of a table by their first cell."""
    lines = [line for line in TABLES[name]().splitlines()[2:] if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {row[0].strip("`"): row[1:] for row in cells}


@pytest.mark.parametrize(
    "kind",
    [
        *(ModelSpec, HostsSpec, Reserve, Replicas, Spread, Draft, Update, Deadlines, Buckets, Compiler, EngineSettings),
        *(Objectives, Scaling, Schedule),
    ],
)
def test_every_field_has_a_description(kind: type[ModelSpec]) -> None:
    """In the schema, so in editors too; at least one sentence."""
    fields = {name: field for name, field in kind.model_fields.items() if not field.exclude and name != "name"}
    assert [name for name, field in fields.items() if not (field.description or "").endswith(".")] == []


@pytest.mark.parametrize(
    ("table", "field", "type_", "default"),
    [
        ("file", "version", "`1`", "`1`"),
        ("file", "name", "a name", "`fleet`"),
        ("file", "hosts", "a mapping, or a list of mappings", "unset"),
        ("file", "models", "a mapping", "required"),
        ("hosts", "hosts.instance", "an instance type", "unset"),
        ("hosts", "hosts.lnc", "`1`, `2`", "unset"),
        ("hosts", "hosts.reserve", "a mapping", "`{}`"),
        ("hosts", "hosts.reserve.memory_gib", "number, 0 to 1048576", "`2`"),
        ("hosts", "hosts.reserve.cores", "list of core ids and ranges", "`[]`"),
        ("model", "source", "text", "required"),
        ("model", "dtype", "`bf16`, `fp16`, `fp32`", "unset"),
        ("model", "tp_degree", "whole number, 1 to 128", "`1`"),
        ("model", "replicas", "whole number, 1 to 1000, or a mapping", "`1`"),
        ("model", "replicas.max", "whole number, 1 to 1000", "`1`"),
        ("model", "threads", "`share`, `lmi`, or whole number, 1 to 1024", "`share`"),
        ("model", "allow_degrees", "list of whole numbers, 1 to 128", "`[]`"),
        ("model", "allow_pickle", "true or false", "`false`"),
        ("model", "draft.source", "text", "required"),
        ("model", "deadlines.start_s", "number above 0, at most 86400, or a duration", "`900`"),
        ("model", "objectives.ttft_ms", "number above 0, at most 86400000", "unset"),
        ("model", "scaling.schedules", "list of mappings", "`[]`"),
        ("model", "scaling.schedules.start", "text", "required"),
        ("hosts", "hosts.price_per_core_hour", "number, 0 to 1000000", "`0`"),
        ("model", "spread", "`host`, or a mapping", "unset"),
        ("model", "spread.host", "whole number, 1 to 1000", "`1`"),
        ("model", "buckets.prefill", "list of whole numbers, 1 to 16777216", "`[]`"),
        ("model", "compiler.optlevel", "`1`, `2`, `3`", "unset"),
        ("model", "compiler.flags", "text", '`""`'),
        ("engines", "engines.ENGINE.python", "text", "unset"),
    ],
)
def test_a_row_has_the_type_in_words_its_bounds_and_its_default(
    table: str, field: str, type_: str, default: str
) -> None:
    """As in the schema."""
    assert rows(table)[field][:2] == [type_, default]


def test_the_table_of_families_shows_the_supporting_engines() -> None:
    """With the first version of NxD Inference that does."""
    assert rows("served")["gpt2"] == ["yes", "-", "0.0.28"]
    assert rows("served")["llama"] == ["yes", "yes", "0.0.28 and 0.4"]
    assert rows("served")["qwen3"] == ["-", "from 0.5 on", "0.4"]
    assert rows("served")["mistral"] == ["yes", "yes", "0.0.28"]


def test_an_option_is_listed_or_set_by_a_field() -> None:
    """Others cannot be set."""
    from placements.engines.options import FIELDS, UNSERVED
    from placements.engines.options import TABLES as OPTIONS

    for table in ("transformers_neuronx.NeuronConfig", "neuronx_distributed_inference.NeuronConfig"):
        listed = {name for name in OPTIONS[table] if f"`{name}`" in TABLES["options"]()}
        said = {name for name in FIELDS[table] if f"`{name}`" in TABLES["owned"]()}
        assert listed | said | UNSERVED[table].keys() == OPTIONS[table].keys()


def test_a_description_links_the_section_that_it_names() -> None:
    """In editors it is plain text."""
    assert rows("model")["tp_degree"][2].endswith("See [Degrees](#degrees).")
    assert json_schema()["$defs"]["Model"]["properties"]["tp_degree"]["description"].endswith("See Degrees.")


def test_every_instance_type_and_degree_has_a_row() -> None:
    """In the order of the code; cores of trn2 at both LNC."""
    assert [name.removesuffix(" (*)") for name in rows("instances")] == list(TOPOLOGIES)
    assert rows("instances")["trn2.48xlarge"][1:3] == ["64; 128 with `lnc: 1`", "24 GiB; 12 GiB with `lnc: 1`"]
    assert len(TABLES["degrees"]().splitlines()) == 2 + sum(len(table) for table in DEGREES.values())


def test_a_page_keeps_the_text_between_the_generated_blocks() -> None:
    """And is unchanged when it is renewed again."""
    begin, end = "<!-- generated from the topology: degrees -->\n", "<!-- end of generated -->"
    page = f"before\n{begin}old\n{end}\nbetween\n{begin}{end}\nafter\n"
    table = f"{begin}\n{TABLES['degrees']()}\n{end}"
    assert renewed(page) == f"before\n{table}\nbetween\n{table}\nafter\n"
    assert renewed(renewed(page)) == renewed(page)


def test_a_block_of_an_unknown_name_is_refused() -> None:
    """A misspelt one would never be renewed."""
    with pytest.raises(KeyError):
        renewed("<!-- generated from the schema: modle -->\n<!-- end of generated -->")
