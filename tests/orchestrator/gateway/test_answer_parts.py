"""Answers with reasoning, texts and calls: however a model's text is cut into tokens, the answer is the same."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.gateway.anthropic.answers import PING, MessagesAnswer
from orchestrator.gateway.openai.answers import HIDDEN_TOKENS, Answer, ChatCompletion, Choice
from orchestrator.gateway.openai.errors import engine_failed
from orchestrator.gateway.reading.call_text import completed_object
from orchestrator.gateway.reading.events import Content
from orchestrator.gateway.reading.families import AnswerReading, ReaderFactory, family_template
from orchestrator.gateway.responses.answers import Response, ResponsesAnswer
from orchestrator.gateway.responses.requests import read_responses
from tests.orchestrator.gateway.event_streams import joined_message, joined_response, read_events, without_ids
from tests.searches import search
from workers.messages.requests import FinishReason, TokenEvent

CALL = '<tool_call>{"name": "f", "arguments": {"a": [1, "}"], "b": "é"}}</tool_call>'
THOUGHT = "<think>Hm, é.</think>"
PIECES = [
    "Hello",
    " ",
    "\n",
    "é",
    "<think>",
    THOUGHT,
    "<tool_call>",
    "</tool_call>",
    "{",
    "}",
    '"name"',
    '"f"',
    ":",
    ",",
    CALL,
    CALL,
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=10).map("".join)
CUTS = st.lists(st.integers(0, 300), max_size=12)
FINISHES = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])
RESPONSES = read_responses(b'{"model": "m", "input": "Hi"}')
COMPLETE = st.lists(st.sampled_from(["Hello", " ", "é", THOUGHT, CALL]), max_size=6).map("".join)
CALLINGS = st.sampled_from(["", "auto", "named", "thinking"])


def events_of(text: str, cuts: Sequence[int], finish: FinishReason) -> list[TokenEvent]:
    """A token for each piece, and one that ends the answer."""
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    return [*(TokenEvent(id="r", text=piece, token_ids=[5]) for piece in pieces), TokenEvent(id="r", finish=finish)]


def choice_for(calling: str, *, streamed: bool) -> Choice:
    return Choice(0, [1, 2, 3], reader=readers(calling, streamed=streamed)() if calling else None)


def readers(calling: str, *, streamed: bool) -> ReaderFactory:
    """Makes readers of Hermes' calls; ``calling`` thinking: with reasoning."""
    reading = AnswerReading(family_template("hermes", reasons=calling == "thinking"))
    return ReaderFactory(reading, "auto" if calling == "thinking" else calling, "f", streamed=streamed)


def message(text: str, cuts: Sequence[int], finish: FinishReason, calling: str) -> dict[str, Any]:
    choice = choice_for(calling, streamed=True)
    answer = MessagesAnswer("msg-1", "m", 99, "r1", choices=[choice])
    written = answer.opening(choice) + b"".join(
        answer.events(choice, [event]) for event in events_of(text, cuts, finish)
    )
    return without_ids(joined_message(read_events(written.decode())))


def whole_message(text: str, cuts: Sequence[int], finish: FinishReason, calling: str) -> dict[str, Any]:
    choice = choice_for(calling, streamed=False)
    body = MessagesAnswer("msg-1", "m", 99, "r1", choices=[choice]).whole([(choice, events_of(text, cuts, finish))])
    assert isinstance(body, bytes)
    return without_ids(json.loads(body))


def without_counts(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "usage"}


@given(TEXTS, CUTS, FINISHES, CALLINGS)
@search(60)
def test_a_message_does_not_depend_on_how_its_text_is_cut(
    text: str, cuts: list[int], finish: FinishReason, calling: str
) -> None:
    """Joined from its events, in Anthropic's shape."""
    assert without_counts(message(text, cuts, finish, calling)) == without_counts(message(text, (), finish, calling))


@given(COMPLETE, CUTS, FINISHES, CALLINGS)
@example('{"a": 1, "b": "x', [3], FinishReason.LENGTH, "named")
@search(60)
def test_a_joined_message_equals_the_one_that_is_not_streamed(
    text: str, cuts: list[int], finish: FinishReason, calling: str
) -> None:
    """This holds if every call is complete, or is the whole answer. The counts of tokens agree, too."""
    streamed, whole = message(text, cuts, finish, calling), whole_message(text, cuts, finish, calling)

    assert streamed == whole


