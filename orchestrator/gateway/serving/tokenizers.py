"""Loads the tokenizers of the fleet's models, each once and off the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from orchestrator.gateway.openai import errors
from workers.messages.engine_protocol import EngineLoadError
from workers.text.tokenizer import PromptTokenizer
from workers.text.tokenizer_process import load_apart

MOST_LOADS = 64  # at a time; a load that never ends does not block the others


class Tokenizers:
    """The tokenizers by folder and content, since models may share one. Used from one event loop."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(MOST_LOADS, thread_name_prefix="tokenizers")
        self._loading: dict[tuple[bool, str | None, str], asyncio.Future[PromptTokenizer]] = {}
        self._loaded: dict[tuple[bool, str | None, str], PromptTokenizer] = {}  # loaded and used

    def retain(self, keys: set[tuple[bool, str | None, str]]) -> None:
        """Drops all tokenizers but those of ``keys``."""
        for key in self._loading.keys() - keys:
            del self._loading[key]
            self._loaded.pop(key, None)

    def fetch(self, engine: str, source: str | None, key: str = "") -> asyncio.Future[PromptTokenizer]:
        """Starts to load a tokenizer, unless that has started; retries a failed load. ``key`` changes with the files in
        the folder."""
        place = (engine == "echo", source, key)
        task = self._loading.get(place)
        if task is None or (task.done() and task.exception() is not None):
            task = asyncio.get_running_loop().run_in_executor(self._executor, load_apart, engine, source)
            task.add_done_callback(
                lambda done: done.cancelled() or done.exception()
            )  # the callers of ``get`` report it
            self._loading[place] = task
        return task

    def loaded(self, engine: str, source: str | None, key: str = "") -> PromptTokenizer | None:
        """Returns the tokenizer; None until it is loaded."""
        place = (engine == "echo", source, key)
        tokenizer = self._loaded.get(place)
        if tokenizer is None:
            task = self._loading.get(place)
            if task is None or not task.done() or task.cancelled() or task.exception() is not None:
                return None
            tokenizer = self._loaded[place] = task.result()
        return tokenizer

    async def get(self, engine: str, source: str | None, key: str = "") -> PromptTokenizer:
        """Returns the tokenizer once it is loaded. Raises ApiError 503 with the cause when the load fails."""
        try:
            return await asyncio.shield(self.fetch(engine, source, key))
        except EngineLoadError as error:
            raise errors.tokenizer_unavailable(error) from error
