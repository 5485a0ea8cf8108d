"""The frames between gateway and replica."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.messages.requests import FinishReason, GenerateRequest, TokenEvent
from workers.messages.wire import (
    MAX_FRAME_BYTES,
    MAX_MESSAGE_BYTES,
    Cancel,
    FrameReader,
    Hello,
    Message,
    Step,
    Submit,
    WireError,
    encode,
)

texts = st.text(max_size=20)
messages = st.one_of(
    st.builds(Hello, texts, texts, st.integers(0, 2**31)),
    st.builds(Cancel, texts),
    st.builds(
        Submit,
        st.builds(GenerateRequest, id=texts, prompt_ids=st.lists(st.integers(0, 2**31)), max_tokens=st.integers(1, 99)),
    ),
    st.builds(
        Step,
        st.lists(st.builds(TokenEvent, id=texts, text=texts, finish=st.none() | st.sampled_from(FinishReason))),
    ),
)


@given(sent=st.lists(messages, max_size=5), cut=st.integers(1, 7))
def test_messages_arrive_as_they_were_sent_however_the_bytes_are_cut(sent: list[Step], cut: int) -> None:
    """A byte stream gives back the messages, in order, whatever the size of its pieces."""
    data = b"".join(encode(message) for message in sent)
    reader = FrameReader()

    received = [message for start in range(0, len(data), cut) for message in reader.feed(data[start : start + cut])]

    assert received == sent


def widened(value: Any) -> Any:
    """Returns a decoded message with a field more in each struct."""
    if isinstance(value, list):
        return [widened(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {**{key: widened(item) for key, item in value.items()}, "added": [1]}
    return value


@given(messages)
def test_a_message_of_another_version_is_read_without_its_further_fields(message: Step) -> None:
    """Machines may have different versions of corewright with the same protocol."""
    wide = msgspec.msgpack.encode(widened(msgspec.msgpack.decode(msgspec.msgpack.encode(message))))
    assert msgspec.msgpack.decode(wide, type=Message) == message


def test_a_length_over_the_limit_is_refused_before_it_is_buffered() -> None:
    """A foreign peer cannot make a replica wait for gigabytes."""
    with pytest.raises(WireError, match="over the limit"):
        FrameReader().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))


@pytest.mark.parametrize("body", [b"\xc1", b"\x80", b"\x81\xa4type\xa6Nobody", b"GET / HTTP/1.1\r\n"])
def test_an_invalid_body_is_refused(body: bytes) -> None:
    """Anything but the protocol's own messages is an error, not a crash."""
    with pytest.raises(WireError, match="not a message"):
        FrameReader().feed(len(body).to_bytes(4, "big") + body)


def _lengths(data: bytes) -> list[int]:
    """The lengths of the frames in ``data``, without their marks."""
    lengths = []
    while data:
        lengths.append(int.from_bytes(data[:4], "big") & 0x7FFFFFFF)
        data = data[4 + lengths[-1] :]
    return lengths


@pytest.mark.parametrize("tokens", [400_000, 1_500_000])
def test_a_long_prompt_is_sent_in_frames_of_at_most_1_mib(tokens: int) -> None:
    """A message may be larger than a frame, so the limit of frames is no limit of prompts."""
    sent = Submit(GenerateRequest(id="r", prompt_ids=[100_000] * tokens, max_tokens=1))
    data = encode(sent)
    reader = FrameReader()

    received = [message for start in range(0, len(data), 65536) for message in reader.feed(data[start : start + 65536])]

    assert MAX_FRAME_BYTES == 2**20
    assert max(_lengths(data)) == MAX_FRAME_BYTES
    assert received == [sent]
    assert reader.feed(encode(Cancel("r"))) == [Cancel("r")]


def test_a_message_over_the_limit_is_refused_on_both_sides() -> None:
    """By its writer, and by a reader of frames that never come to an end."""
    with pytest.raises(WireError, match="over the limit"):
        encode(Submit(GenerateRequest(id="r", prompt_ids=[100_000] * 4_000_000, max_tokens=1)))
    reader, part = FrameReader(), (MAX_FRAME_BYTES | 2**31).to_bytes(4, "big") + bytes(MAX_FRAME_BYTES)
    for _ in range(MAX_MESSAGE_BYTES // MAX_FRAME_BYTES):
        assert reader.feed(part) == []
    with pytest.raises(WireError, match="over the limit"):
        reader.feed(part)
