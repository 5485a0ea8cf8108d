"""The CPU engine through the batcher, against transformers' own ways, side by side in one process on one thread.

    .venv/bin/python -m benchmarks.engine [--only rivals|prefix]

Rivals: transformers' continuous batching, its manager running and warm as it would be in a server, and `generate` of
the whole batch, left-padded (static). Its cache has room for 16 requests of 256 tokens, as ours has; other sizes of
pages and batches were not faster.
Two models of random weights, 1, 4 and 16 requests with ragged prompts, every answer of the same length. The rounds of
the three alternate, so that a noisy machine disturbs all alike, and a ratio is the median of the rounds' ratios.
"In flight": 16 requests of which one arrives every other step. The batcher's own time is a step's without the engine.
``prefix`` is in ``benchmarks/prefixes.py``.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import prefixes
from benchmarks.report import Target, finish
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from workers.batching.batcher import Batcher
from workers.engines.cpu.engine import CpuEngine
from workers.messages.requests import GenerateRequest, TokenEvent
from workers.text.tokenizer import load_tokenizer

MODELS: dict[str, dict[str, Any]] = {
    "64x2": {"hidden": 64, "layers": 2, "heads": 4},
    "512x8": {"hidden": 512, "layers": 8, "heads": 8},
}
REQUESTS = (1, 4, 16)
NEW_TOKENS = 64
MAX_LEN = 256
SLOTS = 16
RIVAL_DEADLINE_S = 60.0
ROUNDS = {"64x2": 7, "512x8": 3}
TARGETS = {
    f"{model}.16.{rival}": Target(least)
    for model in MODELS
    for rival, least in (("over_continuous", 1.0), ("over_static", 0.9))
} | {f"{model}.prefix.ttft_over_without": Target(1.0, at_least=False) for model in MODELS}


class TimedEngine:
    """The engine, and the seconds that its steps took."""

    def __init__(self, engine: CpuEngine) -> None:
        self.engine = engine
        self.seconds = 0.0

    @property
    def spec(self) -> Any:
        return self.engine.spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def prefill(self, *arguments: Any) -> Any:
        return self._timed(self.engine.prefill, arguments)

    def decode(self, *arguments: Any) -> Any:
        return self._timed(self.engine.decode, arguments)

    def _timed(self, step: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        began = time.perf_counter()
        output = step(*arguments)
        self.seconds += time.perf_counter() - began
        return output


class Bench:
    """One model, ready in all three ways."""

    def __init__(self, path: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.engine = TimedEngine(CpuEngine(path, slots=SLOTS, max_len=MAX_LEN, threads=1))
        self.engine.engine.load()
        self.tokenizer = load_tokenizer("cpu", str(path))
        self.model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32).eval()
        self.paged = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self.tokens = 0
        self.manager = self._running_manager()

    def close(self) -> None:
        """End the rival's thread."""
        self.manager.stop(block=True)

    def ours(self, prompts: Sequence[Sequence[int]], every: int = 0) -> float:
        """Seconds for all; ``every`` n steps one more arrives (0: all at once)."""
        self.tokens = 0
        batcher = Batcher(self.engine, self.tokenizer, self._count)
        waiting = [
            GenerateRequest(id=str(i), prompt_ids=list(ids), max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
            for i, ids in enumerate(prompts)
        ]
        began = time.perf_counter()
        steps = 0
        if not every:
            while waiting:
                batcher.submit(waiting.pop(0))
        while waiting or batcher.stats.live or batcher.stats.waiting:
            if waiting and steps % every == 0:
                batcher.submit(waiting.pop(0))
            batcher.step()
            steps += 1
        seconds = time.perf_counter() - began
        assert self.tokens == len(prompts) * NEW_TOKENS
        return seconds

    def steps_and_own_share(self, prompts: Sequence[Sequence[int]]) -> tuple[float, float]:
        """Microseconds of the batcher itself in each step, and its share of the time."""
        self.engine.seconds = 0.0
        seconds = self.ours(prompts)
        own = seconds - self.engine.seconds
        return own / (NEW_TOKENS + 1) * 1e6, own / seconds

    def continuous(self, prompts: Sequence[Sequence[int]]) -> float:
        began = time.perf_counter()
        waiting = {self.manager.add_request(list(ids), max_new_tokens=NEW_TOKENS) for ids in prompts}
        tokens = 0
        while waiting:
            output = self.manager.get_result(timeout=RIVAL_DEADLINE_S)
            assert output is not None, "transformers' continuous batching does not answer"
            if output.is_finished():
                waiting.discard(output.request_id)
                tokens += len(output.generated_tokens)
        seconds = time.perf_counter() - began
        assert tokens == len(prompts) * NEW_TOKENS
        return seconds

    def static(self, prompts: Sequence[Sequence[int]]) -> float:
        longest = max(map(len, prompts))
        ids = self.torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = self.torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        began = time.perf_counter()
        output = self.model.generate(ids, attention_mask=mask, generation_config=self._config())
        seconds = time.perf_counter() - began
        assert output.shape[1] == longest + NEW_TOKENS
        return seconds

    def _running_manager(self) -> Any:
        from transformers import ContinuousBatchingConfig

        room = ContinuousBatchingConfig(
            page_size=MAX_LEN, num_blocks=SLOTS, max_batch_tokens=1024, max_requests_per_batch=SLOTS
        )
        manager = self.paged.init_continuous_batching(generation_config=self._config(), continuous_batching_config=room)
        manager.start()
        return manager

    def _config(self) -> Any:
        from transformers import GenerationConfig

        for model in (self.model, self.paged):
            model.generation_config.eos_token_id = None  # a call inherits what it leaves out
        return GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)

    def _count(self, events: list[TokenEvent]) -> None:
        self.tokens += sum(len(event.token_ids) for event in events)


