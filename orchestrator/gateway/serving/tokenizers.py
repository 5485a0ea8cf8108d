"""Loads the tokenizers of the fleet's models off the event loop, when they are used."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from orchestrator.fleet.route_table import ModelRoutes
from orchestrator.gateway.openai import errors
from workers.engines.encoder.layout import EncoderLayout, read_layout
from workers.messages.encoder_protocol import EncoderKind
from workers.messages.engine_protocol import EngineLoadError
from workers.text.tokenizer import PromptTokenizer
from workers.text.tokenizer_pool import TokenizerBusy, TokenizerPool, load_apart

MOST_LOADS = 16  # at a time; a load that never ends does not block the others
SWEEP_S = 10.0
Key = tuple[str | None, str]


class Tokenizers:
    """The tokenizers by folder and content, since models may share one. Used from one event loop."""

    def __init__(self) -> None:
        self._pool = TokenizerPool()
        self._swept_at = 0.0
        self._executor = ThreadPoolExecutor(MOST_LOADS, thread_name_prefix="tokenizers")
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
    if routes.engine == "echo":
        return None, "echo"
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
    if routes.kind == "generate" or routes.engine == "echo" or routes.source is None:
        return None
    return _layout(Path(routes.source), routes.kind, routes.tokenizer)


@lru_cache(maxsize=256)
def _layout(folder: Path, kind: EncoderKind, tokenizer: str) -> EncoderLayout:
    """Reads a layout. ``tokenizer`` changes with the files in the folder."""
    return read_layout(folder, kind)
