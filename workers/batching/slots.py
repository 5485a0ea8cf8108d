"""The slots of an engine: its batch rows, the requests that have them, and the prompt prefixes in their KV caches."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from typing import Generic, TypeVar

from workers.batching.accepted_request import AcceptedRequest
from workers.messages.engine_protocol import EngineSpec, Prefixes, Reuse
from workers.messages.requests import FinishReason

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


class RequestSlots(Slots[AcceptedRequest]):
    """Slots that know the reusable prefixes of an engine with a prefix cache. Not thread-safe: the batcher locks it."""

    def __init__(self, spec: EngineSpec, prefixes: Prefixes | None = None) -> None:
        """``prefixes`` are those of a ``BlockEngine``."""
        super().__init__(spec.slots)
        if prefixes is None and spec.prefix_block:
            prefixes = SlotPrefixes(spec.slots, spec.prefix_block)
        self.prefixes = prefixes
        self.copies: list[tuple[int, int, int]] = []  # source, slot and tokens; made before the next prefill
        self.queries = 0  # prompt tokens looked up
        self.hits = 0  # of these, those found

    def place(self, accepted: AcceptedRequest) -> Reuse | None:
        """Returns the free slot to join and its reusable prefix; None for the lowest slot, without a prefix cache. A
        prompt whose logprobs are requested reuses nothing: the logits of a reused prefix would be missing."""
        request = accepted.request
        ids = request.prompt_ids if request.prompt_logprobs is None else request.prompt_ids[:1]
        reuse = None if self.prefixes is None else self.prefixes.place(ids, self.free())
        accepted.start = 0 if reuse is None else reuse.count
        return reuse

    def join(self, accepted: AcceptedRequest, reuse: Reuse | None) -> int:
        """Assigns the slot that ``place`` returned."""
        if reuse is None or self.prefixes is None:
            return self.take(accepted)
        self.prefixes.take(reuse, accepted.request.prompt_ids)
        if reuse.source is not None:
            self.copies.append((reuse.source, reuse.slot, reuse.count))
        self.queries += len(accepted.request.prompt_ids)
        self.hits += reuse.count
        return self.take(accepted, reuse.slot)

    def prefilled(self, slot: int, accepted: AcceptedRequest) -> None:
        """Records that the slot holds the prompt, as far as it was processed."""
        if self.prefixes is not None:
            self.prefixes.hold(slot, accepted.request.prompt_ids[: accepted.position])

    def leave(self, slot: int, finish: FinishReason) -> None:
        """Frees the slot of a request that has ended. Its content is known unless the request failed."""
        accepted = self.release(slot)
        if self.prefixes is not None:
            failed = finish is FinishReason.ERROR
            ids = [] if failed else [*accepted.request.prompt_ids, *accepted.ids][: accepted.position]
            self.prefixes.leave(slot, ids)
