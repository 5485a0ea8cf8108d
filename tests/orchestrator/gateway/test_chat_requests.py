"""Chat requests as values: messages for the template, tools, and the schema of a forced call."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.gateway.openai import body_reader, protocol
from orchestrator.gateway.openai.errors import ApiError
from tests.searches import search

HELLO = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}, "$defs": {"city": {"enum": ["Paris"]}}}


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def read(**fields: Any) -> protocol.ChatRequest:
    return body_reader.read_chat(json.dumps({"model": "m", "messages": HELLO, **fields}).encode())


def for_template(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    request = read(messages=messages)
    return [message.for_template(place) for place, message in enumerate(request.messages)]


def call(arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": arguments}}]}


def test_a_message_reaches_the_template_as_templates_expect_it() -> None:
    """Text in one piece, never null; arguments as objects; and no field that was not sent."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert for_template({"role": "user", "content": parts, "name": "Ada", "audio": 1}) == [
        {"role": "user", "content": "ab", "name": "Ada"}
    ]
    for text, value in (('{"a": [1]}', {"a": [1]}), ("", {}), (" ", {})):
        function = {"name": "f", "arguments": value}
        assert for_template(call(text)) == [
            {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
        ]
    assert for_template({"role": "tool", "content": "4", "tool_call_id": "c"}) == [
        {"role": "tool", "content": "4", "tool_call_id": "c"}
    ]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (call("{"), "messages[0].tool_calls[0].function.arguments: not a JSON object"),
        (call("[1]"), "not a JSON object"),
        (call("[" * 100_000), "not a JSON object"),
        ({**call("{}"), "role": "user"}, "only messages of the assistant may have tool_calls"),
        ({"role": "function", "content": "x"}, "the role 'tool'"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "send tool_calls"),
    ],
)
def test_an_invalid_message_is_rejected(message: dict[str, Any], says: str) -> None:
    """400, with the place in the text and `messages` as the parameter."""
    with pytest.raises(ApiError) as refused:
        for_template(message)
    assert (refused.value.status, refused.value.param) == (400, "messages")
    assert says in refused.value.message


def guide(request: protocol.ChatRequest) -> Any:
    constraint = request.guide()
    assert constraint is not None
    return json.loads(constraint.text)


def test_calls_are_possible_only_with_tools() -> None:
    """`auto` by default; special tokens, which mark calls, then stay in the text."""
    assert (read().calling, read(tools=[]).calling, read(tools=None).calling) == ("none",) * 3
    auto = read(tools=[tool("f")])
    assert (auto.calling, auto.skip_special_tokens, auto.guide()) == ("auto", False, None)
    none = read(tools=[tool("f")], tool_choice="none", response_format={"type": "json_object"})
    assert (none.calling, none.skip_special_tokens) == ("none", None)
    assert guide(none) == {"type": "object"}
    assert read(tools=[tool("f")], tool_choice="required").skip_special_tokens is None


def test_a_named_call_has_the_schema_of_its_function() -> None:
    """A function without parameters gets an object."""
    named = {"type": "function", "function": {"name": "f"}}
    assert guide(read(tools=[tool("f", CITY)], tool_choice=named)) == CITY
    assert guide(read(tools=[tool("f")], tool_choice=named))["type"] == "object"


@pytest.mark.parametrize(
    ("calls", "good"),
    [
        ([{"name": "f", "parameters": {"city": "Paris"}}], True),
        ([{"name": "f", "parameters": {"city": "Rome"}}], False),
        ([{"name": "g", "parameters": {}}], True),
        ([{"name": "h", "parameters": {}}], False),
        ([{"name": "f"}], False),
        ([], False),
    ],
)
def test_required_calls_have_the_schemas_of_their_tools(calls: list[Any], good: bool) -> None:
    """Each in its own place."""
    schema = guide(read(tools=[tool("f", CITY), tool("g")], tool_choice="required"))

    assert jsonschema.Draft202012Validator(schema).is_valid(calls) == good


def test_without_parallel_calls_exactly_one_is_required() -> None:
    request = read(tools=[tool("g")], tool_choice="required", parallel_tool_calls=False)
    assert guide(request)["maxItems"] == 1


