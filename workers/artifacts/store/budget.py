"""Chooses the artifacts to evict: those that are cheapest to fetch again. Pure.

Greedy-dual (Young 1994; with sizes, Cao and Irani 1997): an artifact's credit is the cost of fetching a GiB of it
again, plus the level at its last use. The level is the credit of the last evicted artifact; it rises, so any unused
artifact is evicted eventually, however expensive it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

GIB = float(1 << 30)
FIXED_S = 1.0  # fixed cost of a reload: listing, connecting, publishing


class StoredArtifact(msgspec.Struct, frozen=True, kw_only=True):
    """An artifact of the store, as eviction sees it."""

    key: str
    files: Mapping[str, int]  # content -> bytes; content shared by several entries exists once
    reload_s: float  # cost of fetching it again
    level: float = 0.0  # of the store at the last use
    used_at: float = 0.0  # seconds since the epoch
    spare: bool = True  # not in use

    @property
    def bytes(self) -> int:
        """The size of all its files, shared ones included."""
        return sum(self.files.values())

    @property
    def credit(self) -> float:
        """Seconds per GiB, plus the level."""
        return self.level + self.reload_s * GIB / max(self.bytes, 1)


class Eviction(msgspec.Struct, frozen=True, kw_only=True):
    """The artifacts to evict."""

    keys: tuple[str, ...] = ()  # the cheapest first
    freed: int = 0  # bytes
    level: float = 0.0  # the store's level afterwards


def occupied_bytes(entries: Iterable[StoredArtifact]) -> int:
    """Returns the bytes that the entries occupy together."""
    return sum({content: size for entry in entries for content, size in entry.files.items()}.values())


def choose_evictions(entries: Sequence[StoredArtifact], want: int, level: float = 0.0) -> Eviction | None:
    """Returns what to evict to free at least ``want`` bytes; None: the unused artifacts are not enough.

    Takes the cheapest first, then puts back those that are not needed because a larger one was taken later.
    ``level``: the store's current level.
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
    """The bytes that an eviction frees, without shared content; incremental, for stores with hundreds of models."""

    def __init__(self, entries: Iterable[StoredArtifact]) -> None:
        self._users = Counter(content for entry in entries for content in entry.files)
        self.bytes = 0

    def add(self, entry: StoredArtifact) -> None:
        for content, size in entry.files.items():
            self._users[content] -= 1
            self.bytes += size if not self._users[content] else 0

    def take_back(self, entry: StoredArtifact) -> None:
        for content, size in entry.files.items():
            self.bytes -= size if not self._users[content] else 0
            self._users[content] += 1
