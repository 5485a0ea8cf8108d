"""LoRA adapters of a vLLM server: their ranks, and which of them are loaded."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from placements.facts.adapters import RANKS, USE_PEFT, Adapter, max_rank
from placements.facts.vllm import Plugin
from workers.host import foreign_files
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig
from workers.servers.completion_stream import ServerError, error_message

MOST_LOADED = 8
EMPTY = "empty-adapter"  # a folder in the server's working directory
IS_LOADED = "has already been loaded"  # in the error of a second load


def most_loaded(options: Mapping[str, Any]) -> int:
    """Returns the most adapters that are loaded at a time: ``max_loras`` of the engine options, or 8."""
    given = options.get("max_loras")
    return given if type(given) is int and given > 0 else MOST_LOADED


def loads_adapters(config: ReplicaConfig, plugin: Plugin) -> bool:
    """Returns whether the server is started for adapters: it has some, or ``max_loras`` reserves room for later ones,
    which only vLLM's CPU back end gets."""
    return bool(config.adapters) or (plugin == "cpu" and "max_loras" in config.engine_options)


def max_rank_of(config: ReplicaConfig) -> int:
    """Returns ``max_lora_rank`` of the engine options, or what the adapters need. Raises EngineLoadError."""
    given = config.engine_options.get("max_lora_rank")
    return given if type(given) is int else largest_rank(config.adapters)


def write_empty_adapter(folder: Path) -> None:
    """Writes an adapter that changes nothing."""
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": []}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    (folder / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


def served_name(model: str, adapter: str) -> str:
    """Returns the server's name of an adapter; of the model itself for an empty one."""
    return f"{model}:{adapter}" if adapter else model


def largest_rank(folders: Mapping[str, str]) -> int:
    """Returns the least ``--max-lora-rank`` for all adapters. Raises EngineLoadError for an unusable adapter."""
    ranks = []
    for name, folder in folders.items():
        try:
            adapter = Adapter.from_config(foreign_files.read_json(Path(folder) / "adapter_config.json"))
        except (OSError, ValueError) as error:
            message = f"the adapter {name} in {folder} cannot be read: {error}"
            raise EngineLoadError("adapter-unusable", message, USE_PEFT) from error
        if max_rank([adapter.rank]) is None:
            message = f"the adapter {name} has the rank {adapter.rank}; vLLM serves 1 to {RANKS[-1]}"
            raise EngineLoadError("adapter-unusable", message, "train an adapter of a smaller rank")
        ranks.append(adapter.rank)
    largest = max_rank(ranks)
    assert largest is not None
    return largest


async def change_adapter(session: aiohttp.ClientSession, url: str, name: str, folder: str | None) -> None:
    """Loads an adapter into a server, or unloads it without a folder. Raises ServerError, and what aiohttp raises."""
    verb = "unload" if folder is None else "load"
    body = {"lora_name": name} | ({} if folder is None else {"lora_path": folder})
    async with session.post(f"{url}/v1/{verb}_lora_adapter", json=body) as response:
        if response.status != 200:
            message = error_message(await response.read())
            if verb == "unload" or IS_LOADED not in message:  # for a request that was cancelled before the answer
                raise ServerError(f"the server cannot {verb} the adapter: {message}", 500)


class UnknownAdapter(Exception):
    """The server has no adapter of this name."""


class LoadedAdapters:
    """The adapters of a server, of which at most ``most`` are loaded: each for its first request, and the least
    recently used one without requests is unloaded to make room. Requests that need room wait in order. Used on one
    event loop, except ``folder``.

    An adapter whose folder changes gets another key, `support@1`: requests that have begun keep the previous content.
    """

    def __init__(
        self,
        folders: Mapping[str, str],
        most: int,
        change: Callable[[str, str | None], Awaitable[None]],
    ) -> None:
        """``folders`` by name. ``most`` 0: the server has loaded all. ``change`` loads a key from its folder; without
        one it unloads the key."""
        self._folders = dict(folders)
        self._most = most
        self._change = change
        self._changes: Counter[str] = Counter()  # of the folder, by name
        self._uses: OrderedDict[str, int] = OrderedDict()  # requests of each loaded key, least recently used first
        self._turn = asyncio.Lock()
        self._changed = asyncio.Condition()

    def folder(self, name: str) -> str | None:
        """Returns the folder of an adapter; None for an unknown one."""
        return self._folders.get(name)

    @contextlib.asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[str]:
        """Waits for room, loads the adapter, and keeps it loaded; yields its key. Raises UnknownAdapter,
        and what ``change`` raises."""
        if not self._most:
            yield name
            return
        async with self._turn, self._changed:  # others wait for their turn, or an adapter might never become idle
            while (key := self._key(name)) not in self._uses:
                idle = next((loaded for loaded, uses in self._uses.items() if not uses), None)
                if len(self._uses) < self._most:
                    await self._change(key, self._folders[name])
                    self._uses[key] = 0
                elif idle is None:
                    await self._changed.wait()
                else:
                    await self._remove(idle)
            self._uses[key] += 1
            self._uses.move_to_end(key)
        try:
            yield key
        finally:
            self._uses[key] -= 1
            await self._drop_former()

    async def replace(self, folders: Mapping[str, str]) -> None:
        """Change the adapters. Those that are removed or changed are unloaded once they have no requests."""
        for name in folders.keys() | self._folders.keys():
            if name in self._folders and folders.get(name) != self._folders[name]:
                self._changes[name] += 1
        self._folders = dict(folders)
        await self._drop_former()

    def _key(self, name: str) -> str:
        if name not in self._folders:
            raise UnknownAdapter(name)
        return f"{name}@{self._changes[name]}" if self._changes[name] else name

    async def _drop_former(self) -> None:
        async with self._changed:
            current = {self._key(name) for name in self._folders}
            for key in [key for key, uses in self._uses.items() if not uses and key not in current]:
                await self._remove(key)
            self._changed.notify_all()

    async def _remove(self, key: str) -> None:
        await self._change(key, None)
        del self._uses[key]