DEFINITIONS: list[tuple[dict[str, Any], Any, Any]] = [  # a schema, and arguments that are right and wrong
    (
        {"definitions": {"P": {"type": "integer"}}, "properties": {"p": {"$ref": "#/definitions/P"}}},
        {"p": 1},
        {"p": ""},
    ),
    ({"$defs": {"P": {"type": "integer"}}, "properties": {"p": {"$ref": "#/$defs/P"}}}, {"p": 1}, {"p": True}),
    ({"$defs": {"P": {"type": "boolean"}}, "properties": {"p": {"$ref": "#/$defs/P"}}}, {"p": True}, {"p": 1}),
    (
        {"properties": {"a/b~ c": {"properties": {"x": {"type": "null"}}}, "p": {"$ref": "#/properties/a~1b~0%20c"}}},
        {"p": {"x": None}},
        {"p": {"x": 1}},
    ),
    (
        {"properties": {"c": {"type": "array", "items": {"$ref": "#"}}}, "additionalProperties": False},
        {"c": [{"c": []}]},
        {"c": [{"d": 1}]},
    ),
    (
        {"properties": {"p": {"$id": "T0", "type": "object", "properties": {"c": {"$ref": "T0"}}}}},
        {"p": {"c": {"c": {}}}},
        {"p": {"c": {"c": 1}}},
    ),
    (
        {
            "$id": "https://a.example/x",
            "$defs": {"P": {"$anchor": "p", "type": "null"}},
            "properties": {"p": {"$ref": "#p"}},
        },
        {"p": None},
        {"p": 1},
    ),
    (
        {"$id": "https://a.example/x", "$defs": {"P": {"type": "null"}}, "properties": {"p": {"$ref": "x#/$defs/P"}}},
        {"p": None},
        {"p": 1},
    ),
    (
        {"properties": {"$ref": {"const": {"$ref": "#/x"}}, "enum": {"enum": [{"$id": "y"}]}}},
        {"$ref": {"$ref": "#/x"}, "enum": {"$id": "y"}},
        {"$ref": {"$ref": "#/$defs/0/x"}},
    ),
]


@pytest.mark.parametrize("position", range(len(DEFINITIONS)))
def test_a_reference_means_the_same_however_a_call_is_forced(position: int) -> None:
    """By its own tool's schema, beside tools with other definitions of the same names."""
    tools = [tool(f"f{i}", schema) for i, (schema, _, _) in enumerate(DEFINITIONS)]
    name, (schema, right, wrong) = f"f{position}", DEFINITIONS[position]
    named = {"type": "function", "function": {"name": name}}
    required = guide(read(tools=tools, tool_choice="required"))
    llguidance = pytest.importorskip("llguidance").LLMatcher
    assert llguidance.validate_grammar(llguidance.grammar_from_json_schema(required)) == ""
    for arguments in (right, wrong):
        good = jsonschema.Draft202012Validator(schema).is_valid(arguments)
        assert good == (arguments is right)
        assert jsonschema.Draft202012Validator(required).is_valid([{"name": name, "parameters": arguments}]) == good
        one = guide(read(tools=tools, tool_choice=named))
        assert jsonschema.Draft202012Validator(one).is_valid(arguments) == good


NAMES = st.sampled_from(["a", "a/b", "~0", "%20", "$ref", "é", "", "$defs", "properties"])
VALUES = st.recursive(
    st.sampled_from([None, True, 0, 1, "x"]), lambda values: st.dictionaries(NAMES, values, max_size=3), max_leaves=8
)


@st.composite
def schemas(draw: st.DrawFn) -> dict[str, Any]:
    """A schema whose parts refer to each other and to the whole."""
    leaves = st.sampled_from([{"type": kind} for kind in ("null", "boolean", "integer", "string", "object")])
    parts = {key: draw(st.dictionaries(NAMES, leaves, max_size=3)) for key in ("$defs", "definitions", "properties")}
    pointers = ["#"] + [
        "#" + "".join("/" + quote(key.replace("~", "~0").replace("/", "~1")) for key in (part, name))
        for part, names in parts.items()
        for name in names
    ]
    references = st.sampled_from(pointers).map(lambda pointer: {"$ref": pointer})
    parts["properties"] |= draw(st.dictionaries(NAMES.map("r{}".format), references, max_size=3))
    return {"type": "object", **parts, "additionalProperties": draw(references | st.booleans())}


