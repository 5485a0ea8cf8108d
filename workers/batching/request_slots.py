"""The slots of accepted requests, and the prompt prefixes that their KV caches hold."""

from __future__ import annotations

from workers.batching.accepted_request import AcceptedRequest
from workers.batching.slot_prefixes import SlotPrefixes
from workers.batching.slots import Slots
from workers.messages.engine_protocol import EngineSpec, Prefixes, Reuse
from workers.messages.requests import FinishReason


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
        """Returns the free slot to join and its reusable prefix; None for the lowest slot, without a prefix cache."""
        reuse = None if self.prefixes is None else self.prefixes.place(accepted.request.prompt_ids, self.free())
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
        """Records that the slot holds the whole prompt."""
        if self.prefixes is not None:
            self.prefixes.hold(slot, accepted.request.prompt_ids)

    def leave(self, slot: int, finish: FinishReason) -> None:
        """Frees the slot of a request that has ended. Its content is known unless the request failed."""
        accepted = self.release(slot)
        if self.prefixes is not None:
            failed = finish is FinishReason.ERROR
            ids = [] if failed else [*accepted.request.prompt_ids, *accepted.ids][: accepted.position]
            self.prefixes.leave(slot, ids)
