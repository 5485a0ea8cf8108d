"""Reasoning and calls are read from a model's text, other text stays text, and cuts of the text do not matter."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from orchestrator.gateway.reading.events import (
    AnswerReader,
    CallArguments,
    CallBegin,
    Content,
    Event,
    Reasoning,
)
from orchestrator.gateway.reading.families import AnswerReading, ReaderFactory, detect_family, families, family_template
from orchestrator.gateway.reading.template import BadResponseTemplate, load_template
from tests.searches import search
from tests.tiers import everyday
from workers.messages.requests import ReasoningLimit

WEATHER = {"city": "San Francisco", "state": "CA", "unit": "celsius"}


def message(factory: ReaderFactory, text: str, size: int) -> dict[str, Any]:
    """The message of an answer that arrives in pieces of ``size`` characters."""
    reader = factory()
    events = [event for at in range(0, len(text), size) for event in reader.push(text[at : at + size])]
    events += reader.flush()
    content, calls = joined([event for event in events if not isinstance(event, Reasoning)])
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    return {"reasoning": reasoning, "content": content, "calls": [list(call) for call in values(calls)]}


TYPED: list[dict[str, Any]] = [
    {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    }
]
CONVERSATIONS = json.loads(Path(__file__).with_name("answers_of_families.json").read_text())
OURS = ("llama4", "gemma3")  # calls in Python's notation are no part of transformers' format


@pytest.mark.parametrize("answer", CONVERSATIONS, ids=lambda answer: answer["family"])
@pytest.mark.parametrize("streamed", [True, False])
def test_an_answer_of_each_family_is_read_in_any_chunks(answer: dict[str, Any], streamed: bool) -> None:
    """The answer has its documented form. It is whole, or cut after every character, every second or every seventh."""
    properties = {tool["name"]: tool["parameters"]["properties"] for tool in TYPED}
    reading = AnswerReading(family_template(answer["family"]))
    factory = ReaderFactory(reading, "auto", tools=properties, prompt=answer["prompt"], streamed=streamed)

    read = [message(factory, answer["text"], size) for size in (1, 2, 7, len(answer["text"]))]

    assert read == [{"reasoning": "", "content": "", "calls": [], **answer["message"]}] * 4


@pytest.mark.parametrize(
    "answer", [answer for answer in CONVERSATIONS if answer["family"] not in OURS], ids=lambda answer: answer["family"]
)
def test_transformers_reads_the_same_message(answer: dict[str, Any]) -> None:
    """Its parser of response templates gets the template of the family."""
    chat_parsing = pytest.importorskip("transformers.utils.chat_parsing")
    template = families()[answer["family"]].template

    parsed = chat_parsing.parse_response(answer["text"], template, prefix=answer["prompt"], tools=TYPED)

    values = [value for name, field in parsed.items() if name.startswith("tool_calls") for value in field]
    calls = [value["function"] for value in values]
    assert {
        "reasoning": parsed.get("reasoning_content", ""),
        "content": parsed.get("content", ""),
        "calls": [[call["name"], call["arguments"]] for call in calls],
    } == {"reasoning": "", "content": "", "calls": [], **answer["message"]}


def test_the_model_reasons_if_the_prompt_ends_so() -> None:
    """The chat template writes the beginning of the reasoning, or an empty one."""
    for prompt, reasons in (("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("", False)):
        reading = AnswerReading(family_template("hermes"), markers=("<think>", "</think>"))
        factory = ReaderFactory(reading, "auto", prompt=f"<|im_start|>assistant\n{prompt}")
        assert factory.markers.opened is reasons
        assert factory.reasoning_limit(7) == ReasoningLimit(7, "<think>", "</think>", reasons)


def test_a_constraint_begins_at_once_where_the_client_has_begun_the_content() -> None:
    """Else it would wait for the begin of the content, and the answer could not end."""
    family = families()["gpt-oss"]
    reading = AnswerReading(family_template("gpt-oss"), None, family.markers, family.calls, family.content)
    for prompt, waits in (("", True), ("<|channel|>final<|message|>No", False)):
        factory = ReaderFactory(reading, "auto", prompt=f"<|start|>assistant{prompt}")
        assert bool(factory.markers.close) is waits


@pytest.mark.parametrize("size", [1, 3, 100])
def test_special_tokens_that_mark_nothing_are_dropped(size: int) -> None:
    """They are dropped from reasoning and content. Those in the template remain markers."""
    template = family_template("hermes")
    dropped = template.dropped(["<|im_start|>", "<tool_call>", "</think>", "<|im|>"])
    text = '<think>a<|im_start|>b</think>c<|im|>d <tool_call>{"name": "f", "arguments": {}}</tool_call>'

    read = message(ReaderFactory(AnswerReading(template, dropped), "auto"), text, size)

    assert read == {"reasoning": "ab", "content": "cd", "calls": [["f", {}]]}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 2}, "version 2 is not supported"),
        ({"fields": {}}, "fields must be an object"),
        ({"fields": {"content": {}, "role": {}}}, "only one field"),
        ({"start_anchor": None}, "must have start_anchor"),
        ({"more": 1}, "more is not a known key"),
        ({"fields": {"content": {"open": "a", "open_pattern": "b"}}}, "exclude each other"),
        ({"fields": {"content": {"open_pattern": "("}}}, "content.open_pattern: '(' is not a regular expression"),
        ({"fields": {"tool_calls": {"content": "yaml"}}}, "tool_calls.content: 'yaml' is not one of"),
    ],
)
def test_a_template_that_is_not_in_the_format_is_rejected(change: dict[str, Any], says: str) -> None:
    """The error names the field and the fault."""
    with pytest.raises(BadResponseTemplate, match=re.escape(says)):
        load_template({"start_anchor": "<a>", "fields": {"content": {}}, **change})


def test_a_pattern_that_does_not_end_leaves_the_text_as_content() -> None:
    """Checkpoints may have patterns that backtrack without end."""
    template = load_template(
        {"start_anchor": "<a>", "fields": {"content": {}, "thinking": {"open_pattern": "(x+x+)+y", "close": "z"}}}
    )
    text = "x" * 300

    assert message(ReaderFactory(AnswerReading(template), "auto"), text, 300)["content"] == text


def joined(events: list[Event]) -> tuple[str, list[tuple[str, str]]]:
    """The content, with the reasoning in front, and name and arguments of each call; a call's pieces come in order, its
    beginning first."""
    content = reasoning = ""
    calls: list[Any] = []
    for event in events:
        if isinstance(event, Content):
            assert event.text, "an empty piece"
            content += event.text
        elif isinstance(event, Reasoning):
            assert event.text, "an empty piece"
            reasoning += event.text
        elif isinstance(event, CallBegin):
            assert event.index == len(calls)
            calls.append((event.name, ""))
        else:
            assert isinstance(event, CallArguments)
            assert event.index == len(calls) - 1, "more of a call that was over"
            assert event.text, "an empty piece"
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return (f"reasoning {reasoning}: {content}" if reasoning else content), calls


def reader_of(
    format: str | None, calling: str = "auto", *, streamed: bool = True, only_one: bool = False
) -> AnswerReader:
    template = None if format is None else family_template(format)
    return ReaderFactory(AnswerReading(template), calling, "f", streamed=streamed, only_one=only_one)()


def read(
    format: Any, text: str, cuts: Any = (), *, calling: str = "auto", streamed: bool = True, only_one: bool = False
) -> tuple[str, list[tuple[str, str]]]:
    parser = reader_of(format, calling, streamed=streamed, only_one=only_one)
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    events: list[Event] = []
    for begin, end in itertools.pairwise(edges):
        events += parser.push(text[begin:end])
    return joined(events + parser.flush())


def values(calls: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


# Formats: the texts are those of vLLM's own tests of its parsers, and of the models' pages

FORMS: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "", [("add", {"a": 1})]),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "", [("add", {"a": 1})]),
    ("hermes", 'One moment.\n<tool_call>\n{"name":"add","arguments":{}}\n</tool_call>', "One moment.", [("add", {})]),
    (
        "hermes",
        '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "b", "arguments": {"x": "}"}}'
        "\n</tool_call>",
        "",
        [("a", {}), ("b", {"x": "}"})],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_c', "", [("f", {})]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "arguments": {"b": 2}, "name": "f"}', "", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"arguments": {"name": "John"}, "name": "get_age"}', "", [("get_age", {"name": "John"})]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": [1, {"b": null}]}</tool_call>',
        "",
        [("f", {"a": [1, {"b": None}]})],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call> Done.', "Done.", [("f", {})]),
    (
        "llama3",
        '{"name": "searchTool", "parameters": {"query": "test query", "limit": 10}}',
        "",
        [("searchTool", {"query": "test query", "limit": 10})],
    ),
    ("llama3", '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", {})]),
    ("llama3", '{"name": "searchTool", "arguments": {"query": "test"}}', "", [("searchTool", {"query": "test"})]),
    (
        "llama3",
        '{"name": "a", "parameters": {"q": 1}} ; {"name": "b", "parameters": {}}; '
        '{"name": "a", "parameters": {"q": 2}}',
        "",
        [("a", {"q": 1}), ("b", {}), ("a", {"q": 2})],
    ),
    (
        "llama3",
        'Here is the result: {"name": "getOpenIncidentsTool", "parameters": {}} Would you like to know more?',
        "Here is the result:\nWould you like to know more?",
        [("getOpenIncidentsTool", {})],
    ),
    (
        "llama3",
        '{"name": "t", "parameters": {"query": "test {value} [complex]","nested": {"inner": "more {brackets}"}}}',
        "",
        [("t", {"query": "test {value} [complex]", "nested": {"inner": "more {brackets}"}})],
    ),
    (
        "llama3",
        '{"name": "p", "parameters": {"text": "He said \\"Hello {world}\\""}}',
        "",
        [("p", {"text": 'He said "Hello {world}"'})],
    ),
    ("llama3", '{"type": "function", "name": "f", "parameters": {"a": "1"}}', "", [("f", {"a": "1"})]),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments":{"a": 3.5, "b": 4}}]', "", [("add", {"a": 3.5, "b": 4})]),
    ("mistral", '[TOOL_CALLS]  [ {"name":"add" , "arguments" : {"a": 3, "b": 4} } ]', "", [("add", {"a": 3, "b": 4})]),
    ("mistral", f'[TOOL_CALLS] [{{"arguments":{json.dumps(WEATHER)}, "name": "w"}}]', "", [("w", WEATHER)]),
    (
        "mistral",
        '[TOOL_CALLS] [{"arguments":{"name": "John Doe"}, "name": "get_age"}]',
        "",
        [("get_age", {"name": "John Doe"})],
    ),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 3.5, "b": 4}}, '
        f'{{"name": "w", "arguments":{json.dumps(WEATHER)}]',
        "",
        [("add", {"a": 3.5, "b": 4}), ("w", WEATHER)],
    ),
    ("mistral", '[TOOL_CALLS]add{"a": 3.5, "b": 4}', "", [("add", {"a": 3.5, "b": 4})]),
    ("mistral", 'Hm. [TOOL_CALLS]a{"x": 1}[TOOL_CALLS]b{}', "Hm.", [("a", {"x": 1}), ("b", {})]),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]abc123def[ARGS]{"a": 1}', "", [("add", {"a": 1})]),
]


@pytest.mark.parametrize(("format", "text", "content", "calls"), FORMS)
@pytest.mark.parametrize("streamed", [True, False])
def test_a_call_is_parsed_in_any_chunks(
    format: str, text: str, content: str, calls: list[tuple[str, Any]], streamed: bool
) -> None:
    """In one piece and character by character, streamed and whole."""
    for cuts in ((), range(len(text))):
        read_content, read_calls = read(format, text, cuts, streamed=streamed)
        assert (read_content, values(read_calls)) == (content, calls)


UNHARMED = [
    ("hermes", "This is a test"),
    ("hermes", "<tool_call>not json</tool_call>"),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": 3}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", "a <tool_cal"),
    ("hermes", "<tool_call>"),
    ("llama3", "This is just some text without any tool calls"),
    ("llama3", "void f() { return {}; }"),
    ("llama3", '{"city": "Paris", "name": "x"}'),
    ("llama3", '{"city": "Paris", "name": "x", "parameters": {}}'),
    ("llama3", '<|python_tag|>brave_search.call(query="x")'),
    ("llama3", ';; {"name": "f"'),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS] [1, 2]"),
    ("mistral", "[TOOL_CALLS]no call here! {}"),
    ("mistral", "[TOOL_CALLS]" + "x" * 500 + "{}"),
    ("mistral", "[TOOL_CALLS]" + " " * 500 + '[{"name": "f", "arguments": {}}]'),
    ("mistral", "[TOOL"),
    ("gemma3", "```tool_code\nf()], [g()\n```"),
    ("gemma3", "```tool_code\nf(**{'a': 1})\n```"),
]


@pytest.mark.parametrize(("format", "text"), UNHARMED)
def test_text_without_a_call_is_unchanged(format: str, text: str) -> None:
    """Also if it starts like a call."""
    for streamed in (True, False):
        assert read(format, text, streamed=streamed) == (text, [])
        assert read(format, text, range(len(text)), streamed=streamed) == (text, [])


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("llama3", '{"name": "invalidTool", "parameters": {invalid json}'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\n"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\u00zz"}}</tool_call>'),
        ("mistral", '[TOOL_CALLS]f{"a": nul}'),
    ],
)
def test_invalid_json_arguments_are_text_in_a_whole_answer(format: str, text: str) -> None:
    """As with vLLM. In a stream the start of the call was sent already: its rest is content."""
    assert read(format, text, streamed=False) == (text, [])

    content, calls = read(format, text)
    assert len(calls) == 1
    assert text.replace("</tool_call>", "").endswith((calls[0][1] + content).replace("</tool_call>", ""))


def test_arguments_are_streamed_as_they_arrive() -> None:
    """First the name, with an id, then each piece of the arguments, as early as possible."""
    parser = reader_of("hermes")
    pieces = ["<tool_", 'call>\n{"name": "f", "argu', 'ments": {"te', 'xt": "lo', 'ng"}', "}\n</tool_call>"]

    events = [parser.push(piece) for piece in pieces]

    assert events[0] == events[1] == []
    begin, first = events[2]
    assert isinstance(begin, CallBegin)
    assert (begin.index, begin.name, begin.id[:5]) == (0, "f", "call_")
    assert [first, *events[3], *events[4]] == [CallArguments(0, piece) for piece in ('{"te', 'xt": "lo', 'ng"}')]
    assert events[5] == parser.flush() == []
    assert [parser.finish_reason(reason) for reason in ("stop", "length")] == ["tool_calls", "length"]


def test_a_mistral_id_matches_its_template() -> None:
    """Nine letters or digits; the model's own if it gives one."""
    for text, id in (("[TOOL_CALLS]f{}", None), ("[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{}", "abc123def")):
        (begin, _) = reader_of("mistral").push(text)
        assert isinstance(begin, CallBegin)
        assert len(begin.id) == 9
        assert begin.id.isalnum()
        assert id in (None, begin.id)