@search(40)
@given(st.lists(schemas(), min_size=2, max_size=3), st.data())
def test_any_reference_means_the_same_in_required_calls(parameters: list[dict[str, Any]], data: st.DataObject) -> None:
    """A value is valid for a tool's schema exactly if the call with it is valid."""
    required = guide(read(tools=[tool(f"f{i}", schema) for i, schema in enumerate(parameters)], tool_choice="required"))
    for i, schema in enumerate(parameters):
        arguments = data.draw(st.dictionaries(NAMES | NAMES.map("r{}".format), VALUES, max_size=3))
        good = jsonschema.Draft202012Validator(schema).is_valid(arguments)
        assert jsonschema.Draft202012Validator(required).is_valid([{"name": f"f{i}", "parameters": arguments}]) == good


@pytest.mark.parametrize("number", [10**400, -(10**400)])
@pytest.mark.parametrize("name", ["max_tokens", "n", "top_k", "seed", "min_tokens", "max_completion_tokens"])
def test_a_huge_number_is_out_of_range(name: str, number: int) -> None:
    """And not a crash: it is too large for a float."""
    with pytest.raises(ApiError) as refused:
        read(**{name: number})
    assert (refused.value.status, refused.value.param) == (400, name)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model":"m","prompt":[%b1]}' % (b"1," * body_reader.MAX_IDS), "prompt"),
        (b'{"model":"m","prompt":[%b[1]]}' % (b"[1]," * body_reader.MAX_IDS), "prompt"),
        (b'{"model":"m","prompt":"x","logit_bias":{"1":0%b}}' % (b" " * body_reader.MAX_FIELD_BYTES), "logit_bias"),
        (
            b'{"model":"m","prompt":"x","response_format":[%b[]]}' % (b"[]," * body_reader.MAX_FIELD_BYTES),
            "response_format",
        ),
        (b'{"model":"m","prompt":[%b""]}' % (b"[]," * body_reader.MAX_IDS), "prompt"),
        (b'{"model":"m","prompt":[%b""]}' % (b'"",' * body_reader.MAX_IDS), "prompt"),
        (b'{"model":"m","prompt":[%b[]]}' % (b"[]," * (body_reader.MAX_IDS // 2)), "prompt"),
        (b'{"model":"m","prompt":[%b[]],"prompt":"x"}' % (b"[]," * body_reader.MAX_IDS), None),
        (b'{"model":"m","function_call":[%b[]]}' % (b"[]," * body_reader.MAX_IDS), "function_call"),
    ],
)
def test_a_large_body_is_rejected_before_it_is_decoded(body: bytes, param: str | None) -> None:
    """Megabytes of small values block the event loop for up to a second. Decoding would accept them, or find another
    error."""
    with pytest.raises(ApiError, match="the limit") as refused:
        body_reader.read_completion(body)
    assert refused.value.param == param


def test_a_long_text_does_not_count_as_many_values() -> None:
    text = "[1], " * body_reader.MAX_IDS
    assert body_reader.read_completion(json.dumps({"model": "m", "prompt": text}).encode()).prompt == text


@pytest.mark.parametrize("prompt", [["[1], " * 2**20, "b"], [[1] * (2**20 - 2), [2]], [[1], "a" * 2**20]])
def test_long_prompts_may_be_in_a_list(prompt: list[Any]) -> None:
    assert body_reader.read_completion(json.dumps({"model": "m", "prompt": prompt}).encode()).prompt == prompt


def test_a_call_of_a_message_is_refused_without_being_decoded() -> None:
    call = b"[" + b"[]," * 100_000 + b"[]]"
    request = body_reader.read_chat(b'{"model":"m","messages":[{"role":"user","function_call":%b}]}' % call)
    with pytest.raises(ApiError, match="function_call"):
        request.messages[0].for_template(0)
    assert bytes(request.messages[0].function_call) == call


def test_the_arguments_of_a_call_have_a_limit() -> None:
    call = {"function": {"name": "f", "arguments": json.dumps({"a": " " * body_reader.MAX_FIELD_BYTES})}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    request = body_reader.read_chat(json.dumps({"model": "m", "messages": messages}).encode())
    with pytest.raises(ApiError, match=r"arguments: .* exceeds the limit"):
        request.messages[0].for_template(0)


def test_ignored_fields_are_not_converted_to_objects() -> None:
    """They must still be valid JSON."""
    request = body_reader.read_chat(b'{"model":"m","messages":[{"role":"user"}],"metadata":{"a":[1]},"user":"ada"}')
    assert bytes(request.metadata) == b'{"a":[1]}'
    with pytest.raises(ApiError, match="not JSON"):
        body_reader.read_chat(b'{"model":"m","messages":[{"role":"user"}],"metadata":{"a":[1}}')
