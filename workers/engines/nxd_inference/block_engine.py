"""The NxD Inference engine with a prefix cache: the package's KV cache in blocks, which slots share.

The package's rules for callers, beside those of `engine`:

1. It reads the blocks of ``block_table``, and writes the cells of ``slot_mapping``: block x size + place; -1 writes
   nothing. It checks neither. Rows that it adds to a step write into a block of its own.
2. A prompt is passed as a whole: its first ``computed_context_lens`` tokens are in the blocks, and the rest of
   ``full_context_lens`` is processed. Before it chooses a graph, the package fills up the bucket of the rest with
   tokens of the prefix (``model_wrapper._pad_prefix_caching_inputs``).
3. A prefix must fill its bucket: without its kernels, the package does not mask what is behind it there
   (``attention_base.perform_prefix_prefill``). So a prompt begins after one of the prefix buckets, and its rest is
   padded to a bucket here.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from workers.batching.buckets import smallest_bucket
from workers.engines.engine_setup import kept_in
from workers.engines.nxd_inference.config import GraphLengths, NxdSettings
from workers.engines.nxd_inference.engine import NxdEngine
from workers.engines.nxd_inference.package import require_package
from workers.messages.engine_protocol import Reuse
from workers.messages.replica_config import ReplicaConfig

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


def open_neuronx_distributed(config: ReplicaConfig) -> NxdEngine:
    """Returns the engine, not loaded yet. Raises EngineLoadError where the package or the checkpoint is missing."""
    require_package()
    settings = NxdSettings.of(config)
    return (NxdBlockEngine if settings.prefix_cache else NxdEngine)(settings, kept_in(config))


class NxdBlockEngine(NxdEngine):
    """Implements ``BlockEngine``; ``SamplingEngine`` with ``sampling: device``."""

    prefixes: BlockPool

    def prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> Any:
        """See ``GenerateEngine.prefill``."""
        return self.prefill_from(slots, prompts, [0] * len(slots))

    def prefill_from(self, slots: Sequence[int], prompts: Sequence[Sequence[int]], starts: Sequence[int]) -> Any:
        """See ``BlockEngine.prefill_from``."""
        import torch

        rows = [self._prefill_rest(*row) for row in zip(slots, prompts, starts, strict=True)]
        return torch.cat(rows) if self.spec.returns == "logits" else [row[0] for row in rows]

    def _prefill_rest(self, slot: int, prompt: Sequence[int], start: int) -> Any:
        """Run a prompt from ``start`` on, 0 or a prefix bucket. Blocks that others may read are not written again."""
        length, table = len(prompt), self.prefixes.table(slot, len(prompt))
        width = start + smallest_bucket(self.spec.prefill_buckets, length - start)
        padding = [0] * (width - length)
        size, is_shared = self.spec.prefix_block, self.prefixes.is_shared
        cells = [-1 if is_shared(table[at // size]) else _cell(table, at, size) for at in range(start, length)]
        output = self._forward(
            [slot],
            input_ids=[[*prompt, *padding]],
            attention_mask=[[1] * length + padding],
            position_ids=[[*range(length), *padding]],
            slot_mapping=[[*cells, *[-1] * len(padding)]],
            block_table=[table[: max(1, start // size)]],
            full_context_lens=[[width]],
            computed_context_lens=[[start]],
        )
        return self._answers(output, 1)

    def _step(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> Any:
        """Run one token of each slot. ``positions`` are from 1 on: position 0 means a prompt."""
        size, width = self.spec.prefix_block, max(positions)
        tables = [self.prefixes.table(slot, position + 1) for slot, position in zip(slots, positions, strict=True)]
        columns = width // size + 1
        return self._forward(
            slots,
            input_ids=[[token] for token in tokens],
            attention_mask=[[1] * position + [0] * (width - position) for position in positions],
            position_ids=[[position] for position in positions],
            slot_mapping=[[_cell(*row, size)] for row in zip(tables, positions, strict=True)],
            block_table=[[*table, *[0] * columns][:columns] for table in tables],
            full_context_lens=[[position + 1] for position in positions],
            computed_context_lens=[[position] for position in positions],
        )

    def _warm_up(self, sizes: GraphLengths) -> None:
        """Call each graph that a prompt can need once; those with a prefix, too."""
        assert sizes.blocks is not None
        slots, max_len, longest = self.spec.slots, self.spec.max_len, sizes.context_buckets[-1]
        self.prefixes = BlockPool(*sizes.blocks, slots, max_len, sizes.prefix_buckets)
        self._spec = replace(self.spec, keeps_idle_slots=True, prefix_block=sizes.blocks.size, shares_blocks=True)
        super()._warm_up(sizes)
        for start in sizes.prefix_buckets:
            for bucket in sizes.context_buckets:
                rest = min(bucket, longest - start)
                if smallest_bucket(sizes.context_buckets, rest) == bucket:
                    self.prefill_from([0], [[0] * (start + rest)], [start])
        for slot in range(slots):
            self.prefixes.leave(slot, [])


def _cell(table: Sequence[int], position: int, size: int) -> int:
    """Returns the place of a position in the blocks of a slot, as the package counts them."""
    return table[position // size] * size + position % size
