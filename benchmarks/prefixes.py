"""Conversations on the CPU engine with its prefix cache and without, side by side; a part of ``benchmarks.engine``.

Each conversation begins with the same system prompt, and each turn with all that was said before. One turn of each
conversation after the other, alone, so that the time to its first token is that of its prefill. The engines take turns
in each round, and a ratio is the median of the rounds' ratios; both must give the same tokens.
"""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path

from tests.checkpoints import VOCAB_SIZE
from workers.batching.batcher import Batcher
from workers.engines.cpu.engine import CpuEngine
from workers.messages.requests import GenerateRequest, TokenEvent
from workers.text.tokenizer import Tokenizer, load_tokenizer

TALKS = 6
TURNS = 5
SYSTEM, USER, ANSWER = 96, (16, 48), 16  # tokens
SLOTS = 8
MAX_LEN = 512


class Chats:
    """One round of all conversations, on one engine."""

    def __init__(self, engine: CpuEngine, tokenizer: Tokenizer, seed: int) -> None:
        self.batcher = Batcher(engine, tokenizer, self._receive)  # a new one: it knows of nothing that slots hold
        self.rng = random.Random(seed)
        self.answer: list[int] = []
        self.first_at = 0.0
        self.ttfts: list[float] = []
        self.said: list[list[int]] = []

    def run(self) -> None:
        system = self._words(SYSTEM)
        self.said = [list(system) for _ in range(TALKS)]
        for turn in range(TURNS):
            for talk, said in enumerate(self.said):
                said += self._words(self.rng.randint(*USER))
                self.answer = []
                request = GenerateRequest(
                    id=f"{talk}.{turn}", prompt_ids=said, max_tokens=ANSWER, temperature=0.0, ignore_eos=True
                )
                began = time.perf_counter()
                self.batcher.submit(request)
                while self.batcher.step():
                    pass
                self.ttfts.append(self.first_at - began)
                self.said[talk] = said + self.answer

    @property
    def saved(self) -> float:
        """Share of the prompts' tokens that were not read."""
        return self.batcher.stats.prefix_hits / max(1, self.batcher.stats.prefix_queries)

    def _words(self, count: int) -> list[int]:
        return [self.rng.randrange(6, VOCAB_SIZE) for _ in range(count)]

    def _receive(self, events: list[TokenEvent]) -> None:
        for event in events:
            if not self.answer:
                self.first_at = time.perf_counter()
            self.answer += event.token_ids


def measure(name: str, path: Path, rounds: int) -> dict[str, float]:
    """Ratios of the model at ``path``: with the cache over without."""
    tokenizer = load_tokenizer("cpu", str(path))
    engines = [CpuEngine(path, slots=SLOTS, max_len=MAX_LEN, threads=1, prefix_cache=cache) for cache in (False, True)]
    for engine in engines:
        engine.load()
    ttft, later, whole, saved = [], [], [], 0.0
    plain_ms, cached_ms = [], []
    for seed in range(rounds):
        plain, cached = (Chats(engine, tokenizer, seed) for engine in engines)
        seconds = []
        for chats in (plain, cached):
            began = time.perf_counter()
            chats.run()
            seconds.append(time.perf_counter() - began)
        assert cached.said == plain.said, "the prefix cache changed an answer"
        saved = cached.saved
        ttft.append(statistics.mean(cached.ttfts) / statistics.mean(plain.ttfts))
        later.append(statistics.mean(cached.ttfts[-TALKS:]) / statistics.mean(plain.ttfts[-TALKS:]))
        whole.append(seconds[1] / seconds[0])
        plain_ms.append(statistics.mean(plain.ttfts) * 1e3)
        cached_ms.append(statistics.mean(cached.ttfts) * 1e3)
    measured = {
        f"{name}.prefix.tokens_saved": saved,
        f"{name}.prefix.ttft_over_without": statistics.median(ttft),
        f"{name}.prefix.last_turn_ttft_over_without": statistics.median(later),
        f"{name}.prefix.seconds_over_without": statistics.median(whole),
    }
    print(
        f"{name}: {TALKS} conversations of {TURNS} turns: {saved:.0%} of the prompts' tokens not read, mean TTFT"
        f" {statistics.median(cached_ms):.1f} ms for {statistics.median(plain_ms):.1f} ms without;"
        f" ratios {', '.join(f'{value:.2f}' for value in list(measured.values())[1:])}",
        flush=True,
    )
    return measured