def test_text_that_cannot_be_a_call_is_not_held_back() -> None:
    """Words after a mark that are longer than a name are sent at once."""
    text = "[TOOL_CALLS]" + "x" * 500

    assert joined(reader_of("mistral").push(text)) == (text, [])


def test_without_parallel_calls_only_the_first_is_sent() -> None:
    """As in vLLM: the others are dropped."""
    text = '[TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]'

    assert read("mistral", text, only_one=True) == ("", [("a", "{}")])


@pytest.mark.parametrize("streamed", [True, False])
def test_required_calls_are_parsed_from_an_array(streamed: bool) -> None:
    """The guide makes the model write it, whatever its own format."""
    text = ' [{"name": "a", "parameters": {"x": 1}}, {"name": "b", "parameters": {}}]\n'

    for cuts in ((), range(len(text))):
        answer = read(None, text, cuts, calling="required", streamed=streamed)
        assert answer == ("", [("a", '{"x": 1}'), ("b", "{}")])


def test_a_named_call_is_the_whole_text() -> None:
    """The function is known, so the text is its arguments; it ends with "stop", as OpenAI's server does."""
    assert read(None, '{"x": 1}', (3, 5), calling="named") == ("", [("f", '{"x": 1}')])
    assert reader_of(None, "named").finish_reason("stop") == "stop"


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '<|python_tag|>' }}", "llama3"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama3"),
        ("<tool_call>\n<function=example>\n<parameter=a>", "qwen3-coder"),
        ("<tool_call>{name}\n<arg_key>", "glm"),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_the_format_is_detected_from_the_chat_template(template: str | None, format: str | None) -> None:
    """By its marks; XML inside <tool_call> is another format."""
    assert detect_family(template) == format


