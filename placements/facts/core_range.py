"""Ranges of contiguous NeuronCores of one host, in the notation of NEURON_RT_VISIBLE_CORES."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

T = TypeVar("T")

# Three digits suffice for every known host (128 cores), and bound the input of int().
_NOTATION = re.compile(r"(0|[1-9][0-9]{0,2})(?:-(0|[1-9][0-9]{0,2}))?")


@dataclass(frozen=True, order=True)
class CoreRange:
    """The cores ``first`` to ``last`` (inclusive) of one host; ids count from 0 over the whole host.

    Ordered by ``first``, then ``last``. Raises ValueError for an empty range or one that begins below 0.
    """

    first: int
    last: int

    def __post_init__(self) -> None:
        if self.first < 0:
            raise ValueError(f"a core range must not begin below core 0: {self.first}")
        if self.last < self.first:
            raise ValueError(f"a core range must not be empty: {self.first}-{self.last}")

    @classmethod
    def parse(cls, text: str) -> CoreRange:
        """Parses "4-7" or "5". Raises ValueError with a one-sentence reason."""
        match = _NOTATION.fullmatch(text)
        if match is None:
            if "," in text:
                raise ValueError(f'"{text}" is a list; a core range is contiguous, like "4-7" or "5"')
            raise ValueError(f'"{text}" is not a core range, like "4-7" or "5"')
        first = int(match[1])
        last = int(match[2]) if match[2] is not None else first
        if last < first:
            raise ValueError(f'"{text}" runs backwards; write "{last}-{first}"')
        return cls(first, last)

    @classmethod
    def of_length(cls, first: int, length: int) -> CoreRange:
        """Returns the range of ``length`` cores that begins at ``first``."""
        return cls(first, first + length - 1)

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last + 1))

    def __contains__(self, core: object) -> bool:
        return isinstance(core, int) and self.first <= core <= self.last

    def overlap(self, other: CoreRange) -> CoreRange | None:
        """Returns the cores in both ranges, or None if they share none."""
        first, last = max(self.first, other.first), min(self.last, other.last)
        return CoreRange(first, last) if first <= last else None

    def aligned(self, n: int) -> bool:
        """Returns whether the range begins at a multiple of ``n`` cores."""
        return self.first % n == 0


def ranges(cores: Iterable[int]) -> list[str]:
    """Returns the fewest ranges that hold exactly ``cores``: {0, 1, 2, 5} gives ["0-2", "5"]."""
    return list(map(str, contiguous(sorted(set(cores)))))


def contiguous(cores: Iterable[int]) -> list[CoreRange]:
    """Returns the ranges of consecutive ids, in their order: [8, 9, 0] gives 8-9 and 0."""
    merged: list[list[int]] = []
    for core in cores:
        if merged and merged[-1][1] == core - 1:
            merged[-1][1] = core
        else:
            merged.append([core, core])
    return [CoreRange(first, last) for first, last in merged]


def runs(held: Mapping[int, T]) -> list[tuple[CoreRange, T]]:
    """Returns the runs of cores with the same value, such as their holder, ascending."""
    result = []
    for (value, _), run in groupby(enumerate(sorted(held)), key=lambda item: (held[item[1]], item[1] - item[0])):
        cores = [core for _, core in run]
        result.append((CoreRange(cores[0], cores[-1]), value))
    return result
