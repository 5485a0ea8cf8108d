"""Slots: the assignment of the engine's batch rows to requests."""

from __future__ import annotations

from typing import Generic, TypeVar

Owner = TypeVar("Owner")


class SlotError(RuntimeError):
    """A slot was taken or released twice, or does not exist: a bug of the caller, never a client's fault."""


class Slots(Generic[Owner]):
    """The engine's batch rows and their owners; the only place that counts them.

    Unless the caller names a slot, the lowest free one is taken, so live slots stay packed at the low end and engines
    can read one block. Not thread-safe: the batcher locks it.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"an engine needs at least one slot, not {count}")
        self._owners: list[Owner | None] = [None] * count

    def __len__(self) -> int:
        """Returns the number of slots, free and live."""
        return len(self._owners)

    @property
    def free_count(self) -> int:
        """The number of slots without an owner."""
        return self._owners.count(None)

    def live(self) -> list[tuple[int, Owner]]:
        """Returns every live slot with its owner, sorted by slot: the rows of the next decode."""
        return [(slot, owner) for slot, owner in enumerate(self._owners) if owner is not None]

    def free(self) -> list[int]:
        """Returns every slot without an owner, ascending."""
        return [slot for slot, owner in enumerate(self._owners) if owner is None]

    def take(self, owner: Owner, slot: int | None = None) -> int:
        """Assign ``slot``, or the lowest free one, to ``owner``. Raises ``SlotError`` when it is, or all are, live."""
        if slot is None:
            slot = next((slot for slot, present in enumerate(self._owners) if present is None), None)
            if slot is None:
                raise SlotError(f"all {len(self._owners)} slots are live")
        elif not 0 <= slot < len(self._owners):
            raise SlotError(f"slot {slot} does not exist, there are {len(self._owners)}")
        elif self._owners[slot] is not None:
            raise SlotError(f"slot {slot} is live already")
        self._owners[slot] = owner
        return slot

    def release(self, slot: int) -> Owner:
        """Free ``slot`` and return its owner. Raises ``SlotError`` when it is free or does not exist."""
        if not 0 <= slot < len(self._owners):
            raise SlotError(f"slot {slot} does not exist, there are {len(self._owners)}")
        owner = self._owners[slot]
        if owner is None:
            raise SlotError(f"slot {slot} is free already")
        self._owners[slot] = None
        return owner
