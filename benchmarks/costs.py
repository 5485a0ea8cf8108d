"""CPU time of the hot paths, in absolute figures: what `benchmarks.check` compares between two commits.

    .venv/bin/python -m benchmarks.costs [--only gateway|batcher|engine|plan]

Each figure is CPU time, not wall-clock time, so that other processes disturb it little; absolute values mean something
only beside those of another commit, measured alternately on the same machine.

- ``gateway.unary_us``, ``gateway.streamed_us``, ``gateway.paced_us``: CPU of the gateway's process for each request
  that is not streamed, for each token of a stream, and for each token of a stream that is paced by steps of 20 ms; the
  same jobs as in `benchmarks.gateway`.
- ``gateway.bare_us``: the bare socket proxy of `benchmarks.gateway` under the first of these jobs. It does not depend
  on the product: its change shows the noise of the machine.
- ``batcher.step_us``: one step of the batcher with 16 requests on an echo engine, the least of several runs.
- ``engine.token_us``: one token of the CPU engine through the batcher (llama 64x2, 16 requests), likewise.
- ``plan.cpu_ms``: `plan` of a churned fleet of 100 hosts with any number of moves, cold caches, likewise.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import finish

GATEWAY_ROUNDS = 3
RUNS = 5
SLOTS = 16
STEPS = 2000


def gateway() -> dict[str, float]:
    from benchmarks import gateway as bench_gateway

    jobs = {
        "unary": ("answers", 0.0, {"stream": False, "tokens": 1}),
        "streamed": ("tokens", 0.0, {"stream": True, "tokens": bench_gateway.STREAM_TOKENS}),
        "paced": ("tokens", bench_gateway.PACED_STEP_MS, {"stream": True, "tokens": bench_gateway.PACED_TOKENS}),
    }
    measured: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        bench = bench_gateway.Bench(stack)
        engine = bench.engine("echo", 64, bench_gateway.MAX_LEN, 0.0)
        _, ours = bench.gateway("home", echo=bench_gateway.MAX_LEN)
        proxy = bench.start("bare", engine.ready["port"])
        bare = bench_gateway.Stack("bare", proxy.ready["port"], {"proxy": [proxy.pid]})
        load = {"connections": bench_gateway.CONNECTIONS, "seconds": bench_gateway.SECONDS}
        for _ in range(GATEWAY_ROUNDS):
            for job, (unit, step_ms, shape) in jobs.items():
                engine.ask({"step_ms": step_ms})
                cost, _ = bench.cost_us(ours, unit, **load, **shape, step_ms=step_ms)
                measured.setdefault(f"gateway.{job}_us", []).append(sum(cost.values()))
            engine.ask({"step_ms": 0.0})
            cost, _ = bench.cost_us(bare, "answers", **load, **jobs["unary"][2])
            measured.setdefault("gateway.bare_us", []).append(sum(cost.values()))
    return {name: statistics.median(values) for name, values in measured.items()}


def least(run: Callable[[], float]) -> float:
    """Returns the least of several runs, the first of which warms the caches."""
    run()
    return min(run() for _ in range(RUNS))


def batcher() -> dict[str, float]:
    from workers.batching.batcher import Batcher
    from workers.engines.echo.engine import EchoEngine
    from workers.messages.requests import GenerateRequest
    from workers.text.tokenizer import load_tokenizer

    engine = EchoEngine(slots=SLOTS, max_len=2 * STEPS, step_ms=0.0)
    engine.load()
    tokenizer = load_tokenizer("echo", None)

    def run() -> float:
        batcher = Batcher(engine, tokenizer, lambda events: None)
        for slot in range(SLOTS):
            batcher.submit(GenerateRequest(id=str(slot), prompt_ids=list(range(5, 37)), max_tokens=STEPS))
        batcher.step()
        began = time.process_time()
        for _ in range(STEPS - 2):
            batcher.step()
        return (time.process_time() - began) / (STEPS - 2) * 1e6

    return {"batcher.step_us": least(run)}


def engine() -> dict[str, float]:
    import torch

    from tests.checkpoints import make_checkpoint
    from workers.batching.batcher import Batcher
    from workers.engines.cpu.engine import CpuEngine
    from workers.messages.requests import GenerateRequest
    from workers.text.tokenizer import load_tokenizer

    torch.set_num_threads(1)
    tokens = 64
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), "llama", hidden=64, layers=2, heads=4)
        cpu = CpuEngine(Path(folder), slots=SLOTS, max_len=256, threads=1)
        cpu.load()
        tokenizer = load_tokenizer("cpu", folder)

        def run() -> float:
            batcher = Batcher(cpu, tokenizer, lambda events: None)
            for slot in range(SLOTS):
                request = GenerateRequest(
                    id=str(slot),
                    prompt_ids=list(range(6, 14 + 2 * slot)),
                    max_tokens=tokens,
                    temperature=0.0,
                    ignore_eos=True,
                )
                batcher.submit(request)
            began = time.process_time()
            while batcher.stats.live or batcher.stats.waiting:
                batcher.step()
            return (time.process_time() - began) / (SLOTS * tokens) * 1e6

        return {"engine.token_us": least(run)}


def plan() -> dict[str, float]:
    from benchmarks.placement_parts.generator import churned
    from benchmarks.placement_parts.planner import arguments
    from benchmarks.placement_parts.timing import cold_ms

    fleet = arguments(churned(0, 100))
    return {"plan.cpu_ms": least(lambda: cold_ms(fleet.plan)[0])}


PARTS: dict[str, Callable[[], dict[str, float]]] = {
    "gateway": gateway,
    "batcher": batcher,
    "engine": engine,
    "plan": plan,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(PARTS), action="append", help="measure these parts only")
    chosen = parser.parse_args().only or list(PARTS)
    measured: dict[str, float] = {}
    for part in chosen:
        measured |= PARTS[part]()
    finish("costs", measured, {})


if __name__ == "__main__":
    main()
