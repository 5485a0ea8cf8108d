"""CoreRange: contiguous NeuronCores of one host, in the notation of NEURON_RT_VISIBLE_CORES."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

T = TypeVar("T")

# Three digits are enough for every host known (128 cores), and keep int() from being fed a novel.
_NOTATION = re.compile(r"(0|[1-9][0-9]{0,2})(?:-(0|[1-9][0-9]{0,2}))?")


@dataclass(frozen=True, order=True)
class CoreRange:
    """The cores ``first`` to ``last`` of one host, both included; ids count from 0 over the whole host.

    Ordered by ``first``, then ``last``. Raises ValueError when it would be empty or begin below 0.
    """

    first: int
    last: int

    def __post_init__(self) -> None:
        if self.first < 0:
            raise ValueError(f"a core range begins at core 0 or later, not at {self.first}")
        if self.last < self.first:
            raise ValueError(f"a core range increases: {self.first}-{self.last} ends before it begins")

    @classmethod
    def parse(cls, text: str) -> CoreRange:
        """Read "4-7" or "5". Raises ValueError with one sentence that says what is wrong."""
        match = _NOTATION.fullmatch(text)
        if match is None:
            if "," in text:
                raise ValueError(f'"{text}" is a list; a core range is contiguous, like "4-7" or "5"')
            raise ValueError(f'"{text}" is not a core range, which is written like "4-7" or "5"')
        first = int(match[1])
        last = int(match[2]) if match[2] is not None else first
        if last < first:
            raise ValueError(f'"{text}" runs backwards; a core range increases, like "{last}-{first}"')
        return cls(first, last)

    @classmethod
    def of_length(cls, first: int, length: int) -> CoreRange:
        """The ``length`` cores from ``first`` on."""
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
        """The cores in both ranges, or None when they share none."""
        first, last = max(self.first, other.first), min(self.last, other.last)
        return CoreRange(first, last) if first <= last else None

    def aligned(self, n: int) -> bool:
        """Whether the range begins at a multiple of ``n`` cores."""
        return self.first % n == 0


def ranges(cores: Iterable[int]) -> list[str]:
    """The fewest ranges that hold exactly ``cores``: {0, 1, 2, 5} gives ["0-2", "5"]."""
    found: list[CoreRange] = []
    for core in sorted(set(cores)):
        if found and found[-1].last == core - 1:
            found[-1] = CoreRange(found[-1].first, core)
        else:
            found.append(CoreRange(core, core))
    return [str(one) for one in found]


def runs(held: Mapping[int, T]) -> list[tuple[CoreRange, T]]:
    """Runs of cores that have one and the same value, such as who holds them, ascending."""
    found = []
    for (value, _), run in groupby(enumerate(sorted(held)), key=lambda item: (held[item[1]], item[1] - item[0])):
        cores = [core for _, core in run]
        found.append((CoreRange(cores[0], cores[-1]), value))
    return found
