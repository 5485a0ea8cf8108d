"""Lower bounds on the number of tokens of a text, without tokenizing it."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

# Characters that a normalizer may merge into one. NFC and NFKC compose at most four: no canonical decomposition is
# longer (UAX 15), and every character decomposes into at least one. A normalizer not listed here may drop text.
_COMPOSED = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
_SPLITS = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"})  # drop nothing
_MAY_SPLIT = frozenset({"Split", "Punctuation"})  # likewise, unless their behavior is Removed


class TooManyTokens(Exception):
    """A text has more tokens than its caller allows. ``count`` is the number of tokens, or a lower bound; ``limit`` is
    what is allowed, and ``place`` the text's place among several."""

    def __init__(self, count: int, *, exact: bool, place: int = 0, limit: int = 0) -> None:
        super().__init__(f"{'' if exact else 'more than '}{count} tokens")
        self.count = count
        self.exact = exact
        self.place = place
        self.limit = limit


class TokenLengths(NamedTuple):
    """The largest number of characters that one token of a vocabulary represents."""

    longest: int
    composed: int = 1  # non-ASCII characters that may be normalized to one

    def fewest(self, text: str) -> int:
        """Returns a lower bound on the number of tokens of ``text``."""
        characters = len(text) if text.isascii() else -(-len(text) // self.composed)
        return -(-characters // self.longest)


def token_lengths(fast: FastTokenizer, alphabet: Collection[str]) -> TokenLengths | None:
    """Returns the lengths of a vocabulary; None where a token may represent any number of characters.

    This is so where a step drops text (a pre-tokenizer that removes spaces, a normalizer that strips accents), where
    unknown characters are dropped or merged into one token, and where an added token absorbs adjacent spaces.
    ``alphabet`` has the 256 characters of byte-level vocabularies.
    """
    normalizers = list(_steps(fast.normalizer, "normalizers"))
    splits = list(_steps(fast.pre_tokenizer, "pretokenizers"))
    if not (all(map(_keeps_text, normalizers)) and all(map(_drops_nothing, splits))):
        return None
    if any(token.lstrip or token.rstrip for token in fast.get_added_tokens_decoder().values()):
        return None
    vocabulary = fast.get_vocab(with_added_tokens=True)
    byte_level = any(step["type"] == "ByteLevel" for step in [*normalizers, *splits])
    if not _knows_every_character(fast.model, vocabulary, alphabet if byte_level else None):
        return None
    composed = math.prod(_COMPOSED.get(step["type"], 1) for step in normalizers)
    return TokenLengths(max(map(len, vocabulary), default=1), composed)


def _keeps_text(normalizer: Mapping[str, Any]) -> bool:
    if normalizer["type"] != "Replace":
        return normalizer["type"] in _COMPOSED
    pattern = normalizer["pattern"].get("String")  # None: a regular expression, of any length
    return pattern is not None and len(normalizer["content"]) >= len(pattern)


def _drops_nothing(split: Mapping[str, Any]) -> bool:
    return split["type"] in _SPLITS or (split["type"] in _MAY_SPLIT and split["behavior"] != "Removed")


def _knows_every_character(model: Any, vocabulary: Mapping[str, int], alphabet: Collection[str] | None) -> bool:
    """Returns whether the model maps each character to one or more tokens of its own."""
    if type(model).__name__ != "BPE":
        return False
    if alphabet is not None:
        return all(character in vocabulary for character in alphabet)
    if model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return True
    return model.unk_token is not None and not model.fuse_unk


def _steps(component: Any, inner: str) -> Iterable[dict[str, Any]]:
    """Yields the steps of a normalizer or a pre-tokenizer, including those of sequences."""
    if component is None:
        return
    pending = [json.loads(component.__getstate__())]
    while pending:
        step = pending.pop()
        if step["type"] == "Sequence":
            pending += step[inner]
        else:
            yield step
