"""Chat requests as values: messages for the template, tools, and the schema of a forced call."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.gateway.openai import body_reader, protocol
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.openai.request_builder import chat_prompt, with_few_system_messages
from orchestrator.gateway.openai.template_variables import template_variables
from tests.checkpoints import save_tokenizer
from tests.searches import search
from workers.text.tokenizer import load_tokenizer

HELLO = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}, "$defs": {"city": {"enum": ["Paris"]}}}


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def read(**fields: Any) -> protocol.ChatRequest:
    return body_reader.read_chat(json.dumps({"model": "m", "messages": HELLO, **fields}).encode())


def for_template(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    request = read(messages=messages)
    return [message.for_template(place) for place, message in enumerate(request.messages)]


def call(arguments: str | None) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": arguments}}]}


def test_a_message_reaches_the_template_as_templates_expect_it() -> None:
    """Text in one piece, never null; arguments as objects, of a call that was cut off with the complete members; and no
    field that was not sent."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert for_template({"role": "user", "content": parts, "name": "Ada", "id": 1}) == [
        {"role": "user", "content": "ab", "name": "Ada"}
    ]
    cut: Any = (('{"a": [1], "b": ["x", "y', {"a": [1], "b": ["x"]}), ("{", {}), ("[1]", {}), ("[" * 100_000, {}))
    for text, value in (('{"a": [1]}', {"a": [1]}), ("", {}), (" ", {}), (None, {}), *cut):
        function = {"name": "f", "arguments": value}
        assert for_template(call(text)) == [
            {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
        ]
    turn = [
        {"type": "thinking", "thinking": "hm"},
        {"type": "think", "think": "hm"},
        {"type": "refusal", "refusal": "No."},
    ]
    assert for_template({"role": "assistant", "content": turn}, {"role": "assistant", "refusal": "No."}) == [
        {"role": "assistant", "content": "No.", "reasoning_content": "hm\nhm"},
        {"role": "assistant", "content": "No."},
    ]
    assert for_template({"role": "tool", "content": "4", "tool_call_id": "c"}) == [
        {"role": "tool", "content": "4", "tool_call_id": "c"}
    ]
    for name in ("reasoning_content", "reasoning"):
        for role in ("assistant", "user"):
            reasoned = {"reasoning_content": "Hm."} if role == "assistant" else {}
            assert for_template({"role": role, name: "Hm."}) == [{"role": role, "content": "", **reasoned}]


GPT_OSS = '{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}'
MISTRAL = "{%- if reasoning_effort not in ['none', 'high'] %}{{ raise_exception('...') }}{%- endif %}"
GLM = "{%- set effort = reasoning_effort if reasoning_effort in ['low', 'high'] else 'max' %}"


@pytest.mark.parametrize(
    ("template", "fields", "variables"),
    [
        (GPT_OSS, {}, {}),
        (GPT_OSS, {"chat_template_kwargs": {"a": 1}}, {"a": 1}),
        (GPT_OSS, {"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        (GPT_OSS, {"reasoning_effort": "xhigh"}, {"reasoning_effort": "high"}),
        (MISTRAL, {"reasoning_effort": "medium"}, {"reasoning_effort": "high"}),
        (MISTRAL, {"reasoning_effort": "minimal"}, {"reasoning_effort": "none"}),
        (GLM, {"reasoning_effort": "max"}, {"reasoning_effort": "max"}),
        ("no variables", {"reasoning_effort": "low"}, {}),
        (None, {"reasoning_effort": "low"}, {}),
        (
            "{{ enable_thinking }}",
            {"reasoning_effort": "none"},
            {"enable_thinking": False, "thinking": False, "thinking_budget": 0},
        ),
        (
            GPT_OSS,
            {"thinking": {"type": "disabled"}, "thinking_token_budget": 9},
            {"enable_thinking": False, "thinking": False, "thinking_budget": 0},
        ),
        (
            GPT_OSS,
            {"thinking": {"type": "enabled", "budget_tokens": 9}},
            {"enable_thinking": True, "thinking": True, "thinking_budget": 9},
        ),
        (
            GPT_OSS,
            {"thinking": {"type": "adaptive"}, "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False, "thinking": True},
        ),
    ],
)
def test_reasoning_is_controlled_by_variables_of_the_template(
    template: str | None, fields: dict[str, Any], variables: dict[str, Any]
) -> None:
    """Efforts are those that the template's model knows; the client's own variables come first."""
    assert template_variables(read(**fields), template) == variables


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (call('{"a": ' * 101 + "1" + "}" * 101), "messages[0].tool_calls[0].function.arguments: lists and objects in"),
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


PLAIN = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }} {% endfor %}"
ALTERNATING = (  # as Mistral's and Gemma's: users and assistants alternate, and a system message is the first or none
    "{% set rest = messages[1:] if messages[0].role == 'system' and KEEPS else messages %}{% for m in rest %}"
    "{% if m.role not in ('user', 'assistant') or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}{% endfor %}" + PLAIN
)
SYSTEM, USER, ASSISTANT = ({"role": role, "content": role.upper()} for role in ("system", "user", "assistant"))


@pytest.mark.parametrize(
    ("template", "messages", "prompt"),
    [
        (PLAIN, [USER, SYSTEM, ASSISTANT], "u:USER s:SYSTEM a:ASSISTANT "),
        ("True", [SYSTEM, USER, ASSISTANT, USER], "s:SYSTEM u:USER a:ASSISTANT u:USER "),
        ("True", [SYSTEM, USER, SYSTEM], "s:SYSTEM u:USER\n\nSYSTEM "),
        ("True", [USER, ASSISTANT, SYSTEM, USER], "u:USER a:ASSISTANT u:SYSTEM\n\nUSER "),
        ("True", [SYSTEM, SYSTEM, USER, SYSTEM, SYSTEM], "s:SYSTEM u:SYSTEM\n\nUSER\n\nSYSTEM\n\nSYSTEM "),
        ("True", [USER, SYSTEM, ASSISTANT, USER], "u:USER\n\nSYSTEM a:ASSISTANT u:USER "),
        ("False", [SYSTEM, USER, ASSISTANT], "u:SYSTEM\n\nUSER a:ASSISTANT "),
        ("False", [SYSTEM, {**SYSTEM, "role": "developer"}, USER], "u:SYSTEM\n\nSYSTEM\n\nUSER "),
        ("False", [SYSTEM], "u:SYSTEM "),
        ("False", [USER, USER], "roles must alternate"),
    ],
)
def test_system_messages_may_be_anywhere(tmp_path: Path, template: str, messages: Any, prompt: str) -> None:
    """As they are where the template takes them; else as text of a user's message."""
    save_tokenizer(tmp_path, template if template == PLAIN else ALTERNATING.replace("KEEPS", template))
    tokenizer = load_tokenizer("cpu", str(tmp_path))
    try:
        shown = tokenizer.decode(chat_prompt(read(messages=messages), tokenizer))
    except ApiError as error:
        shown = error.message
    assert prompt in shown.removeprefix("<|bos|>")


def test_very_many_system_messages_are_merged_in_linear_time() -> None:
    """A search of the messages at each one took 8 seconds for 20,000."""
    began_at = time.process_time()

    merged = with_few_system_messages([USER, *[SYSTEM] * 20_000], 1)

    assert merged == [{"role": "user", "content": "\n\n".join(["USER"] + ["SYSTEM"] * 20_000)}]
    assert time.process_time() - began_at < 1


def test_properties_that_are_not_an_object_name_no_types() -> None:
    """A tool's schema is the client's."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": ["a"]}}}]
    assert [tool.properties() for tool in read(tools=tools).tools or []] == [{}]


def guide(request: protocol.ChatRequest) -> Any:
    constraint = request.guide()
    assert constraint is not None
    return json.loads(constraint.text)


def test_calls_are_possible_only_with_tools() -> None:
    """`auto` by default."""
    assert (read().calling, read(tools=[]).calling, read(tools=None).calling) == ("none",) * 3
    auto = read(tools=[tool("f")])
    assert (auto.calling, auto.guide()) == ("auto", None)
    none = read(tools=[tool("f")], tool_choice="none", response_format={"type": "json_object"})
    assert none.calling == "none"
    assert guide(none) == {"type": "object"}


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


def test_calls_that_were_cut_off_are_completed_up_to_a_limit() -> None:
    """Of all messages together: finding the complete members takes time."""
    half = call('{"a": 1, "b": "' + "x" * (protocol.MAX_CUT_CHARACTERS // 2 - 20))
    cut = protocol.CutCalls()
    turns = [message.for_template(place, cut) for place, message in enumerate(read(messages=[half] * 3).messages)]
    assert [turn["tool_calls"][0]["function"]["arguments"] for turn in turns] == [{"a": 1}, {"a": 1}, {}]


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
