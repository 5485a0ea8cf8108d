"""Assigns the blocks of a KV cache to slots, and shares those of common prefixes. Pure."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterator, Sequence

from workers.messages.engine_protocol import Reuse

Key = bytes
"""A digest of a block's tokens and of all before them."""


class BlockPool:
    """A fixed number of blocks, shared by slots that begin with the same tokens. Implements ``Prefixes``.

    A block belongs to as many slots as begin with its tokens. One that belongs to none keeps its content until no empty
    block is left: then the least recently used is emptied. Only full blocks of tokens that are known to have been
    processed are shared, so a block that is written belongs to one slot. Not thread-safe.
    """

    def __init__(self, block: int, blocks: int, slots: int, max_len: int, starts: Collection[int]) -> None:
        """``block`` is the number of tokens in a block; ``starts`` are the prefix lengths that a prefill can skip.

        Raises ValueError where the blocks do not suffice for all slots at ``max_len``: a request could then run out of
        them in the middle of its answer.
        """
        if blocks < slots * -(-max_len // block):
            raise ValueError(f"{slots} slots of {max_len} tokens need {slots * -(-max_len // block)} blocks of {block}")
        self._block = block
        self._starts = sorted(starts, reverse=True)
        self._tables: list[list[int]] = [[] for _ in range(slots)]
        self._owners = [0] * blocks  # the number of slots that a block belongs to
        self._keys: list[Key | None] = [None] * blocks
        self._by_key: dict[Key, int] = {}
        self._empty = list(range(blocks))[::-1]
        self._unowned: dict[int, None] = {}  # blocks with a key that belong to no slot, the least recently used first

    def place(self, prompt: Sequence[int], free: Collection[int]) -> Reuse:
        """See ``Prefixes.place``. The prompt's last token is always processed."""
        cached = sum(1 for _ in self._cached(prompt)) * self._block
        return Reuse(min(free), next((start for start in self._starts if start <= cached), 0))

    def take(self, reuse: Reuse, prompt: Sequence[int]) -> None:
        """See ``Prefixes.take``: the slot gets all cached blocks of the prompt, also those after ``reuse.count``."""
        cached = list(self._cached(prompt))
        for block in cached:
            self._own(block)
        self._release(reuse.slot)
        self._tables[reuse.slot] = cached

    def hold(self, slot: int, ids: Sequence[int]) -> None:
        """See ``Prefixes.hold``."""
        for block, key in zip(self._tables[slot], self._chain(ids), strict=False):
            if self._keys[block] is None and key not in self._by_key:
                self._keys[block], self._by_key[key] = key, block

    def leave(self, slot: int, ids: Sequence[int]) -> None:
        """See ``Prefixes.leave``."""
        if ids:
            self.hold(slot, ids)
        else:
            for block in self._tables[slot]:
                self._forget(block)
        self._release(slot)

    def table(self, slot: int, tokens: int) -> list[int]:
        """Returns the slot's blocks, at least enough for so many tokens, in the order of their positions."""
        table = self._tables[slot]
        while len(table) * self._block < tokens:
            block = self._empty.pop() if self._empty else next(iter(self._unowned))
            self._own(block)
            self._forget(block)
            table.append(block)
        return table

    def is_shared(self, block: int) -> bool:
        """Returns whether other slots may read the block, now or later: its content must stay."""
        return self._keys[block] is not None

    def _cached(self, prompt: Sequence[int]) -> Iterator[int]:
        """Yields the blocks that hold the prompt's beginning, without its last token."""
        for key in self._chain(prompt[:-1]):
            if key not in self._by_key:
                return
            yield self._by_key[key]

    def _chain(self, ids: Sequence[int]) -> Iterator[Key]:
        """Yields the key of each full block of tokens."""
        key = b""
        for end in range(self._block, len(ids) + 1, self._block):
            key = hashlib.sha256(key + array("I", ids[end - self._block : end]).tobytes()).digest()
            yield key

    def _own(self, block: int) -> None:
        self._owners[block] += 1
        self._unowned.pop(block, None)

    def _release(self, slot: int) -> None:
        """Take the slot's blocks from it; the end of a prompt will be emptied before its beginning."""
        for block in reversed(self._tables[slot]):
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            if self._keys[block] is None:
                self._empty.append(block)
            else:
                self._unowned[block] = None
        self._tables[slot] = []

    def _forget(self, block: int) -> None:
        key, self._keys[block] = self._keys[block], None
        if key is not None:
            del self._by_key[key]