def response_stream(
    text: str, cuts: Sequence[int], finish: FinishReason, calling: str, failing_after: int | None = None
) -> list[dict[str, Any]]:
    """The events of an answer; with ``failing_after`` it fails after that many tokens."""
    choice = choice_for(calling, streamed=True)
    answer = ResponsesAnswer("-1", 0, RESPONSES, choices=[choice])
    written = answer.opening(choice)
    for event in events_of(text, cuts, finish)[:failing_after]:
        written += answer.events(choice, [event])
    if failing_after is not None:
        written += answer.failure(engine_failed("m", "it broke"))
    return read_events(written.decode())


def whole_response(text: str, cuts: Sequence[int], finish: FinishReason, calling: str) -> dict[str, Any]:
    choice = choice_for(calling, streamed=False)
    body = ResponsesAnswer("-1", 0, RESPONSES, choices=[choice]).whole([(choice, events_of(text, cuts, finish))])
    assert isinstance(body, bytes)
    read: dict[str, Any] = json.loads(body)
    return read


def without_call_ids(response: dict[str, Any]) -> dict[str, Any]:
    output = [{name: value for name, value in item.items() if name != "call_id"} for item in response["output"]]
    return {**response, "output": output}


@given(TEXTS, CUTS, FINISHES, CALLINGS)
@search(60)
def test_a_response_does_not_depend_on_how_its_text_is_cut(
    text: str, cuts: list[int], finish: FinishReason, calling: str
) -> None:
    """Its events are in the order that clients expect, and join to the items of the last one."""
    cut, uncut = (joined_response(response_stream(text, places, finish, calling)) for places in (cuts, ()))

    assert without_call_ids(cut) == {**without_call_ids(uncut), "usage": cut["usage"]}
    msgspec.convert(cut, Response)


@given(COMPLETE, CUTS, FINISHES, CALLINGS)
@search(60)
def test_a_joined_response_equals_the_one_that_is_not_streamed(
    text: str, cuts: list[int], finish: FinishReason, calling: str
) -> None:
    """The same holds for Messages."""
    streamed = joined_response(response_stream(text, cuts, finish, calling))

    assert without_call_ids(streamed) == without_call_ids(whole_response(text, cuts, finish, calling))


@given(TEXTS, CUTS, CALLINGS, st.integers(0, 12))
@search(60)
def test_a_response_that_fails_ends_with_what_it_had(text: str, cuts: list[int], calling: str, after: int) -> None:
    """Wherever it fails, each item that was begun is done, the last one as incomplete."""
    tokens = min(after, len(events_of(text, cuts, FinishReason.STOP)) - 1)

    failed = joined_response(response_stream(text, cuts, FinishReason.STOP, calling, failing_after=tokens))

    assert (failed["status"], failed["error"]["code"], "usage" in failed) == ("failed", "server_error", False)
    assert [item["status"] for item in failed["output"][:-1]] == ["completed"] * len(failed["output"][:-1])
    assert all(item["status"] == "incomplete" for item in failed["output"][-1:])
    msgspec.convert(failed, Response)


def chat_chunks(text: str, cuts: Sequence[int], finish: FinishReason, choice: Choice) -> list[dict[str, Any]]:
    """The chunks of a streamed chat; the last has the usage."""
    answer = Answer("i", "m", 0, True, choices=[choice])
    written = answer.opening(choice)
    for event in events_of(text, cuts, finish):
        written += answer.events(choice, [event])
    lines = (written + answer.closing(include_usage=True)).decode().split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@given(COMPLETE, CUTS, FINISHES)