# Properties

NAMES = st.text("abc_XY.-9", min_size=1, max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=4), JSON, max_size=3)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3)
CUTS = st.lists(st.integers(0, 10_000), max_size=12)


def pieces_of(family: str) -> list[str]:
    """The marks in the family's answers, halves of them, and what is between."""
    texts = [answer["text"] for answer in CONVERSATIONS if answer["family"] == family]
    marks = [mark for text in texts for mark in re.split(r"(<[^>]*>|\[[A-Z_/]+\]|[;\[\]`]+)", text) if mark]
    return [*dict.fromkeys([*marks, *(mark[:4] for mark in marks), *(mark[4:] for mark in marks if len(mark) > 4)])]


COMMON = [
    "{",
    "}",
    '"',
    '"name"',
    '"f"',
    ":",
    ",",
    '"arguments"',
    "{}",
    ' {"a": 1}',
    "\\",
    " ",
    "\n",
    "x",
    "é",
    "1.5e",
    "null",
]
CALL = '{"name": "f", "arguments": {"a": [1, "}"]}}'


def written(format: str, calls: list[tuple[str, Any]], escaped: bool) -> str:
    """As a model of that format writes the calls."""
    texts = [
        json.dumps({"name": name, "parameters" if format == "llama3" else "arguments": value}, ensure_ascii=escaped)
        for name, value in calls
    ]
    if format == "hermes":
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    return "; ".join(texts) if format == "llama3" else f"[TOOL_CALLS] [{', '.join(texts)}]"