def ragged(count: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(6, VOCAB_SIZE) for _ in range(rng.randrange(8, 49))] for _ in range(count)]


def measure(name: str, bench: Bench) -> dict[str, float]:
    measured: dict[str, float] = {}
    print(f"{name}: tokens/s, median of {ROUNDS[name]} rounds")
    print("  requests  batcher  in flight  continuous batching  static generate")
    for count in REQUESTS:
        prompts = ragged(count)
        ways: dict[str, Callable[[], float]] = {
            "ours": partial(bench.ours, prompts),
            "in_flight": partial(bench.ours, prompts, every=2),
            "continuous": partial(bench.continuous, prompts),
            "static": partial(bench.static, prompts),
        }
        for way in ways.values():
            way()  # warm
        rounds = [{way: run() for way, run in ways.items()} for _ in range(ROUNDS[name])]
        rate = {way: count * NEW_TOKENS / statistics.median(r[way] for r in rounds) for way in ways}
        print(
            f"  {count:8d}  {rate['ours']:7.0f}  {rate['in_flight']:9.0f}"
            f"  {rate['continuous']:19.0f}  {rate['static']:15.0f}",
            flush=True,
        )
        measured[f"{name}.{count}.over_continuous"] = statistics.median(r["continuous"] / r["ours"] for r in rounds)
        measured[f"{name}.{count}.over_static"] = statistics.median(r["static"] / r["ours"] for r in rounds)
        if count > 1:
            measured[f"{name}.{count}.in_flight_over_continuous"] = statistics.median(
                r["continuous"] / r["in_flight"] for r in rounds
            )
        own, share = bench.steps_and_own_share(prompts)
        measured[f"{name}.{count}.batcher_us_per_step"] = own
        print(f"            the batcher itself: {own:.0f} us a step, {share:.0%} of the time", flush=True)
    return measured


def main() -> None:
    import torch
    import transformers

    parser = argparse.ArgumentParser(prog="benchmarks.engine")
    parser.add_argument("--only", choices=("rivals", "prefix"))
    only = parser.parse_args().only
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    measured: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, size in MODELS.items():
            path = Path(folder) / name
            make_checkpoint(path, "llama", **size)
            if only != "prefix":
                bench = Bench(path)
                measured |= measure(name, bench)
                bench.close()
            if only != "rivals":
                measured |= prefixes.measure(name, path, ROUNDS[name])
    finish("engine", measured, TARGETS)


if __name__ == "__main__":
    main()
