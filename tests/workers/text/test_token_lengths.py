"""Texts that are too long are rejected without tokenizing them whole; texts that fit never are."""

from __future__ import annotations

import threading
import time
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.checkpoints import byte_level_tokenizer, save_tokenizer
from tests.searches import search
from workers.text import tokenizer as module
from workers.text.input_tokens import token_lengths
from workers.text.tokenizer import ByteTokenizer, HubTokenizer, TooManyTokens, _byte_of_character

ALPHABET = _byte_of_character()


def byte_level(*, normalizer: Any = None, added: Any = None) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(byte_level_tokenizer().to_str())
    tokenizer.normalizer = normalizer
    if added is not None:
        tokenizer.add_tokens([added])
    return tokenizer


def composing() -> Any:
    from tokenizers import normalizers

    return byte_level(normalizer=normalizers.NFC())


def byte_fallback() -> Any:
    """Like Llama 2's: spaces are written as a letter, unknown characters as their bytes."""
    from tokenizers import Tokenizer, models, normalizers

    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257, "▁a": 258, "aa": 259}
    merges = [("▁", "a"), ("a", "a")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def with_unknown(**named: Any) -> Any:
    from tokenizers import Tokenizer, models

    return Tokenizer(models.BPE(vocab={"a": 0, "<unk>": 1}, merges=[], **named))


def one_unknown() -> Any:
    return with_unknown(unk_token="<unk>", fuse_unk=False)


BOUNDED = (byte_level, composing, byte_fallback, one_unknown)
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=20),
        st.sampled_from(
            ["<|bos|>", "⟨5⟩", " " * 50, "e\u0302\u0301", "\u1112\u1161\u11ab", "\u03b1\u0313\u0300\u0345", "İ"]
        ),
    ),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("make", BOUNDED)
def test_no_text_has_fewer_tokens_than_the_bound(make: Any) -> None:
    """So a prompt that fits is never rejected by its characters."""
    tokenizer = make()
    lengths = token_lengths(tokenizer, ALPHABET)
    assert lengths is not None

    @given(TEXTS)
    @search(50)
    def check(text: str) -> None:
        assert lengths.fewest(text) <= len(tokenizer.encode(text, add_special_tokens=False))

    check()


def test_at_most_four_characters_are_composed_to_one() -> None:
    """By NFC and NFKC, for all of Unicode."""
    longest = max(len(unicodedata.normalize("NFD", chr(code))) for code in range(0x110000))
    assert longest == 4


def unbounded() -> dict[str, Any]:
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

    def split_by(split: Any) -> Any:
        tokenizer = byte_level()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
        return tokenizer

    return {
        "strips": byte_level(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
        "strips accents": byte_level(normalizer=normalizers.StripAccents()),
        "joins spaces": byte_level(normalizer=normalizers.Replace(Regex(" +"), " ")),
        "shortens": byte_level(normalizer=normalizers.Replace("  ", " ")),
        "drops spaces": split_by(pre_tokenizers.Whitespace()),
        "drops a delimiter": split_by(pre_tokenizers.CharDelimiterSplit("-")),
        "drops what it splits at": split_by(pre_tokenizers.Split(Regex("-+"), "removed")),
        "takes spaces beside": byte_level(added=AddedToken("<end>", rstrip=True)),
        "drops unknown characters": with_unknown(),
        "joins unknown characters": with_unknown(unk_token="<unk>", fuse_unk=True),
        "one token for any word": Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
    }


@pytest.mark.parametrize("kind", sorted(unbounded()))
def test_a_tokenizer_that_may_drop_text_has_no_bound(kind: str) -> None:
    assert token_lengths(unbounded()[kind], ALPHABET) is None


def hub(path: Path) -> HubTokenizer:
    save_tokenizer(path)
    return HubTokenizer(path)


class Untouched:
    """A tokenizer that must not be used."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was used")


def test_a_text_with_too_many_characters_is_not_tokenized(tmp_path: Path) -> None:
    tokenizer = hub(tmp_path)
    tokenizer._fast = Untouched()
    with pytest.raises(TooManyTokens) as refused:
        tokenizer.encode("x" * 100_000, most=100)
    assert refused.value.count >= 100
    assert not refused.value.exact


def test_a_text_of_exactly_the_limit_is_accepted_and_one_more_token_is_not(tmp_path: Path) -> None:
    tokenizer = hub(tmp_path)
    text = "hello world " * 300
    ids = tokenizer.encode(text)
    assert tokenizer.encode(text, most=len(ids)) == ids
    with pytest.raises(TooManyTokens) as refused:
        tokenizer.encode(text, most=len(ids) - 1)
    assert (refused.value.count, refused.value.exact) == (len(ids), True)


def test_the_byte_tokenizer_counts_bytes() -> None:
    assert ByteTokenizer().encode("é", most=2) == [0xC3, 0xA9]
    with pytest.raises(TooManyTokens, match="2 tokens"):
        ByteTokenizer().encode("é", most=1)


def test_a_text_without_a_bound_is_tokenized_only_until_it_is_certainly_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenized text takes more than a hundred times its length in memory."""
    tokenizer = hub(tmp_path)
    tokenizer._lengths = None
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 4096)
    lengths: list[int] = []
    fast = tokenizer._fast

    class Counted:
        def encode_batch_fast(self, texts: list[str], **named: Any) -> Any:
            lengths.append(len(texts[0]))
            return fast.encode_batch_fast(texts, **named)

    tokenizer._fast = Counted()
    with pytest.raises(TooManyTokens):
        tokenizer.encode("x" * 10**6, most=1000)
    assert lengths == [4096]


def test_counting_in_pieces_rejects_no_text_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHORT_CHARACTERS", 0)
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 16)
    monkeypatch.setattr(module, "PIECE_SLACK", 14)  # a cut at each end may make 7 tokens of the 7 characters of <|bos|>
    tokenizer = hub(tmp_path)

    @given(TEXTS)
    @example("<|bos|>" * 40)
    @search(50)
    def check(text: str) -> None:
        ids = tokenizer.encode(text, most=None)
        assert tokenizer.encode(text, most=len(ids)) == ids

    check()


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_other_threads_run_while_a_long_text_is_tokenized(work: str, tmp_path: Path) -> None:
    tokenizer = hub(tmp_path)
    text = "The quick brown fox. " * 20_000
    given_ids = tokenizer.encode(text) * 4
    call = (lambda: tokenizer.encode(text)) if work == "encode" else (lambda: tokenizer.decode(given_ids))
    began, ended = threading.Event(), threading.Event()

    def run() -> None:
        began.set()
        call()
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    began.wait()
    turns = 0
    while not ended.is_set():
        time.sleep(0.0005)
        turns += 1
    thread.join()
    assert turns >= 10
