"""The tokenizers of the fleet's models, each loaded once and off the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from orchestrator.gateway.openai import errors
from workers.messages.engine_protocol import EngineLoadError
from workers.text.tokenizer import PromptTokenizer
from workers.text.tokenizer_process import load_apart

MOST_LOADS = 64  # at a time; one that never ends costs the others nothing


class Tokenizers:
    """By folder and by what is in it, since several models may share one. Used from one event loop."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(MOST_LOADS, thread_name_prefix="tokenizers")
        self._loading: dict[tuple[bool, str | None, str], asyncio.Future[PromptTokenizer]] = {}
        self._loaded: dict[tuple[bool, str | None, str], PromptTokenizer] = {}  # of these, those that have been used

    def keep(self, wanted: set[tuple[bool, str | None, str]]) -> None:
        """Forget the others."""
        for key in self._loading.keys() - wanted:
            del self._loading[key]
            self._loaded.pop(key, None)

    def fetch(self, engine: str, source: str | None, key: str = "") -> asyncio.Future[PromptTokenizer]:
        """Begin to load it, unless that has begun; a load that failed is begun again. ``key`` is another one when the
        files in the folder are."""
        shelf = (engine == "echo", source, key)
        task = self._loading.get(shelf)
        if task is None or (task.done() and task.exception() is not None):
            task = asyncio.get_running_loop().run_in_executor(self._executor, load_apart, engine, source)
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever asks hears of it
            self._loading[shelf] = task
        return task

    def loaded(self, engine: str, source: str | None, key: str = "") -> PromptTokenizer | None:
        """The tokenizer, if it is there."""
        shelf = (engine == "echo", source, key)
        tokenizer = self._loaded.get(shelf)
        if tokenizer is None:
            task = self._loading.get(shelf)
            if task is None or not task.done() or task.cancelled() or task.exception() is not None:
                return None
            tokenizer = self._loaded[shelf] = task.result()
        return tokenizer

    async def get(self, engine: str, source: str | None, key: str = "") -> PromptTokenizer:
        """The tokenizer, once it is loaded. Raises ApiError 503 with the cause when it cannot be."""
        try:
            return await asyncio.shield(self.fetch(engine, source, key))
        except EngineLoadError as error:
            raise errors.tokenizer_unavailable(error) from error
