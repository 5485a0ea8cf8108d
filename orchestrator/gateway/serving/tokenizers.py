"""Loads the tokenizers of the fleet's models, each once and off the event loop."""

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
from workers.text.tokenizer_process import load_apart

MOST_LOADS = 64  # at a time; a load that never ends does not block the others
Key = tuple[bool, str | None, str]


class Tokenizers:
    """The tokenizers by folder and content, since models may share one. Used from one event loop."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(MOST_LOADS, thread_name_prefix="tokenizers")
        self._loading: dict[Key, asyncio.Future[PromptTokenizer]] = {}
        self._loaded: dict[Key, PromptTokenizer] = {}  # loaded and used

    def retain(self, models: Iterable[ModelRoutes]) -> None:
        """Drops the tokenizers of all other models."""
        for key in self._loading.keys() - {_key(routes) for routes in models}:
            del self._loading[key]
            self._loaded.pop(key, None)

    def fetch(self, routes: ModelRoutes) -> asyncio.Future[PromptTokenizer]:
        """Starts to load a model's tokenizer, unless that has started; retries a failed load."""
        key = _key(routes)
        task = self._loading.get(key)
        if task is None or (task.done() and task.exception() is not None):
            loop = asyncio.get_running_loop()
            task = loop.run_in_executor(self._executor, _load, routes)
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
        except EngineLoadError as error:
            raise errors.tokenizer_unavailable(error) from error


def _key(routes: ModelRoutes) -> Key:
    """Returns what the tokenizer depends on; ``routes.reading`` changes with the files in the folder."""
    return routes.engine == "echo", routes.source, routes.reading


def _load(routes: ModelRoutes) -> PromptTokenizer:
    """Loads the tokenizer of a model; that of an encoder is where its folder says. Raises EngineLoadError."""
    layout = layout_of(routes)
    if layout is None:
        return load_apart(routes.engine, routes.source)
    return load_apart(routes.engine, str(layout.transformer), layout.lower_case)


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
