"""Tokenizes the inputs of encoders as sentence-transformers does, and bounds a text's tokens without tokenizing it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from workers.messages.encoder_protocol import EncodeInput

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


class InputTexts(msgspec.Struct, frozen=True):
    """The inputs of one request to an encoder."""

    inputs: Sequence[str | tuple[str, str] | list[int]]  # a text, a pair of texts, or token ids, which are used as sent
    most: int  # tokens of an input
    max_length: int | None = None  # likewise, as the model's folder says; None: the tokenizer's own limit
    cut: int | None = None  # longer inputs are cut to this length, with 0 to the longest; None: they are rejected
    prompt: str = ""  # before each text
    pools_prompt: bool = True  # False: the prompt's tokens are counted in each input
    cut_second: int | None = None  # the second text of each pair ends after so many tokens of its own

    def limit(self, own: int) -> int:
        """Returns the most tokens of an input; ``own`` is the tokenizer's limit."""
        return min(self.most, own if self.max_length is None else self.max_length, self.cut or self.most)


@dataclass(frozen=True)
class InputTokenizer:
    """Tokenizes inputs with a `tokenizers` object. It changes the object's truncation meanwhile, so no other thread may
    use that."""

    fast: FastTokenizer
    own_limit: int  # tokens of an input, by the tokenizer's settings
    types: bool  # the model gets the type of each token: of the first or of the second text
    keeps_end: bool  # a text is cut at its beginning
    special_ids: Collection[int]
    check_length: Callable[[str, int], None]  # raises TooManyTokens for a text that certainly has more

    def encode(self, texts: InputTexts) -> list[EncodeInput]:
        """Returns the inputs. Raises TooManyTokens, and ValueError if a cut leaves no room for the text."""
        limit = texts.limit(self.own_limit)
        given = {place: _with(texts.prompt, value) for place, value in enumerate(texts.inputs) if not _is_ids(value)}
        if texts.cut_second is not None:
            given = self._cut_seconds(given, texts.cut_second)
        if texts.cut is None:
            for place, text in given.items():
                self._check(text, limit, place)
        prompt = 0 if texts.pools_prompt or not texts.prompt else self._prompt_tokens(texts.prompt)
        encodings = iter(self._encodings(list(given.values()), texts, limit))
        encoded = []
        for place, value in enumerate(texts.inputs):
            if isinstance(value, list):
                input = EncodeInput(self._cut(value, texts, limit))
            else:
                input = self._input(next(encodings), isinstance(value, tuple), prompt)
            if len(input.ids) > limit:
                raise TooManyTokens(len(input.ids), exact=True, place=place, limit=limit)
            encoded.append(input)
        return encoded

    def _input(self, encoding: Any, pair: bool, prompt: int) -> EncodeInput:
        ids: list[int] = encoding.ids
        types = encoding.type_ids if pair and self.types else ()
        return EncodeInput(ids, types.index(1) if 1 in types else 0, min(prompt, len(ids)))

    def _check(self, text: str | tuple[str, str], limit: int, place: int) -> None:
        try:
            for part in (text,) if isinstance(text, str) else text:
                self.check_length(part, limit)
        except TooManyTokens as error:
            raise TooManyTokens(error.count, exact=error.exact, place=place, limit=limit) from None

    def _encodings(self, given: Sequence[str | tuple[str, str]], texts: InputTexts, limit: int) -> Sequence[Any]:
        if texts.cut is None or not given:
            return self.fast.encode_batch_fast(given)
        special = self.fast.num_special_tokens_to_add(not isinstance(given[0], str))
        if limit <= special:  # `tokenizers` would not cut at all
            raise ValueError(f"{limit} tokens leave no room for text beside {special} special tokens")
        direction = "left" if self.keeps_end else "right"
        self.fast.enable_truncation(limit, strategy="longest_first", direction=direction)
        try:
            return self.fast.encode_batch_fast(given)
        finally:
            self.fast.no_truncation()

    def _cut_seconds(self, given: Mapping[int, Any], count: int) -> dict[int, Any]:
        """Returns the pairs with their second texts cut after the last character of that token."""
        seconds = self.fast.encode_batch([pair[1] for pair in given.values()], add_special_tokens=False)
        return {
            place: (first, second[: tokens.offsets[count - 1][1]] if len(tokens.ids) > count else second)
            for (place, (first, second)), tokens in zip(given.items(), seconds, strict=True)
        }

    def _cut(self, ids: list[int], texts: InputTexts, limit: int) -> list[int]:
        if texts.cut is None or len(ids) <= limit:
            return ids
        return ids[-limit:] if self.keeps_end else ids[:limit]

    def _prompt_tokens(self, prompt: str) -> int:
        """Returns the tokens of a prompt, without the special token that ends a text."""
        ids = self.fast.encode(prompt).ids
        return len(ids) - (bool(ids) and ids[-1] in self.special_ids)


def encode_bytes(texts: InputTexts) -> list[EncodeInput]:
    """Returns inputs where each byte of UTF-8 is a token. Raises TooManyTokens."""
    limit = texts.limit(texts.most)
    encoded = []
    for place, value in enumerate(texts.inputs):
        second = prompt = 0
        if isinstance(value, list):
            ids = value
        elif isinstance(value, tuple):
            first = value[0].encode()
            ids, second = [*first, *value[1].encode()[: texts.cut_second]], len(first)
        else:
            ids = [*(texts.prompt + value).encode()]
            prompt = 0 if texts.pools_prompt else len(texts.prompt.encode())
        if len(ids) > limit and texts.cut is None:
            raise TooManyTokens(len(ids), exact=True, place=place, limit=limit)
        encoded.append(EncodeInput(ids[:limit], second if second < limit else 0, min(prompt, limit)))
    return encoded


def lower_case_first(fast: FastTokenizer) -> None:
    """Adds a first step that lower-cases, if there is none, as sentence-transformers does."""
    from tokenizers.normalizers import Lowercase, Sequence

    own: Any = fast.normalizer  # its type lacks the methods of a sequence
    steps: list[Any] = [*iter(own)] if type(own) is Sequence else [] if own is None else [own]
    if not any(isinstance(step, Lowercase) for step in steps):
        fast.normalizer = Sequence([Lowercase(), *steps])


def _is_ids(value: str | tuple[str, str] | list[int]) -> bool:
    return isinstance(value, list)


def _with(prompt: str, value: Any) -> Any:
    """Returns a text with the prompt before it, and a pair as it is."""
    return prompt + value if isinstance(value, str) else value
