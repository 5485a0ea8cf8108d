"""What holds for every stream of a server, of tokens and of forwarded events, in whatever pieces its bytes arrive."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.searches import search
from workers.engines.server.completion_stream import ServerError, StreamReader
from workers.engines.server.forwarded_answer import EventReader, ForwardedRequest
from workers.messages.requests import Forwarded

REQUEST = ForwardedRequest(Forwarded("/v1/completions", b'{"model": "m", "prompt": "a", "stream": true}'))

Read = Callable[[Sequence[bytes]], tuple[Any, bool]]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
odd_choices = st.fixed_dictionaries(
    {},
    optional={
        "index": json_values,
        "text": json_values,
        "delta": json_values,
        "token_ids": json_values | st.lists(st.integers(0, 9), max_size=3),
        "logprobs": json_values
        | st.fixed_dictionaries(
            {"token_logprobs": st.lists(st.floats() | st.none(), max_size=3)},
            optional={"top_logprobs": st.lists(st.dictionaries(st.text(max_size=9), st.floats(), max_size=2))},
        ),
    },
)
odd_events = st.one_of(
    json_values.map(lambda value: json.dumps(value).encode()),
    odd_choices.map(lambda choice: json.dumps({"choices": [choice]}).encode()),
    st.binary(max_size=30).map(lambda raw: raw.replace(b"\n", b"").replace(b"\r", b"")),
    st.just(b'{"error": ' + b"[" * 5000),
)


def read_tokens(parts: Sequence[bytes]) -> tuple[Any, bool]:
    """The pieces of tokens, and whether the last of them has a finish reason. Raises ServerError."""
    reader = StreamReader(lambda id: b"%d" % id)
    pieces = [piece for part in parts for piece in reader.feed(part)]
    return pieces, bool(pieces) and pieces[-1].finish is not None


def read_events(parts: Sequence[bytes]) -> tuple[Any, bool]:
    """The bytes and counts of a forwarded answer, and whether it is complete. Raises ServerError."""
    reader = EventReader(REQUEST)
    answers = [answer for part in parts if (answer := reader.feed(part)) is not None]
    if reader.complete:
        answers.append(reader.end())
    return (b"".join(answer.data for answer in answers), sum(answer.tokens for answer in answers)), reader.complete


def event(fields: dict[str, Any], end: str = "\n\n") -> bytes:
    return f"data: {json.dumps(fields)}{end}".encode()


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, int]:
    """An answer of any length with comments between its events; and where the line of its finish reason ends."""
    ends = st.sampled_from(["\n\n", "\r\n\r\n", "\n: ping\n\n"])
    stream = b""
    for ids in draw(st.lists(st.lists(st.integers(0, 300), max_size=3), max_size=6)):
        choice = {"index": 0, "text": "é" * len(ids), "token_ids": ids, "finish_reason": None}
        stream += event({"choices": [choice]}, draw(ends))
    last = event({"choices": [{"index": 0, "text": "z", "token_ids": [1], "finish_reason": "stop"}]}, "\n")
    stream += last
    return stream + b"\ndata: [DONE]\n\n", len(stream)


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(bounds)]


@pytest.mark.parametrize("read", [read_tokens, read_events])
@search(25)
@given(stream=streams(), places=st.lists(st.integers(0, 10**6), max_size=12))
def test_the_pieces_of_a_stream_do_not_matter(read: Read, stream: tuple[bytes, int], places: list[int]) -> None:
    """Any split gives the same frames, and success."""
    data, _ = stream
    assert read(cut(data, places)) == read([data])
    assert read([data])[1]


@pytest.mark.parametrize("read", [read_tokens, read_events])
@search(25)
@given(stream=streams(), places=st.lists(st.integers(0, 10**6), max_size=4), keep=st.floats(0, 1, exclude_max=True))
def test_a_truncated_stream_is_no_success(
    read: Read, stream: tuple[bytes, int], places: list[int], keep: float
) -> None:
    """Wherever it is cut before the end of the event with the finish reason, also with `[DONE]` behind the cut."""
    data, finished = stream
    kept = data[: int(finished * keep)]
    assert not read(cut(kept, places))[1]
    assert not read([*cut(kept[: kept.rfind(b"\n") + 1], places), b"data: [DONE]\n\n"])[1]


@pytest.mark.parametrize("read", [read_tokens, read_events])
@search(25)
@given(odd=odd_events, places=st.lists(st.integers(0, 10**6), max_size=4))
def test_an_odd_event_is_no_success(read: Read, odd: bytes, places: list[int]) -> None:
    """It is skipped or an error of the server, and nothing else is raised; it never ends an answer."""
    begun = event({"choices": [{"index": 0, "text": "a", "token_ids": [1], "finish_reason": None}]})
    try:
        _, success = read(cut(begun + b"data: " + odd + b"\n\n", places))
    except ServerError:
        return
    assert not success
