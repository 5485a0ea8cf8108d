from __future__ import annotations

from os.path import commonprefix
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.checkpoints import BOS_ID, SPECIAL_TOKENS, VOCAB_SIZE, byte_level_tokenizer
from tests.searches import search
from workers.text.detokenizer import AnswerText, ByteTextStream, FastTextStream, StopScanner, TextStream

any_ids = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=25)
# Texts whose characters take two to four bytes, so that ids split them.
split_characters = st.text(st.sampled_from("aé€日🙂 \n�"), max_size=12)


def behind_prompt(prompt_text: str, full_text: str) -> str:
    return full_text[len(commonprefix([prompt_text, full_text])) :]  # noqa: RUF071 - characters are what is compared


def text_of(stream: TextStream, ids: list[int]) -> str:
    return "".join(stream.push(token_id) for token_id in ids) + stream.flush()


@given(any_ids, any_ids, st.booleans())
@search(80)
def test_the_streamed_text_equals_the_decoded_answer(prompt: list[int], output: list[int], skip: bool) -> None:
    """For any ids, including broken UTF-8 and special tokens."""
    tokenizer = byte_level_tokenizer()
    prompt_text = tokenizer.decode(prompt, skip_special_tokens=skip)
    full_text = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    assert text_of(FastTextStream(tokenizer, prompt, skip), output) == behind_prompt(prompt_text, full_text)


@given(split_characters, st.data())
def test_a_prompt_may_end_inside_a_character(text: str, data: st.DataObject) -> None:
    """The answer then begins with the character that it completes."""
    tokenizer = byte_level_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    cut = data.draw(st.integers(0, len(ids)))
    prompt_text = tokenizer.decode(ids[:cut])
    assert text_of(FastTextStream(tokenizer, ids[:cut], True), ids[cut:]) == behind_prompt(prompt_text, text)


@given(split_characters)
def test_no_piece_has_an_incomplete_character(text: str) -> None:
    """U+FFFD appears only where the text itself has it."""
    tokenizer = byte_level_tokenizer()
    stream = FastTextStream(tokenizer, [BOS_ID], True)
    pieces = [stream.push(token_id) for token_id in tokenizer.encode(text, add_special_tokens=False).ids]
    assert sum(piece.count("�") for piece in pieces) <= text.count("�")


def test_special_tokens_are_shown_on_request_only() -> None:
    """The parameter is skip_special_tokens."""
    tokenizer = byte_level_tokenizer()
    ids = tokenizer.encode(f"a{SPECIAL_TOKENS[3]}b", add_special_tokens=False).ids
    shown = [text_of(FastTextStream(tokenizer, [BOS_ID], skip), ids) for skip in (True, False)]
    assert shown == ["ab", f"a{SPECIAL_TOKENS[3]}b"]


@given(any_ids, any_ids)
def test_an_older_decode_stream_returns_the_same_text(prompt: list[int], output: list[int]) -> None:
    """tokenizers 0.21 of the Neuron images must be primed step by step."""
    from tokenizers import decoders

    def without_ids(skip_special_tokens: bool) -> Any:
        return current(skip_special_tokens=skip_special_tokens)

    current = decoders.DecodeStream
    tokenizer = byte_level_tokenizer()
    with mock.patch.object(decoders, "DecodeStream", without_ids):
        older = text_of(FastTextStream(tokenizer, prompt, True), output)
    assert older == text_of(FastTextStream(tokenizer, prompt, True), output)


def byte_fallback_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models

    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁b": 256, "<unk>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def test_the_space_before_the_first_word_of_an_answer_is_kept() -> None:
    """Sentencepiece decoders strip the first space of their input, so the prompt is decoded, too."""
    assert text_of(FastTextStream(byte_fallback_tokenizer(), [256], True), [256, 256]) == " b b"


def test_an_answer_continues_after_a_tokenizer_revises_a_character() -> None:
    """Byte fallback turns an emitted "A" into U+FFFD when a lone byte follows."""
    stream = FastTextStream(byte_fallback_tokenizer(), [256], True)
    pieces = [stream.push(token_id) for token_id in (0x41, 0xE2, 256, 256)]
    assert pieces == ["A", "", "� b", " b"]


@given(st.lists(st.integers(0, 256), max_size=12), st.lists(st.integers(0, 256), max_size=20))
@example([0xE2], [0x41])
@example([0xF0, 0x9F], [0x99, 0x82])
@example([0xED, 0xA0], [0x43])
def test_the_stream_of_the_byte_tokenizer_equals_the_decoded_answer(prompt: list[int], output: list[int]) -> None:
    """For any bytes."""
    decode = lambda ids: bytes(i for i in ids if i < 256).decode(errors="replace")  # noqa: E731
    assert text_of(ByteTextStream(prompt), output) == behind_prompt(decode(prompt), decode(prompt + output))


def cut_at_first_stop(text: str, stops: list[str], ignored: int = 0) -> str:
    """The rule of ``StopScanner`` without streaming: look after every character behind the ``ignored`` ones."""
    for end in range(ignored + 1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: end - max(map(len, matches))]
    return text


few_letters = st.text("ab", max_size=30)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


@given(st.lists(few_letters, max_size=12), stop_lists)
@search(80)
@example(["abcd"], ["abcd", "bc"])
def test_the_first_stop_string_is_found_in_any_pieces(pieces: list[str], stops: list[str]) -> None:
    """The text ends before it; without one, all of the text is returned."""
    scanner = StopScanner(stops)
    shown = "".join(scanner.push(piece) for piece in pieces) + scanner.flush()
    text = "".join(pieces)
    assert shown == cut_at_first_stop(text, stops)
    assert bool(scanner.stop) == any(stop in text for stop in stops)
    assert scanner.stop in ("", *stops)
    assert text.startswith(shown + scanner.stop)


@given(st.lists(few_letters, max_size=12), stop_lists)
@search(80)
def test_only_the_possible_beginning_of_a_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    """The held text is as short as possible."""
    scanner = StopScanner(stops)
    text = shown = ""
    for piece in pieces:
        shown += scanner.push(piece)
        text += piece
        if scanner.stop:
            return
        held = text.removeprefix(shown)
        assert text == shown + held
        assert not held or any(stop.startswith(held) for stop in stops)
        assert not any(stop.startswith(text[start:]) for stop in stops for start in range(len(shown)))


@given(st.lists(few_letters, max_size=12), stop_lists, st.integers(0, 12))
@search(80)
def test_a_stop_string_that_ends_in_an_ignored_piece_is_text(pieces: list[str], stops: list[str], ignored: int) -> None:
    """One that only begins there still counts."""
    scanner = StopScanner(stops)
    shown = "".join(scanner.push(piece, index < ignored) for index, piece in enumerate(pieces)) + scanner.flush()
    assert shown == cut_at_first_stop("".join(pieces), stops, len("".join(pieces[:ignored])))


def test_an_empty_stop_string_is_rejected() -> None:
    """It would end every answer before its first character."""
    with pytest.raises(ValueError, match="empty"):
        StopScanner([""])


def test_a_stop_string_completed_by_the_flush_counts() -> None:
    """Incomplete bytes become U+FFFD at the end, which may be a stop string."""
    answer = AnswerText(ByteTextStream([]), ["�"])
    assert answer.push(ord("a")) + answer.push(0xE2) + answer.finish() == "a"
    assert answer.stop


def test_nothing_follows_a_stop_string() -> None:
    """Neither further tokens nor the flush add text."""
    answer = AnswerText(ByteTextStream([]), ["!"])
    assert [answer.push(ord(letter)) for letter in "a!b"] + [answer.finish()] == ["a", "", "", ""]
