"""Prompts of a wanted number of tokens that share no beginning, so that no prefix cache answers them."""

from __future__ import annotations

import random
from dataclasses import dataclass

FIRST_ID, LAST_ID = 32, 126  # in every common vocabulary, and special in none; printable ASCII where a token is a byte
POOL = 1 << 17
WORDS = ("of", "to", "in", "is", "it", "on", "at", "by", "we", "he", "as", "so", "me", "my", "or", "an")  # equally long


@dataclass(frozen=True)
class Scale:
    """Tokens of a text of ``words`` words: ``base`` (what the template adds) and so many for each word."""

    base: float
    per_word: float

    @classmethod
    def through(cls, few: tuple[int, int], many: tuple[int, int]) -> Scale:
        """By two measurements of (words, tokens). Raises ValueError when more words are not more tokens."""
        (words, tokens), (more_words, more_tokens) = few, many
        if more_words <= words or more_tokens <= tokens:
            raise ValueError(f"{words} words are {tokens} tokens, {more_words} words {more_tokens}")
        per_word = (more_tokens - tokens) / (more_words - words)
        return cls(tokens - per_word * words, per_word)

    def words(self, tokens: int) -> int:
        return max(1, round((tokens - self.base) / self.per_word))


class Prompts:
    """Made of a seed: the same number gives the same prompt."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        draw = random.Random(f"prompts {seed}")
        self._pool = [draw.randint(FIRST_ID, LAST_ID) for _ in range(POOL)]

    def ids(self, index: int, tokens: int) -> list[int]:
        """Exactly ``tokens`` token ids."""
        start = random.Random(f"ids {self._seed} {index}").randrange(POOL)
        found = self._pool[start : start + tokens]
        while len(found) < tokens:
            found += self._pool[: tokens - len(found)]
        return found

    def text(self, index: int, words: int) -> str:
        draw = random.Random(f"text {self._seed} {index}")
        return " ".join(draw.choices(WORDS, k=words))
