"""The threads that tokenize, and how much of them one key may have."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from orchestrator.gateway.openai import errors

T = TypeVar("T")
MOST_THREADS = 8  # of one model
MOST_THREADS_OF_ALL = 256  # they mostly wait for the processes that tokenize
MAX_BYTES_OF_KEY = 2**26  # of bodies whose texts wait to be tokenized, and are
MAX_BYTES = 2**28  # of all keys


@dataclass
class _Share:
    """What one key has of the threads."""

    turns: defaultdict[str, asyncio.Semaphore]  # by model
    jobs: int = field(default=0)
    bytes: int = field(default=0)


class TokenizerThreads:
    """Runs what tokenizes on threads of its own. Each model has some, and one key never has all of those, so neither a
    model whose tokenizer hangs nor the long prompts of one client keep the others waiting. Used from one event loop."""

    def __init__(self, threads: int | None = None) -> None:
        """``threads`` of one model; None: half of the machine's, at least 2 and at most ``MOST_THREADS``."""
        self._threads = threads or min(MOST_THREADS, max(2, (os.cpu_count() or 1) // 2))
        self._executor = ThreadPoolExecutor(MOST_THREADS_OF_ALL, thread_name_prefix="tokenizing")
        self._turns = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(self._threads))
        self._shares: dict[str, _Share] = {}
        self._bytes = 0

    async def run(self, key: str, size: int, work: Callable[[], T], model: str = "") -> T:
        """What ``work`` returns or raises, for a body of ``size`` bytes. Raises ApiError 429 and 503 where too many
        bytes wait already. A thread is freed when its work has ended, also where nobody waits for it any more."""
        share = self._shares.get(key)
        if (0 if share is None else share.bytes) + size > max(size, MAX_BYTES_OF_KEY):
            raise errors.too_many_long_prompts()
        if self._bytes + size > max(size, MAX_BYTES):
            raise errors.too_many_bodies()
        if share is None:
            share = self._shares[key] = _Share(defaultdict(lambda: asyncio.Semaphore(max(1, self._threads - 1))))
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
        """Start nothing more."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _drop(abandoned: asyncio.Future[Any]) -> None:
    """Take note of an error that nobody waits for: asyncio would log it, one for each client that has left."""
    if not abandoned.cancelled():
        abandoned.exception()
