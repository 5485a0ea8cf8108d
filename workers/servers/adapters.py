"""LoRA adapters of a vLLM server: their ranks, and which of them are loaded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from placements.facts.adapters import RANKS, USE_PEFT, Adapter, max_rank
from placements.facts.vllm import Plugin
from workers.engines.weight_files import tensors_of
from workers.host import foreign_files
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig
from workers.servers.completion_stream import UNAVAILABLE, ServerError, error_message

log = logging.getLogger(__name__)

MOST_LOADED = 8
EMPTY = "empty-adapter"  # a folder in the server's working directory
PROJECTIONS = ("o_proj", "c_proj")  # of the attention, in families with adapters in vLLM
IS_LOADED = "has already been loaded"  # in the error of a second load
CHANGE = aiohttp.ClientTimeout(total=60.0)


def most_loaded(options: Mapping[str, Any]) -> int:
    """Returns the most adapters that are loaded at a time: ``max_loras`` of the engine options, or 8."""
    given = options.get("max_loras")
    return given if type(given) is int and given > 0 else MOST_LOADED


def loads_adapters(config: ReplicaConfig, plugin: Plugin) -> bool:
    """Returns whether the server is started for adapters: it has some, or ``max_loras`` reserves room for later ones,
    which only vLLM's CPU back end gets."""
    return bool(config.adapters) or (plugin == "cpu" and "max_loras" in config.model.engine_options)


def max_rank_of(config: ReplicaConfig) -> int:
    """Returns ``max_lora_rank`` of the engine options, or what the adapters need. Raises EngineLoadError."""
    given = config.model.engine_options.get("max_lora_rank")
    return given if type(given) is int else largest_rank(config.adapters)


def write_empty_adapter(folder: Path, checkpoint: Path) -> None:
    """Writes an adapter that changes nothing: zeros for one projection of the checkpoint, since vLLM accepts none
    without modules. Raises EngineLoadError for a checkpoint without a known projection."""
    names = (
        (suffix, name, tensor.shape)
        for file in sorted(checkpoint.glob("*.safetensors"))
        for name, tensor in tensors_of(file).items()
        for suffix in PROJECTIONS
        if name.endswith(f".{suffix}.weight") and len(tensor.shape) == 2
    )
    suffix, name, (rows, columns) = min(names, default=("", "", (0, 0)))
    if not name:
        message = f"{checkpoint} has no safetensors file with a projection of {' or '.join(PROJECTIONS)}"
        raise EngineLoadError("adapters-unsupported", message, "remove the adapters, or save the model as safetensors")
    header, end = {}, 0
    for part, shape in (("lora_A", (1, columns)), ("lora_B", (rows, 1))):
        size = 4 * math.prod(shape)
        key = f"base_model.model.{name.removesuffix('.weight')}.{part}.weight"
        header[key] = {"dtype": "F32", "shape": shape, "data_offsets": (end, end + size)}
        end += size
    described = json.dumps(header).encode()
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": [suffix]}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    (folder / "adapter_model.safetensors").write_bytes(len(described).to_bytes(8, "little") + described + bytes(end))


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
    try:
        async with session.post(f"{url}/v1/{verb}_lora_adapter", json=body, timeout=CHANGE) as response:
            if response.status != 200:
                message = error_message(await response.read())
                if verb == "unload" or IS_LOADED not in message:
                    raise ServerError(f"the server cannot {verb} the adapter: {message}", 500)
    except asyncio.TimeoutError:
        message = f"the server has not answered within {CHANGE.total:g} s to {verb} an adapter"
        raise ServerError(message, UNAVAILABLE) from None


class UnknownAdapter(Exception):
    """The server has no adapter of this name."""


@dataclass(eq=False)
class _Loaded:
    """An adapter that has a place in the server."""

    ready: asyncio.Task[None]  # its load
    uses: int = 0  # requests


class LoadedAdapters:
    """The adapters of a server, of which at most ``most`` are loaded: each for its first request, and the least
    recently used one without requests is unloaded to make room. Requests that need room wait in order; those for other
    adapters do not wait for a load. Used on one event loop, except ``folder``.

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
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()  # by key, least recently used first
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self._in_order = asyncio.Lock()  # of changes in the server: an unload before the load that needs its place
        self._tasks: set[asyncio.Task[None]] = set()

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
        async with self._turn:  # others wait for their turn, or an adapter might never become idle
            key, loaded = await self._place(name)
        try:
            await asyncio.shield(loaded.ready)  # others may wait for it, too
            yield key
        finally:
            loaded.uses -= 1
            self._drop_former()

    async def replace(self, folders: Mapping[str, str]) -> None:
        """Change the adapters. Those that are removed or changed are unloaded once they have no requests. Raises what
        ``change`` raises."""
        for name in folders.keys() | self._folders.keys():
            if name in self._folders and folders.get(name) != self._folders[name]:
                self._changes[name] += 1
        self._folders = dict(folders)
        await asyncio.gather(*self._drop_former())

    async def _place(self, name: str) -> tuple[str, _Loaded]:
        """Returns the key of an adapter, and its place, which has one more use."""
        while (loaded := self._loaded.get(key := self._key(name))) is None:
            idle = next((other for other, place in self._loaded.items() if not place.uses), None)
            if len(self._loaded) < self._most:
                self._loaded[key] = _Loaded(self._start(key, self._folders[name]))
            elif idle is not None:
                self._remove(idle)
            else:
                self._freed.clear()
                await self._freed.wait()
        loaded.uses += 1
        self._loaded.move_to_end(key)
        return key, loaded

    def _key(self, name: str) -> str:
        if name not in self._folders:
            raise UnknownAdapter(name)
        return f"{name}@{self._changes[name]}" if self._changes[name] else name

    def _drop_former(self) -> list[asyncio.Task[None]]:
        """Unloads what no name refers to any more; returns the unloads."""
        current = {self._key(name) for name in self._folders}
        former = [key for key, place in self._loaded.items() if not place.uses and key not in current]
        self._freed.set()
        return [self._remove(key) for key in former]

    def _remove(self, key: str) -> asyncio.Task[None]:
        del self._loaded[key]
        return self._start(key, None)

    def _start(self, key: str, folder: str | None) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._run(key, folder))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def _run(self, key: str, folder: str | None) -> None:
        try:
            async with self._in_order:
                await self._change(key, folder)
        except BaseException:
            place = self._loaded.get(key)
            if place is not None and place.ready is asyncio.current_task():  # the next request tries again
                del self._loaded[key]
                self._freed.set()
            raise

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("the adapters cannot be changed: %s", error)
