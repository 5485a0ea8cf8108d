"""A transformers KV cache of static slots, each with its own position, and Bloom's position bias for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import TYPE_CHECKING, Any

from workers.host.memory_limits import is_out_of_memory, out_of_memory

if TYPE_CHECKING:
    import torch
    from transformers.cache_utils import Cache


@dataclass
class CacheReach:
    """The KV-cache cells that the current forward pass writes and reads. One object, shared with every layer."""

    slots: list[int] = field(default_factory=list)
    block: slice | None = None  # the slots as one block, read without a copy; None when there are gaps
    # Write positions [rows or 1, queries]; None for whole prompts, which begin at 0.
    positions: torch.Tensor | None = None
    kv_len: int = 0
    cells: dict[int, torch.Tensor] = field(default_factory=dict)  # number of heads -> flat indices of the writes
    row_starts: dict[int, torch.Tensor] = field(default_factory=dict)  # number of heads -> the same at position 0

    def move(self, slots: Sequence[int], positions: torch.Tensor | None, kv_len: int) -> None:
        """Prepare for the next forward pass."""
        if slots != self.slots:
            self.slots = list(slots)
            first, last = self.slots[0], self.slots[-1]
            self.block = slice(first, last + 1) if self.slots == list(range(first, last + 1)) else None
            self.row_starts.clear()
        self.positions = positions
        self.kv_len = kv_len
        self.cells.clear()


def slot_cache(reach: CacheReach, layers: int, slots: int, room: int, purpose: str) -> Cache:
    """Returns a transformers Cache of ``layers`` slot layers that all use ``reach``. ``purpose`` is for the error where
    there is no memory for it.

    The class is local since its base class is imported lazily. Keys and values are ``[slots, heads, room, head_dim]``,
    allocated at the first write, when heads and head_dim are known.
    """
    import torch
    from transformers.cache_utils import Cache, StaticLayer

    class SlotLayer(StaticLayer):
        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
            """Store ``[rows, heads, queries, head_dim]``; return ``[rows, heads, kv_len, head_dim]`` to attend to."""
            if not self.is_initialized:
                self.stored_keys = self.keys = self._room_for(key_states)
                self.stored_values = self.values = self._room_for(value_states)
                self.is_initialized = True
            if reach.positions is None:
                self._fill(self.stored_keys, key_states)
                self._fill(self.stored_values, value_states)
                return key_states, value_states  # a prompt starts at 0 and attends only to itself
            cells = self._cells(key_states.shape[1], reach.positions)
            self._write(self.stored_keys, cells, key_states)
            self._write(self.stored_values, cells, value_states)
            return self._read(self.stored_keys), self._read(self.stored_values)

        def _room_for(self, states: torch.Tensor) -> torch.Tensor:
            try:
                return states.new_zeros((slots, states.shape[1], room, states.shape[3]))
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise out_of_memory(error, purpose) from error

        def _fill(self, stored: torch.Tensor, states: torch.Tensor) -> None:
            if reach.block is not None:
                stored[reach.block, :, : reach.kv_len] = states
            else:
                stored[reach.slots, :, : reach.kv_len] = states

        def _cells(self, heads: int, positions: torch.Tensor) -> torch.Tensor:
            """Returns the flat index of each token of each row and head, in ``[slots * heads * room, head_dim]``."""
            if heads not in reach.cells:
                if heads not in reach.row_starts:
                    rows = torch.tensor(reach.slots)[:, None] * heads + torch.arange(heads)
                    reach.row_starts[heads] = rows * room
                reach.cells[heads] = (reach.row_starts[heads][..., None] + positions[:, None]).flatten()
            return reach.cells[heads]

        def _write(self, stored: torch.Tensor, cells: torch.Tensor, states: torch.Tensor) -> None:
            stored.view(-1, states.shape[-1]).index_copy_(0, cells, states.flatten(0, 2))

        def _read(self, stored: torch.Tensor) -> torch.Tensor:
            if reach.block is not None:
                return stored[reach.block, :, : reach.kv_len]
            return stored[:, :, : reach.kv_len].index_select(0, torch.tensor(reach.slots))

        def get_seq_length(self, *_: Any) -> int:
            """Returns 0: positions are always given, so transformers must not add any of its own."""
            return 0

        def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
            return reach.kv_len, 0

    return Cache(layers=[SlotLayer(room) for _ in range(layers)])


def give_alibi(base: Any, reach: CacheReach, max_len: int) -> None:
    """Let bloom build its bias from our mask: slots are filled from the left, so key j is always position j."""
    import torch

    original = type(base).build_alibi_tensor
    built: dict[int, torch.Tensor] = {}  # number of rows -> [rows * heads, 1, max_len]

    def build_alibi_tensor(self: Any, mask: torch.Tensor, heads: int, dtype: torch.dtype) -> torch.Tensor:
        rows, kv_len = len(reach.slots), mask.shape[-1]
        if rows not in built:
            built[rows] = original(self, torch.ones(rows, max_len, dtype=torch.long), heads, dtype)
        return built[rows][..., :kv_len]

    base.build_alibi_tensor = MethodType(build_alibi_tensor, base)
