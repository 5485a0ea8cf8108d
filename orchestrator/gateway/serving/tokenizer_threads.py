"""The threads that tokenize prompts, with a limit per model and per API key."""

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
MOST_THREADS_OF_ALL = 256  # they mostly wait for the tokenizer processes
MAX_BYTES_OF_KEY = 2**26  # of the bodies whose texts wait or are being tokenized
MAX_BYTES = 2**28  # of all keys


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
        """``threads`` per model; None: half of the machine's CPUs, at least 2 and at most ``MOST_THREADS``."""
        self._threads = threads or min(MOST_THREADS, max(2, (os.cpu_count() or 1) // 2))
        self._executor = ThreadPoolExecutor(MOST_THREADS_OF_ALL, thread_name_prefix="tokenizing")
        self._turns = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(self._threads))
        self._shares: dict[str, _ThreadShare] = {}
        self._bytes = 0

    async def run(self, key: str, size: int, work: Callable[[], T], model: str = "") -> T:
        """Returns or raises what ``work`` does, for a body of ``size`` bytes. Raises ApiError 429 or 503 when too many
        bytes are waiting. A cancelled call keeps its thread until the work has ended."""
        share = self._shares.get(key)
        if (0 if share is None else share.bytes) + size > max(size, MAX_BYTES_OF_KEY):
            raise errors.too_many_long_prompts()
        if self._bytes + size > max(size, MAX_BYTES):
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
