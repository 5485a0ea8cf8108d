"""Answers of each family of models, in its documented format: what is reasoning, content and call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.gateway.reading.events import CallArguments, CallBegin, Content, Reasoning
from orchestrator.gateway.reading.families import ASSISTANTS, FAMILIES, families, format_of
from orchestrator.gateway.reading.reader import ForcedReader, RequiredReader, TemplateReader
from orchestrator.gateway.reading.template import TemplateError, load_template
from tests.orchestrator.gateway.readers import reader_of
from tests.searches import search

CASES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("response_families.json").read_text())
TOOLS = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "time": {"type": "object", "properties": {"zone": {"type": "string"}}},
}


def message(reader: Any, pieces: Any) -> dict[str, Any]:
    """Returns what a reader makes of an answer in pieces."""
    read: dict[str, Any] = {"reasoning": "", "content": "", "calls": []}
    for event in [*(event for piece in pieces for event in reader.push(piece)), *reader.flush()]:
        match event:
            case Reasoning(text):
                read["reasoning"] += text
            case Content(text):
                read["content"] += text
            case CallBegin(_, _, name):
                read["calls"].append([name, ""])
            case CallArguments(_, text):
                read["calls"][-1][1] += text
    read["calls"] = [[name, json.loads(arguments)] for name, arguments in read["calls"]]
    return read


def reader_for(case: dict[str, Any], streamed: bool) -> Any:
    return reader_of(
        case["family"],
        streamed=streamed,
        chat_template=case["chat_template"],
        message=case["prompt"],
        tools=TOOLS,
    )


def expected(case: dict[str, Any]) -> dict[str, Any]:
    return {key: case[key] for key in ("reasoning", "content", "calls")}


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("case", CASES, ids=[f"{case['family']}-{i}" for i, case in enumerate(CASES)])
def test_an_answer_is_read_as_its_family_documents(case: dict[str, Any], streamed: bool) -> None:
    """In one piece, in two at every character, and character by character."""
    text = case["text"]
    cuts = [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]

    for pieces in cuts:
        assert message(reader_for(case, streamed), pieces) == expected(case)


def test_every_family_has_an_answer() -> None:
    """A family without one is not tested."""
    assert {case["family"] for case in CASES} == set(FAMILIES)


@pytest.mark.parametrize("case", CASES, ids=[f"{case['family']}-{i}" for i, case in enumerate(CASES)])
def test_transformers_reads_the_same_by_our_template(case: dict[str, Any]) -> None:
    """Where the template needs none of our extensions: its parser is the reference."""
    parsing = pytest.importorskip("transformers.utils.chat_parsing", reason="before transformers 5.13")
    names = case.get("fields")
    if names == []:
        pytest.skip("transformers has no such format")
    fields = dict(families()[case["family"]].fields)
    if case["chat_template"]:
        fields["thinking"] = dict(zip(("open", "close"), case["chat_template"].split(), strict=True))
    chosen = [name for name in fields if name in names or name in ("tags", "thinking")] if names else list(fields)
    template = {name.partition("/")[0]: fields[name] for name in chosen if name != "content/outside"}
    template.setdefault("content", {"repeats": True, "join": ""})
    tools = [{"type": "function", "function": {"name": name, "parameters": TOOLS[name]}} for name in TOOLS]

    value = {"start_anchor": list(ASSISTANTS), "fields": template}
    parsed = parsing.parse_response(case["text"], value, prefix=case["prompt"], tools=tools)

    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in _flat(parsed.get("tool_calls", []))]
    assert {
        "reasoning": parsed.get("thinking", ""),
        "content": parsed.get("content", ""),
        "calls": calls,
    } == expected(case)


def _flat(calls: list[Any]) -> list[Any]:
    return [each for call in calls for each in (call if isinstance(call, list) else [call])]


@pytest.mark.parametrize(
    ("chat_template", "family", "reasoning"),
    [
        ("{{ '<tool_call>' }}", "hermes", None),
        ("<tool_call> {{ message.reasoning_content }} <think></think>", "hermes", ("<think>", "</think>")),
        ("{{ '[TOOL_CALLS]' }} [ARGS] [THINK][/THINK]", "mistral", ("[THINK]", "[/THINK]")),
        ("{{ '<|python_tag|>' }}", "llama3", None),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama3", None),
        ("<tool_call>\n<function=example>", "qwen3_coder", None),
        ("<tool_call>{name}\n<arg_key> <think></think>", "glm", ("<think>", "</think>")),
        ("<｜tool▁calls▁begin｜> <think></think>", "deepseek", ("<think>", "</think>")),
        ("<|channel|>", "harmony", ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>")),
        ("<think></think>", None, ("<think>", "</think>")),
    ],
)
def test_the_format_is_chosen_by_the_signs_in_the_chat_template(
    chat_template: str, family: str | None, reasoning: tuple[str, str] | None
) -> None:
    """Calls and reasoning have signs of their own."""
    format = format_of("auto", chat_template)

    assert format is not None
    assert format.reasoning == reasoning
    assert format.has_calls is (family is not None)
    assert format.call_beginnings == (() if family is None else families()[family].calls)


@pytest.mark.parametrize("chat_template", ["{{ messages }}", None])
def test_other_models_answer_with_text(chat_template: str | None) -> None:
    """So do those whose spec says `none`."""
    assert format_of("auto", chat_template) is None
    assert format_of("none", "<tool_call> <think></think>") is None


def test_the_template_of_a_checkpoint_comes_first() -> None:
    """One that cannot be read is ignored."""
    own = {"start_anchor": "A:", "fields": {"content": {}, "reasoning": {"open": "((", "close": "))"}}}

    format = format_of("auto", "<think></think>", json.dumps(own))
    assert format is not None
    assert message(TemplateReader(format.template), ["((a", ")) b"]) == {"reasoning": "a", "content": "b", "calls": []}
    newer = format_of("auto", "<think></think>", json.dumps({**own, "version": 2}))
    assert newer is not None
    assert newer.reasoning == ("<think>", "</think>")


@pytest.mark.parametrize(
    ("template", "names"),
    [
        ([], "fields"),
        ({"fields": {}}, "fields"),
        ({"fields": {"content": {}}, "version": 2}, "version 2"),
        ({"fields": {"content": {}, "other": {}}}, "content, other"),
        ({"fields": {"content": {"opens": "a"}}}, "fields.content.opens"),
        ({"fields": {"content": {"content": "yaml"}}}, "yaml"),
        ({"fields": {"content": {"open_pattern": "("}}}, "fields.content.open_pattern"),
        ({"fields": {"content": {"open": "a", "open_pattern": "a"}}}, "exclude"),
        ({"fields": {"content": {"open": [""]}}}, "fields.content.open"),
        ({"fields": {"content": {}}, "more": 1}, "more"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_by_name(template: Any, names: str) -> None:
    """The error names the field."""
    with pytest.raises(TemplateError, match=names):
        load_template(template)


def test_a_forced_call_follows_the_reasoning() -> None:
    """Its JSON is what the template takes for content."""
    format = format_of("auto", "<think></think>")
    assert format is not None
    text = '<think>\nWhich?\n</think>\n\n[{"name": "time", "parameters": {"zone": "CET"}}]'

    for pieces in ([text], list(text)):
        reader = ForcedReader(TemplateReader(format.template), RequiredReader(streamed=True))
        read = message(reader, pieces)
        assert read == {"reasoning": "Which?", "content": "", "calls": [["time", {"zone": "CET"}]]}


def test_a_reader_says_whether_it_is_in_reasoning() -> None:
    """From the opening mark to the closing one, which may be in the prompt."""
    format = format_of("auto", "<think></think>")
    assert format is not None
    reader = TemplateReader(format.template, message="<think>\n")
    states = [reader.in_reasoning]
    for piece in ("a", "</think>", "b"):
        reader.push(piece)
        states.append(reader.in_reasoning)
    assert states == [True, True, False, False]


def test_a_pattern_that_takes_too_long_ends_the_reading() -> None:
    """The rest is content."""
    slow = {"fields": {"content": {}, "reasoning": {"open_pattern": "(a|aa)+$x", "close": "x"}}}
    text = "a" * 5000

    read = message(TemplateReader(load_template(slow)), [text[:2500], text[2500:]])

    assert read == {"reasoning": "", "content": text, "calls": []}


MARKS = sorted(
    {mark for case in CASES for mark in case["text"].replace("{", " {").split() if "<" in mark or "[" in mark}
)
PIECES = [
    *MARKS,
    "{",
    "}",
    "[",
    "]",
    '"name"',
    ":",
    '{"name": "f", "arguments": {}}',
    " ",
    "\n",
    "x",
    "(",
    ")",
    "<",
    "=",
]


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data(), streamed=st.booleans())
@search(25)
def test_any_text_is_read_alike_however_it_is_cut(family: str, data: st.DataObject, streamed: bool) -> None:
    """Marks of all families in any order; nothing is raised, and arguments are objects."""
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=12)))
    cut = data.draw(st.integers(0, len(text)))

    def read(pieces: list[str]) -> Any:
        try:
            return message(reader_of(family, streamed=streamed, chat_template="<think></think>", tools=TOOLS), pieces)
        except json.JSONDecodeError:  # a streamed call that was cut off or broken
            assert streamed
            return None

    whole = read([text])
    assert read([text[:cut], text[cut:]]) == whole
    assert read(list(text)) == whole
