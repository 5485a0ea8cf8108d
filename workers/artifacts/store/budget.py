"""Which artifacts go when room is wanted: those that cost least to bring back. Pure.

Greedy-dual (Young 1994; with sizes, Cao and Irani 1997): an artifact's credit is what a GiB of it costs to bring back,
plus the level at which it was last used. The level is the credit of the last one that went, so it rises, and what is
not used is passed by it sooner or later, however dear it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

GIB = float(1 << 30)
FIXED_S = 1.0  # of each reload, however small: to list, to connect, to publish


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What may go, or may not."""

    key: str
    files: Mapping[str, int]  # content -> bytes; one that several entries have exists once
    reload_s: float  # how long it takes to bring it back
    level: float = 0.0  # the store's, when it was last used
    used_at: float = 0.0  # seconds since the epoch
    spare: bool = True  # nobody uses it

    @property
    def bytes(self) -> int:
        """Of all its files, those of others as well."""
        return sum(self.files.values())

    @property
    def credit(self) -> float:
        """Seconds a GiB above the level."""
        return self.level + self.reload_s * GIB / max(self.bytes, 1)


class Eviction(msgspec.Struct, frozen=True, kw_only=True):
    """What is to go."""

    keys: tuple[str, ...] = ()  # the cheapest first
    freed: int = 0  # bytes
    level: float = 0.0  # of the store afterwards


def held(entries: Iterable[Entry]) -> int:
    """Bytes that they need together."""
    return sum({content: size for entry in entries for content, size in entry.files.items()}.values())


def to_free(entries: Sequence[Entry], want: int, level: float = 0.0) -> Eviction | None:
    """What must go for at least ``want`` bytes; None: all that may go is less.

    The cheapest go first; then those stay after all whose room is not needed since a larger one went. ``level`` is the
    store's now.
    """
    if want <= 0:
        return Eviction(level=level)
    order = sorted(
        (entry for entry in entries if entry.spare), key=lambda entry: (entry.credit, entry.used_at, entry.key)
    )
    going, freed = [], _Freed(entries)
    for entry in order:
        if freed.bytes >= want:
            break
        going.append(entry)
        freed.add(entry)
    if freed.bytes < want:
        return None
    staying = set()
    for entry in reversed(going):
        freed.take_back(entry)
        if freed.bytes >= want:
            staying.add(entry.key)
        else:
            freed.add(entry)
    going = [entry for entry in going if entry.key not in staying]
    return Eviction(
        keys=tuple(entry.key for entry in going),
        freed=freed.bytes,
        level=max(level, *(entry.credit for entry in going)),
    )


class _Freed:
    """What goes, and the bytes of it that nobody else has: counted as it changes, for stores of hundreds of models."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._users = Counter(content for entry in entries for content in entry.files)
        self.bytes = 0

    def add(self, entry: Entry) -> None:
        for content, size in entry.files.items():
            self._users[content] -= 1
            self.bytes += size if not self._users[content] else 0

    def take_back(self, entry: Entry) -> None:
        for content, size in entry.files.items():
            self.bytes -= size if not self._users[content] else 0
            self._users[content] += 1