@pytest.mark.parametrize("format", everyday(["hermes", "llama3", "mistral"], ("hermes",)))
@given(calls=CALLS, cuts=CUTS, escaped=st.booleans(), streamed=st.booleans(), before=st.sampled_from(["", "Well. "]))
@search(30)
def test_however_it_is_cut_the_calls_are_those_that_were_written(
    format: str, calls: list[tuple[str, Any]], cuts: list[int], escaped: bool, streamed: bool, before: str
) -> None:
    """Names and arguments, in order, and the text before them."""
    content, read_calls = read(format, before + written(format, calls, escaped), cuts, streamed=streamed)

    assert (content, values(read_calls)) == (before.strip(), calls)


@pytest.mark.parametrize("format", sorted(families()))
@pytest.mark.parametrize("calling", ["auto", "required"])
@given(data=st.data(), cuts=CUTS, streamed=st.booleans())
@search(40)
def test_any_text_is_read_alike_however_it_is_cut(
    format: str, calling: str, data: st.DataObject, cuts: list[int], streamed: bool
) -> None:
    """Pieces of calls in any order; and whole and streamed answers agree where every call is good."""
    text = "".join(data.draw(st.lists(st.sampled_from([*pieces_of(format), *COMMON, CALL]), max_size=14)))

    whole = read(format, text, calling=calling, streamed=streamed)

    assert read(format, text, cuts, calling=calling, streamed=streamed) == whole
    assert read(format, text, range(len(text)), calling=calling, streamed=streamed) == whole
    for _, arguments in read(format, text, cuts, calling=calling, streamed=False)[1]:
        assert isinstance(json.loads(arguments), dict)


def test_many_beginnings_without_a_call_are_content() -> None:
    """However the text is cut, and also if it ends in one."""
    for text in ("[TOOL_CALLS]" * 40 + "[", '[TOOL_CALLS] [{"name": "f"'):
        for cuts in ((), range(len(text))):
            assert read("mistral", text, cuts, calling="required") == (text, [])


@pytest.mark.parametrize("format", sorted(families()))
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])), cuts=CUTS)
@example(text="  a {b} [c] <d>  ", cuts=[1, 2, 3])
@search(40)
def test_ordinary_text_is_unchanged(format: str, text: str, cuts: list[int]) -> None:
    """Except for white space at its ends."""
    assume(not any(mark in text for mark in ("think>", "[THINK]", *pieces_of(format)) if len(mark) > 2))
    assert read(format, text, cuts) == (text.strip(), [])


def test_long_arguments_cost_their_length() -> None:
    """A million characters in small pieces, in time that grows with their number and not with its square."""
    parser = reader_of("hermes")
    parser.push('<tool_call>{"name": "f", "arguments": {"a": "')
    piece = "x" * 100

    length = sum(len(event.text) for _ in range(10_000) for event in parser.push(piece))  # type: ignore[misc, union-attr]

    assert length == 1_000_000
