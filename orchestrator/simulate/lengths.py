"""The prompt and output lengths of a load."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources

NAMES = ("chat",)


@dataclass(frozen=True)
class Lengths:
    """Pairs of prompt and output tokens to draw from. ``capped``: how many pairs were cut to fit the model."""

    name: str
    pairs: tuple[tuple[int, int], ...]
    capped: int = 0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Parses a name, or ``PROMPT:OUTPUT`` for a constant length of each. Raises ValueError."""
        if text in NAMES:
            read = json.loads(resources.files("orchestrator.simulate").joinpath(f"{text}.json").read_text())
            return cls(text, tuple((prompt, output) for prompt, output in read["pairs"]))
        prompt, colon, output = text.partition(":")
        if not (colon and prompt.isascii() and prompt.isdecimal() and output.isascii() and output.isdecimal()):
            raise ValueError(f"{text!r} is neither {' nor '.join(NAMES)} nor PROMPT:OUTPUT, like 512:128")
        if not (0 < int(prompt) < 2**31 and 0 < int(output) < 2**31):
            raise ValueError(f"{text!r}: both lengths must be at least 1")
        return cls(text, ((int(prompt), int(output)),))

    def within(self, max_len: int) -> Lengths:
        """Returns the lengths cut to ``max_len`` tokens (at least 2) of prompt and output together: first the output
        down to half of them, then the prompt."""
        cut = tuple(cut_pair(pair, max_len) for pair in self.pairs)
        capped = sum(1 for old, new in zip(self.pairs, cut, strict=True) if old != new)
        return Lengths(self.name, cut, capped)


def cut_pair(pair: tuple[int, int], max_len: int) -> tuple[int, int]:
    """Cuts prompt and output tokens to ``max_len`` (at least 2) together: first the output down to half of them."""
    prompt, output = pair
    if prompt + output <= max_len:
        return pair
    output = min(output, max_len // 2)
    return min(prompt, max_len - output), output
