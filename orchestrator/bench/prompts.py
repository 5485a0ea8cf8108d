"""Generates prompts of a given number of tokens without common prefixes, so that prefix caches have no effect."""

from __future__ import annotations

import random
from dataclasses import dataclass

FIRST_ID, LAST_ID = 32, 126  # ordinary tokens in every common vocabulary; printable ASCII if a token is a byte
POOL = 1 << 17
# Words of equal length: the length of a text depends only on their number.
WORDS = ["of", "to", "in", "is", "it", "on", "at", "by", "we", "he", "as", "so", "me", "my", "or", "an"]


@dataclass(frozen=True)
class Scale:
    """The tokens of a text by its words: ``base`` (added by the template) and ``per_word`` for each word."""

    base: float
    per_word: float

    @classmethod
    def through(cls, few: tuple[int, int], many: tuple[int, int]) -> Scale:
        """Fits two measurements of (words, tokens). Raises ValueError if more words do not give more tokens."""
        (words, tokens), (more_words, more_tokens) = few, many
        if more_words <= words or more_tokens <= tokens:
            raise ValueError(f"{words} words are {tokens} tokens, {more_words} words {more_tokens}")
        per_word = (more_tokens - tokens) / (more_words - words)
        return cls(tokens - per_word * words, per_word)

    def words(self, tokens: int) -> int:
        return max(1, round((tokens - self.base) / self.per_word))


class Prompts:
    """Prompts generated from a seed: the same index gives the same prompt."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        draw = random.Random(f"prompts {seed}")
        self._pool = [draw.randint(FIRST_ID, LAST_ID) for _ in range(POOL)]

    def ids(self, index: int, tokens: int) -> list[int]:
        """Returns exactly ``tokens`` token ids."""
        start = random.Random(f"ids {self._seed} {index}").randrange(POOL)
        ids = self._pool[start : start + tokens]
        while len(ids) < tokens:
            ids += self._pool[: tokens - len(ids)]
        return ids

    def text(self, index: int, words: int) -> str:
        draw = random.Random(f"text {self._seed} {index}")
        return " ".join(draw.choices(WORDS, k=words))
