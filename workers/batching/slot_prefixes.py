"""The tokens in each slot's KV cache, and the slot that a new prompt can reuse the most of. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence

from workers.messages.engine_protocol import Reuse

_TOKEN_BYTES = array("I").itemsize


class SlotPrefixes:
    """Token ids by slot, where the content of its KV cache is known for certain. Implements ``Prefixes``. Not
    thread-safe.

    Slots are live or free; the content of both stays until another prompt is placed there.
    """

    def __init__(self, slots: int, block: int) -> None:
        """Common prefixes shorter than ``block`` tokens are ignored: they would cost more than they save."""
        self._block = block
        self._held = [b""] * slots
        self._used = [0] * slots  # when each was last used, as a counter; 0: empty
        self._uses = 0

    def hold(self, slot: int, ids: Sequence[int]) -> None:
        """Record that the slot's KV cache holds these tokens, from its beginning on."""
        self._held[slot] = _packed(ids)
        self._uses += 1
        self._used[slot] = self._uses if ids else 0

    leave = hold

    def take(self, reuse: Reuse, prompt: Sequence[int]) -> None:
        """Record that the slot's content is unknown until its prefill is done."""
        self.hold(reuse.slot, ())

    def place(self, prompt: Sequence[int], free: Collection[int]) -> Reuse:
        """Returns the best of the ``free`` slots, at least one, for a prompt. Callers then ``take`` it.

        1. The source is the slot, free or live, with the longest common prefix; of equals a free one, then the one
           with the fewest tokens, then the lowest. The prompt's last token is always processed, since the answer
           begins with its logits.
        2. Without a common prefix: an empty free slot, else the least recently used free slot.
        3. A free source that would lose less than a block is used as it is: a conversation that continues.
        4. Otherwise the common prefix is copied to the slot of rule 2, so that the source can still be continued;
           where that slot is the source itself, it is used as it is.
        """
        packed = _packed(prompt[:-1])
        first = packed[: self._block * _TOKEN_BYTES]  # most slots already differ here
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


def _common(a: bytes, b: bytes) -> int:
    """Returns the length of the common prefix in tokens. A binary search: comparing bytes is faster than counting."""
    same, different = 0, min(len(a), len(b)) // _TOKEN_BYTES + 1
    if b[: (different - 1) * _TOKEN_BYTES] == a[: (different - 1) * _TOKEN_BYTES]:
        return different - 1
    while different - same > 1:
        middle = (same + different) // 2
        if a[same * _TOKEN_BYTES : middle * _TOKEN_BYTES] == b[same * _TOKEN_BYTES : middle * _TOKEN_BYTES]:
            same = middle
        else:
            different = middle
    return same
