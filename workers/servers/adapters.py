"""LoRA adapters of a vLLM server: their ranks, and which of them are loaded."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from workers.messages.engine_protocol import EngineLoadError

MOST_LOADED = 8
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of ``--max-lora-rank`` (vLLM 0.32, `config/lora.py`)."""


def most_loaded(options: Mapping[str, Any]) -> int:
    """Returns the most adapters that are loaded at a time: ``max_loras`` of the engine options, or 8."""
    given = options.get("max_loras")
    return given if type(given) is int and given > 0 else MOST_LOADED


def served_name(model: str, adapter: str) -> str:
    """Returns the server's name of an adapter; of the model itself for an empty one."""
    return f"{model}:{adapter}" if adapter else model


def largest_rank(folders: Mapping[str, str]) -> int:
    """Returns the smallest of `RANKS` that all adapters fit. Raises EngineLoadError for an unusable adapter."""
    ranks = [_rank(name, Path(folder)) for name, folder in folders.items()]
    return min(allowed for allowed in RANKS if allowed >= max(ranks))


def _rank(name: str, folder: Path) -> int:
    try:
        rank = json.loads((folder / "adapter_config.json").read_bytes())["r"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"the adapter {name} in {folder} has no adapter_config.json with a rank: {error}"
        raise EngineLoadError("adapter-unusable", message, "use a LoRA adapter that peft has saved") from error
    if type(rank) is not int or not 1 <= rank <= RANKS[-1]:
        message = f"the adapter {name} has the rank {rank!r}; vLLM serves 1 to {RANKS[-1]}"
        raise EngineLoadError("adapter-unusable", message, "train an adapter of a smaller rank")
    return rank


class LoadedAdapters:
    """The adapters in a server, at most ``most``: each is loaded for its first request, and the least recently used one
    without requests is unloaded to make room. Used on one event loop."""

    def __init__(
        self,
        most: int,
        load: Callable[[str], Awaitable[None]],
        unload: Callable[[str], Awaitable[None]],
    ) -> None:
        """``load`` and ``unload`` change the server; loading an adapter that is loaded already has no effect."""
        self._most = most
        self._load = load
        self._unload = unload
        self._uses: OrderedDict[str, int] = OrderedDict()  # requests of each loaded one, least recently used first
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[None]:
        """Waits for room, loads the adapter, and keeps it loaded. Raises what ``load`` and ``unload`` raise."""
        async with self._changed:
            while name not in self._uses:
                idle = next((loaded for loaded, uses in self._uses.items() if not uses), None)
                if len(self._uses) < self._most:
                    await self._load(name)
                    self._uses[name] = 0
                elif idle is None:
                    await self._changed.wait()
                else:
                    await self._unload(idle)
                    del self._uses[idle]
            self._uses[name] += 1
            self._uses.move_to_end(name)
        try:
            yield
        finally:
            self._uses[name] -= 1
            async with self._changed:
                self._changed.notify_all()
