"""What a host may keep of artifacts, as a value that crosses processes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from workers.artifacts.store.store import Store


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where a host keeps what it has fetched, and how much of it."""

    root: str
    budget: int | None = None  # bytes on disk; None: what the disk has
    memory: str | None = None  # a folder of a tmpfs
    memory_budget: int | None = None  # bytes there

    def open(self) -> Store:
        """Makes no folder."""
        from workers.artifacts.store.store import Store

        memory = None if self.memory is None else Path(self.memory)
        return Store(Path(self.root), budget=self.budget, memory=memory, memory_budget=self.memory_budget)
