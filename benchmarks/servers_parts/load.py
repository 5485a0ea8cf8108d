"""A load of streamed completions with prompts of token ids, and when their tokens came."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import aiohttp

FIRST_ID, LAST_ID = 32, 126  # ordinary tokens in every common vocabulary; printable ASCII if a token is a byte
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Load:
    """A Poisson process of ``rate`` requests a second, or so many at a time; each with one of the ``lengths``, pairs of
    prompt and output tokens, taken in turn."""

    requests: int
    lengths: Sequence[tuple[int, int]]
    rate: float | None = None
    concurrency: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Streamed:
    """A complete answer: when it was asked for, and when each event with text came, in seconds."""

    sent: float
    chunks: tuple[float, ...]
    tokens: int

    @property
    def ttft_ms(self) -> float:
        return (self.chunks[0] - self.sent) * 1000

    @property
    def tpot_ms(self) -> float:
        return (self.chunks[-1] - self.chunks[0]) / (self.tokens - 1) * 1000


@dataclass(frozen=True)
class Run:
    answers: tuple[Streamed, ...]
    duration_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.duration_s


async def send(urls: Sequence[str], load: Load) -> Run:
    """Sends a load to the only model of one server, or of several in turn. Raises RuntimeError unless every answer is
    complete."""
    draw = random.Random(load.seed)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        targets = cycle([(url, await _model(session, url)) for url in urls])
        prompts = [([draw.randint(FIRST_ID, LAST_ID) for _ in range(size)], output) for size, output in load.lengths]
        jobs = ((*next(targets), *prompt) for prompt, _ in zip(cycle(prompts), range(load.requests), strict=False))
        began = time.perf_counter()
        if load.rate is None:
            workers = [_one_by_one(session, jobs) for _ in range(load.concurrency or 1)]
            answers = [answer for each in await asyncio.gather(*workers) for answer in each]
        else:
            tasks, due = [], began
            for job in jobs:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                tasks.append(asyncio.create_task(_ask(session, *job)))
                due += draw.expovariate(load.rate)
            answers = await asyncio.gather(*tasks)
        return Run(tuple(answers), time.perf_counter() - began)


async def _model(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(f"{url}/v1/models") as response:
        (model,) = (await response.json())["data"]
        return str(model["id"])


async def _one_by_one(
    session: aiohttp.ClientSession, jobs: Iterator[tuple[str, str, list[int], int]]
) -> list[Streamed]:
    return [await _ask(session, *job) for job in jobs]


async def _ask(session: aiohttp.ClientSession, url: str, model: str, prompt: list[int], output: int) -> Streamed:
    body = {"model": model, "prompt": prompt, "max_tokens": output, "min_tokens": output, "ignore_eos": True}
    body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    chunks, tokens, last = [], 0, b""
    sent = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        async for line in response.content:
            now, last = time.perf_counter(), line.strip() or last
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            chunks += [now for choice in event.get("choices", ()) if choice["text"]]
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    if response.status != 200 or last != b"data: [DONE]" or tokens != output or not chunks:
        raise RuntimeError(f"{url}: {response.status}, {tokens} of {output} tokens, the last line is {last[:300]!r}")
    return Streamed(sent, tuple(chunks), tokens)
