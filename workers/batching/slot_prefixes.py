"""What the slots of an engine hold in their KV cache, and which of it a new prompt begins with. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass

_TOKEN_BYTES = array("I").itemsize


@dataclass(frozen=True)
class Reuse:
    """Where a prompt goes, and how much of it need not be read."""

    slot: int
    count: int = 0  # of its first tokens, that the slot holds, or ``source`` does
    source: int | None = None  # the slot whose first ``count`` tokens are copied first; None: none are


class SlotPrefixes:
    """Token ids by slot, as far as it is certain that the slot's KV cache holds them. Not thread-safe.

    Slots are live or free as their owner says; what either holds stays where it is until another prompt goes there.
    """

    def __init__(self, slots: int, block: int) -> None:
        """Fewer than ``block`` tokens in common are none: they would save less than they cost."""
        self._block = block
        self._held = [b""] * slots
        self._used = [0] * slots  # when each was held last, as a count; 0: it holds nothing
        self._uses = 0

    def hold(self, slot: int, ids: Sequence[int]) -> None:
        """The slot's KV cache holds these tokens, from its beginning on."""
        self._held[slot] = _packed(ids)
        self._uses += 1
        self._used[slot] = self._uses if ids else 0

    def drop(self, slot: int) -> None:
        """What the slot holds is not known any more."""
        self._held[slot] = b""
        self._used[slot] = 0

    def held(self, slot: int) -> list[int]:
        """The tokens that the slot holds for certain."""
        return list(array("I", self._held[slot]))

    def place(self, prompt: Sequence[int], free: Collection[int]) -> Reuse:
        """The best of the ``free`` slots, at least one, for a prompt. Who takes it drops what it holds.

        1. The source is the slot, free or live, that begins like the prompt for longest; of equals a free one, then
           the one that holds least, then the lowest. The prompt's last token is read in any case, since the answer
           begins with its logits.
        2. Nothing in common: the free slot that holds nothing, else the one that was used longest ago.
        3. A free source of which less than a block would be lost is taken as it is: a conversation that goes on.
        4. Otherwise its beginning is copied to the slot of rule 2, so that the rest of it stays for who goes on there;
           where that is the source itself, it is taken as it is.
        """
        packed = _packed(prompt[:-1])
        first = packed[: self._block * _TOKEN_BYTES]  # most slots differ here already
        common = [_common(packed, held) if held.startswith(first) else 0 for held in self._held]
        source = max(range(len(common)), key=lambda slot: (common[slot], slot in free, -len(self._held[slot]), -slot))
        count, spare = common[source], min(free, key=lambda slot: (self._used[slot], slot))
        if count < self._block:
            return Reuse(spare)
        if source in free and (source == spare or len(self._held[source]) // _TOKEN_BYTES - count < self._block):
            return Reuse(source, count)
        return Reuse(spare, count, source)


def _packed(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()


def _common(one: bytes, other: bytes) -> int:
    """Tokens that both begin with: a search by halves, since comparing bytes is faster than counting tokens."""
    same, different = 0, min(len(one), len(other)) // _TOKEN_BYTES + 1
    if other[: (different - 1) * _TOKEN_BYTES] == one[: (different - 1) * _TOKEN_BYTES]:
        return different - 1
    while different - same > 1:
        middle = (same + different) // 2
        if one[same * _TOKEN_BYTES : middle * _TOKEN_BYTES] == other[same * _TOKEN_BYTES : middle * _TOKEN_BYTES]:
            same = middle
        else:
            different = middle
    return same