@search(60)
def test_a_joined_chat_equals_the_one_that_is_not_streamed(text: str, cuts: list[int], finish: FinishReason) -> None:
    """Content, reasoning by both of its names, calls, finish reason and usage."""
    *chunks, last = chat_chunks(text, cuts, finish, choice_for("thinking", streamed=True))
    choice = choice_for("thinking", streamed=False)
    body = Answer("i", "m", 0, True, choices=[choice]).whole([(choice, events_of(text, cuts, finish))])

    whole = msgspec.json.decode(b"".join(body) if isinstance(body, list) else body, type=ChatCompletion)

    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    content, reasoning, older = (
        "".join(delta.get(name, "") for delta in deltas) for name in ("content", "reasoning", "reasoning_content")
    )
    pieces = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
    (only,) = whole.choices
    assert (only.message.content or "", only.message.reasoning or "") == (content, reasoning)
    assert only.message.reasoning_content == only.message.reasoning
    assert older == reasoning
    assert "".join(call.function.arguments for call in only.message.tool_calls or ()) == "".join(pieces)
    assert only.finish_reason == chunks[-1]["choices"][0]["finish_reason"]
    assert msgspec.to_builtins(whole.usage) == last["usage"]


def test_tokens_of_reasoning_are_counted() -> None:
    """The count includes the mark before the reasoning, and excludes the call after it."""
    tokens = events_of(f"Hm, well.</think>{CALL}", (3, 9, 17, 30), FinishReason.STOP)
    choice = choice_for("thinking", streamed=False)
    choice.read(TokenEvent(id="r", text="<think>", token_ids=[5]))

    for event in tokens:
        choice.read(event)

    assert choice.reasoning_tokens == 3


def test_a_retry_reads_its_answer_from_the_beginning() -> None:
    """A replica that is lost in the middle of an answer leaves nothing in it."""
    choice = choice_for("thinking", streamed=False)
    choice.new_reader = readers("thinking", streamed=False)
    choice.gather([TokenEvent(id="r", text="<think>Hm", token_ids=[5])])

    assert choice.gather(events_of("Yes.", (), FinishReason.STOP), attempt=1) == [Content("Yes.")]
    assert choice.reasoning_tokens == 0


def test_a_stream_that_leaves_reasoning_out_gets_pings() -> None:
    """A proxy could close a connection that is silent for minutes."""
    choice = choice_for("thinking", streamed=True)
    choice.shows_reasoning = False
    answer = MessagesAnswer("msg-1", "m", 99, "r1", choices=[choice])
    thought = TokenEvent(id="r", text="Hm", token_ids=[5] * (HIDDEN_TOKENS // 2))
    choice.read(TokenEvent(id="r", text="<think>"))

    written = [answer.events(choice, [thought]) or answer.silence(choice) for _ in range(6)]

    assert written == [b"", PING] * 3


def test_reasoning_that_is_hidden_is_counted() -> None:
    """The client has not requested it."""
    choice = choice_for("thinking", streamed=True)
    choice.shows_reasoning = False

    chunks = chat_chunks(THOUGHT + "Yes.", (10,), FinishReason.STOP, choice)

    assert "Hm" not in json.dumps(chunks)
    assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


@pytest.mark.parametrize(
    ("text", "object"),
    [
        ("", {}),
        ("x", {}),
        ("[1]", {}),
        ("{", {}),
        (' {"a', {}),
        ('{"a": "b', {}),
        ('{"a": 1', {}),
        ('{"a": 1,', {"a": 1}),
        ('{"a": 1, "b": [1, 2, {"c": "x"', {"a": 1, "b": [1, 2, {"c": "x"}]}),
        ('{"a": [1, 2', {"a": [1]}),
        ('{"a": {"b": tru', {"a": {}}),
        ('{"a": 1} {"b": 2}', {"a": 1}),
        ('{"a": "}", x', {"a": "}"}),
    ],
)
def test_an_object_that_was_cut_off_keeps_its_complete_members(text: str, object: dict[str, Any]) -> None:
    """A number at the end may go on, so it is not complete."""
    assert json.loads(completed_object(text)) == object


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    ),
    st.integers(0, 400),
)
@search(60)
def test_any_beginning_of_an_object_is_completed(value: Any, end: int) -> None:
    """To an object that JSON's reader takes; a whole one to itself."""
    text = json.dumps({"a": value})

    assert isinstance(json.loads(completed_object(text[:end])), dict)
    assert json.loads(completed_object(text)) == {"a": value}
