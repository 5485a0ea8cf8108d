"""The limits of a client's JSON schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.gateway.openai.body_reader import read_chat
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.openai.schemas import ClientSchema, schema_constraint
from tests.checkpoints import EOS_ID
from tests.orchestrator.gateways import LiveGateway, routes
from tests.orchestrator.scripted import ScriptedReplica, save_tools_tokenizer
from tests.workers.tables import TableEngine, table


def schema_text(schema: Any, param: str) -> str:
    return schema_constraint(ClientSchema(schema, param, param)).text


def properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


BOMBS: dict[str, tuple[Any, str]] = {
    "properties": (properties(8000), "more than 1024 properties"),
    "properties in all": ({"anyOf": [properties(600), properties(600)]}, "more than 1024 properties"),
    "definitions": ({"$defs": {f"d{i}": {} for i in range(1025)}}, "more than 1024 properties"),
    "depth": (nested(40), "more than 32 levels"),
    "depth of a value": ({"const": json.loads("[" * 40 + "]" * 40)}, "more than 32 levels"),
    "enum": ({"enum": list(range(5000))}, "more than 4096 values"),
    "required": ({"required": ["x"] * 5000}, "more than 4096 values"),
    "long value": ({"enum": ["x" * 60_000]}, "60000 characters in one name, pattern or value; the limit is 4096"),
    "long name": ({"properties": {"x" * 5000: {}}}, "5000 characters in one name"),
    "long pattern": ({"type": "string", "pattern": "a|" * 4000}, "8000 characters in one name, pattern"),
    "branches of one": ({"anyOf": [properties(1)] * 200}, "200 branches of one anyOf; the limit is 128"),
    "branches": ({"anyOf": [{"oneOf": [{}] * 100}] * 6}, "more than 512 branches"),
    "tuple": ({"prefixItems": [{}] * 600}, "more than 512 branches"),
    "characters": ({"enum": ["x" * 4000] * 20}, "characters; the limit is 65536"),
    "multipleOf": ({"type": "integer", "multipleOf": 999983}, "least common multiple above 10000"),
    "multiples": ({"allOf": [{"multipleOf": 997}, {"multipleOf": 991.0}]}, "least common multiple above 10000"),
    "list as reference": ({"$ref": ["x"]}, "$ref: is not a URI reference"),
    "1e300": ({"multipleOf": 1e300}, "least common multiple above 10000"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_schema_over_a_limit_is_refused(name: str) -> None:
    """400, with the limit and the parameter, before any replica sees it."""
    schema, message = BOMBS[name]
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    body["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}  # type: ignore[assignment]
    with pytest.raises(ApiError) as refused:
        read_chat(json.dumps(body).encode())
    assert (refused.value.status, refused.value.param) == (400, "response_format")
    assert message in refused.value.message


@pytest.mark.parametrize("parts", [1, 2])
def test_as_many_values_as_the_limit_are_accepted(parts: int) -> None:
    """Lists and other keywords do not count as values of enum."""
    enums: list[dict[str, Any]] = [{"type": "integer", "enum": list(range(part, 4096, parts))} for part in range(parts)]
    assert json.loads(schema_text({"anyOf": enums}, "tools")) == {"anyOf": enums}
    enums[0]["enum"].append(-1)
    with pytest.raises(ApiError, match="more than 4096 values of enum"):
        schema_text({"anyOf": enums}, "tools")


def test_a_tool_whose_call_is_forced_has_the_same_limits() -> None:
    """The arguments match its schema; if no call is forced, nothing is compiled."""
    tool = {"type": "function", "function": {"name": "f", "parameters": properties(2000)}}
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    read_chat(json.dumps(body).encode())
    with pytest.raises(ApiError, match="tools: the JSON schema has more than 1024 properties"):
        read_chat(json.dumps({**body, "tool_choice": "required"}).encode())


def test_options_of_the_grammar_library_are_ignored() -> None:
    """A client's schema says what the answer is, not how it is compiled; a property of that name stays."""
    options = {"x-guidance": {"whitespace_pattern": "(a+)+", "lenient": True, "coerce_one_of": True}}
    schema = {**options, "type": "object", "properties": {"x-guidance": {"type": "string", **options}}}

    assert json.loads(schema_text(schema, "tools")) == {
        "type": "object",
        "properties": {"x-guidance": {"type": "string"}},
    }


def test_descriptive_keys_of_a_schema_do_not_count() -> None:
    """Descriptions are ignored; a property of that name is not."""
    schema = {
        "title": "x" * 70_000,
        "description": "x" * 70_000,
        "type": "object",
        "properties": {"title": {"type": "string", "default": "x" * 70_000}, "description": {"const": {"title": 1}}},
        "items": {"examples": ["x"], "multipleOf": 0.01},
        "additionalProperties": False,
    }
    assert json.loads(schema_text(schema, "tools")) == {
        "type": "object",
        "properties": {"title": {"type": "string"}, "description": {"const": {"title": 1}}},
        "items": {"multipleOf": 0.01},
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    "schema",
    [
        properties(1024),
        nested(31),
        {"enum": list(range(4000))},
        {"type": "string", "maxLength": 10**9},
        {"allOf": [{"multipleOf": value} for value in (0.01, 0.25, 5, 10, 1000)]},
        {"anyOf": [properties(4)] * 128},
        {"$ref": "#"},
        {"minProperties": 1, "required": ["a", []], "properties": {"a": {}}},
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        True,
        {},
    ],
)
def test_a_schema_within_the_limits_is_unchanged(schema: Any) -> None:
    """The replica reports whether it can be followed."""
    assert json.loads(schema_text(schema, "tools")) == schema


ENDLESS = {"$ref": "#"}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": ENDLESS}}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "response_format": FORMAT},
            "response_format",
        ),
        ("completions", {"prompt": "x", "response_format": FORMAT}, "response_format"),
        (
            "responses",
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": ENDLESS}}},
            "text",
        ),
    ],
)
def test_a_schema_that_a_replica_refuses_names_its_field(
    path: str, body: dict[str, Any], param: str, tmp_path: Path
) -> None:
    """By the client's name of it."""
    tokenizer = save_tools_tokenizer(tmp_path, "<tool_call>")
    engine = TableEngine(table(tokenizer.vocab_size, spread=2.0), max_len=200, eos=[EOS_ID])
    replica = ScriptedReplica(engine, tokenizer)
    gateway = LiveGateway()
    try:
        gateway.serve(routes("m", replica, engine="cpu", source=str(tmp_path), max_len=200))  # type: ignore[arg-type]
        answer = gateway.http.post(f"/v1/{path}", json={"model": "m", **body})
        error = answer.json()["error"]
        assert (answer.status_code, (error["param"] or "").partition(".")[0]) == (400, param), error
        assert "the JSON schema is not supported" in error["message"]
    finally:
        gateway.close()
        replica.close()
