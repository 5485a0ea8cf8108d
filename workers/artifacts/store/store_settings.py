"""The settings of a host's artifact store, as a value that can be sent between processes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from workers.artifacts.store.store import Store


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The location and the limits of a host's store."""

    root: str
    budget: int | None = None  # bytes on disk; None: the disk's free space

    def open(self) -> Store:
        """Opens the store without creating folders."""
        from workers.artifacts.store.store import Store

        return Store(Path(self.root), budget=self.budget)
