"""Loads the tokenizers of the fleet's models off the event loop, when they are used."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.gateway.openai import errors
from orchestrator.messages.route_table import ModelRoutes
from placements.engines.registry import capabilities
from workers.engines.encoder_layout import EncoderLayout, read_layout
from workers.messages.encoder_protocol import EncoderKind
from workers.messages.engine_protocol import EngineLoadError
from workers.text.tokenizer import PromptTokenizer
from workers.text.tokenizer_pool import TokenizerBusy, TokenizerPool, load_apart

MAX_LOADS = 16  # at a time; a load that never ends does not block the others
SWEEP_S = 10.0
Key = tuple[str | None, str]
T = TypeVar("T")
MAX_THREADS = 8  # of one model
MAX_ALL_THREADS = 256  # they mostly wait for the tokenizer processes
MAX_WAITING_KEY_BYTES = 2**26  # of the bodies whose texts wait or are being tokenized
MAX_WAITING_BYTES = 2**28  # of all keys


class Tokenizers:
    """The tokenizers by folder and content, since models may share one. Used from one event loop."""

    def __init__(self) -> None:
        self._pool = TokenizerPool()
        self._swept_at = 0.0
        self._executor = ThreadPoolExecutor(MAX_LOADS, thread_name_prefix="tokenizers")
        self._loading: dict[Key, asyncio.Future[PromptTokenizer]] = {}
        self._loaded: dict[Key, PromptTokenizer] = {}  # loaded and used

    def retain(self, models: Iterable[ModelRoutes]) -> None:
        """Drops the tokenizers of all other models, and ends their processes."""
        keys = {_key(routes) for routes in models}
        for key in self._loading.keys() - keys:
            del self._loading[key]
            self._loaded.pop(key, None)
        self._pool.retain({content for _, content in keys})

    def sweep(self, now: float) -> None:
        """Ends processes that are idle. To be called about once a second."""
        if now - self._swept_at > SWEEP_S:
            self._swept_at = now
            self._pool.sweep(now)

    def fetch(self, routes: ModelRoutes) -> asyncio.Future[PromptTokenizer]:
        """Starts to load a model's tokenizer, unless that has started; retries a failed load."""
        key = _key(routes)
        task = self._loading.get(key)
        if task is None or (task.done() and task.exception() is not None):
            loop = asyncio.get_running_loop()
            task = loop.run_in_executor(self._executor, _load, self._pool, routes)
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # callers of ``get`` report it
            self._loading[key] = task
        return task

    def is_loading(self, routes: ModelRoutes) -> bool:
        """Returns whether the model's tokenizer is being loaded; False once that has failed."""
        task = self._loading.get(_key(routes))
        return task is not None and not task.done()

    def loaded(self, routes: ModelRoutes) -> PromptTokenizer | None:
        """Returns the tokenizer; None until it is loaded."""
        key = _key(routes)
        tokenizer = self._loaded.get(key)
        if tokenizer is None:
            task = self._loading.get(key)
            if task is None or not task.done() or task.cancelled() or task.exception() is not None:
                return None
            tokenizer = self._loaded[key] = task.result()
        return tokenizer

    async def get(self, routes: ModelRoutes) -> PromptTokenizer:
        """Returns the tokenizer once it is loaded. Raises ApiError 503 with the cause when the load fails."""
        try:
            return await asyncio.shield(self.fetch(routes))
        except TokenizerBusy as busy:
            raise errors.tokenizer_busy(routes.name, busy) from None
        except EngineLoadError as error:
            raise errors.tokenizer_unavailable(error) from error


def _key(routes: ModelRoutes) -> Key:
    """Returns the folder of the tokenizer, and its content: equal for equal ones."""
    if not capabilities(routes.engine).reads_checkpoint:
        return None, routes.engine
    return routes.source, routes.reading if routes.tokenizer else f"{routes.kind} {routes.source}"


def _load(pool: TokenizerPool, routes: ModelRoutes) -> PromptTokenizer:
    """Loads the tokenizer of a model; that of an encoder is where its folder says. Raises EngineLoadError and
    TokenizerBusy."""
    layout, content = layout_of(routes), _key(routes)[1]
    if layout is None:
        return load_apart(pool, routes.engine, routes.source, content=content)
    return load_apart(pool, routes.engine, str(layout.transformer), layout.lower_case, content)


def layout_of(routes: ModelRoutes) -> EncoderLayout | None:
    """Returns the layout of an encoder's folder; None for a model that generates, or has no folder. Blocks. Raises
    EngineLoadError."""
    if routes.kind == "generate" or not capabilities(routes.engine).reads_checkpoint or routes.source is None:
        return None
    return _layout(Path(routes.source), routes.kind, routes.tokenizer)


@lru_cache(maxsize=256)
def _layout(folder: Path, kind: EncoderKind, tokenizer: str) -> EncoderLayout:
    """Reads a layout. ``tokenizer`` changes with the files in the folder."""
    return read_layout(folder, kind)


@dataclass
class _ThreadShare:
    """One key's use of the threads."""

    turns: defaultdict[str, asyncio.Semaphore]  # by model
    jobs: int = field(default=0)
    bytes: int = field(default=0)


class TokenizerThreads:
    """Runs tokenization on its own threads. Each model has a share of them, and one key never gets all of a share, so
    neither a hung tokenizer nor one client's long prompts block the others. Used from one event loop."""

    def __init__(self, threads: int | None = None) -> None:
        """``threads`` per model; None: half of the machine's CPUs, at least 2 and at most ``MAX_THREADS``."""
        self._threads = threads or min(MAX_THREADS, max(2, (os.cpu_count() or 1) // 2))
        self._executor = ThreadPoolExecutor(MAX_ALL_THREADS, thread_name_prefix="tokenizing")
        self._turns = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(self._threads))
        self._shares: dict[str, _ThreadShare] = {}
        self._bytes = 0

    async def run(self, key: str, size: int, work: Callable[[], T], model: str = "") -> T:
        """Returns or raises what ``work`` does, for a body of ``size`` bytes. Raises ApiError 429 or 503 when too many
        bytes are waiting. A cancelled call keeps its thread until the work has ended."""
        share = self._shares.get(key)
        if (0 if share is None else share.bytes) + size > max(size, MAX_WAITING_KEY_BYTES):
            raise errors.too_many_long_prompts()
        if self._bytes + size > max(size, MAX_WAITING_BYTES):
            raise errors.too_many_bodies()
        if share is None:
            share = self._shares[key] = _ThreadShare(defaultdict(lambda: asyncio.Semaphore(max(1, self._threads - 1))))
        share.jobs += 1
        share.bytes += size
        self._bytes += size
        try:
            async with share.turns[model], self._turns[model]:
                running = asyncio.get_running_loop().run_in_executor(self._executor, work)
                try:
                    return await asyncio.shield(running)
                except asyncio.CancelledError:
                    running.add_done_callback(_drop)
                    await asyncio.wait([running])
                    raise
        finally:
            share.jobs -= 1
            share.bytes -= size
            self._bytes -= size
            if not share.jobs:
                del self._shares[key]

    def close(self) -> None:
        """Cancels the work that has not started."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _drop(abandoned: asyncio.Future[Any]) -> None:
    """Retrieves the error of an abandoned call: otherwise asyncio would log it for each client that has left."""
    if not abandoned.cancelled():
        abandoned.exception()
