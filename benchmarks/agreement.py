"""Checks whether `corewright bench serving` measures what guidellm measures, on the same server in the same run.

    .venv/bin/python -m benchmarks.agreement

guidellm is installed into a virtual environment of its own in a temporary folder. Both send the same lengths in the
same order: one request at a time, eight at a time, and 5.3 a second at even distances, so that both tools send at the
same times. Each result is the larger of the two figures over the smaller.

With eight at a time the TTFT says as much of the load: the next request is sent when one has ended, which is when a
step of the server begins, and how much of that step it waits for depends on how soon a tool sends it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import uvloop

from benchmarks.report import Target, finish
from orchestrator.bench.arrivals import Load
from orchestrator.bench.lengths import Lengths
from orchestrator.bench.report import figures, serving_data
from orchestrator.bench.serving import Serving, serve
from orchestrator.bench.target import Target as Server
from orchestrator.bench.target import origin
from orchestrator.bench.timed_http import Client
from tests.fleet import LiveFleet

PACKAGES = ("torch==2.13.0", "guidellm==0.8.1")  # torch first: a looser pin may take several GB
WITHIN = 1.05
RUN_S = 240.0
MODEL = "echo"
SPEC = f"""\
version: 1
name: agreement
hosts: {{emulate: inf2.xlarge}}
models:
  {MODEL}: {{engine: echo, tp_degree: 2, max_batch: 16, max_len: 4096, engine_options: {{step_ms: 40}}}}
"""


@dataclass(frozen=True)
class Case:
    """A load that both tools make."""

    name: str
    requests: int
    rate: float | None = None
    concurrency: int | None = None

    @property
    def profile(self) -> str:
        """guidellm's word for it."""
        if self.rate is not None:
            return f"kind=constant,rate={self.rate:g}"
        return f"kind=concurrent,streams={self.concurrency}"


CASES = (Case("one", 40, concurrency=1), Case("eight", 200, concurrency=8), Case("steady", 240, rate=5.3))


class Even(Load):
    """Of a rate, at even distances."""

    def times(self) -> tuple[float, ...]:
        assert self.rate is not None
        assert self.requests is not None
        return tuple(index / self.rate for index in range(self.requests))


@dataclass(frozen=True)
class InOrder(Lengths):
    """Lengths that are taken one after the other, not drawn."""

    def at(self, index: int, seed: int) -> tuple[int, int]:
        return self.pairs[index % len(self.pairs)]


def lengths(count: int) -> InOrder:
    draw = random.Random(7)
    return InOrder("agreement", "", tuple((draw.randint(30, 400), draw.randint(16, 48)) for _ in range(count)))


def ours(url: str, case: Case, wanted: InOrder) -> dict[str, float]:
    async def run() -> Serving:
        client = Client(origin(url))
        try:
            server = await Server.find(client, None, chat=False, seed=1, timeout_s=60.0, say=say)
            return await serve(server, Even(case.rate, case.concurrency, case.requests, None), wanted, None, say)
        finally:
            client.close()

    results = uvloop.run(run())
    data, values = serving_data(results), figures(results.measured)
    assert data["ok"] == case.requests, data["said"]
    if data["client"]["limits"]:
        say(f"our client was late: {data['client']['limits']}")
    return {
        **_both("ttft", values["ttft_ms"]),
        "itl_mean": statistics.mean(values["itl_ms"]),
        "itl_p50": statistics.median(values["tpot_ms"]),  # guidellm's is of the requests' means
        **_both("e2e", values["e2e_ms"]),
        "tokens_per_s": data["output_tokens_per_s"],
    }


def _both(name: str, values: list[float]) -> dict[str, float]:
    return {f"{name}_mean": statistics.mean(values), f"{name}_p50": statistics.median(values)}


def guidellm(tool: Path, url: str, case: Case, wanted: InOrder, folder: Path) -> dict[str, float]:
    draw = random.Random(8)
    rows = []
    for index in range(case.requests):
        prompt, output = wanted.at(index, 0)
        text = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=prompt))  # the echo engine's tokens are bytes
        rows.append({"prompt": text, "prompt_tokens_count": prompt, "output_tokens_count": output})
    data, out = folder / f"{case.name}.jsonl", folder / f"{case.name}.json"
    data.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    command = [
        *(str(tool), "run", "--disable-progress", "--profile", case.profile),
        *("--backend", f"kind=openai_http,target={url},model={MODEL},request_format=/v1/completions,http2=false"),
        *("--constraint", f"kind=max_requests,count={case.requests}"),
        *("--data", f"kind=json_file,path={data}", "--output", f"kind=json,path={out}"),
    ]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=RUN_S, check=False)
    if not out.exists():
        raise SystemExit(f"guidellm failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    metrics = json.loads(out.read_text())["benchmarks"][0]["metrics"]
    answered = metrics["request_totals"]["successful"]
    assert answered == case.requests, metrics["request_totals"]

    def of(name: str, figure: str = "mean") -> float:
        return float(metrics[name]["successful"][figure])

    return {
        "ttft_mean": of("time_to_first_token_ms"),
        "ttft_p50": of("time_to_first_token_ms", "median"),
        "itl_mean": of("inter_token_latency_ms"),
        "itl_p50": of("inter_token_latency_ms", "median"),
        "e2e_mean": of("request_latency") * 1000,
        "e2e_p50": of("request_latency", "median") * 1000,
        "tokens_per_s": of("output_tokens_per_second"),
    }


def install(folder: Path) -> Path:
    """A virtual environment with guidellm; gives its command."""
    say("installing guidellm")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    for package in PACKAGES:
        pip = [str(folder / "venv" / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", package]
        subprocess.run(pip, check=True, capture_output=True, timeout=400)
    return folder / "venv" / "bin" / "guidellm"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def measure(tool: Path, url: str, folder: Path) -> dict[str, float]:
    results: dict[str, float] = {}
    for case in CASES:
        wanted = lengths(case.requests)
        sides: list[Callable[[], dict[str, float]]] = [
            partial(ours, url, case, wanted),
            partial(guidellm, tool, url, case, wanted, folder),
        ]
        mine, theirs = (side() for side in sides)
        print(f"{case.name}: {'':<14}{'ours':>10}{'guidellm':>10}{'ratio':>8}")
        for name, value in mine.items():
            print(f"    {name:<14}{value:>14.2f}{theirs[name]:>10.2f}{value / theirs[name]:>8.3f}", flush=True)
            results[f"{case.name}_{name}"] = max(value, theirs[name]) / min(value, theirs[name])
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", help="a server that runs, with one echo model; without: a fleet is started")
    parser.add_argument("--guidellm", type=Path, help="guidellm where it is installed; without: it is installed")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cwb-", dir="/tmp") as name:
        folder = Path(name)
        tool = arguments.guidellm or install(folder)
        if arguments.url:
            results = measure(tool, arguments.url, folder)
        else:
            fleet = LiveFleet(SPEC)
            try:
                results = measure(tool, fleet.wait_ready().url, folder)
            finally:
                fleet.stop()
                fleet.clean()
    say(f"{time.monotonic() - began:.0f} s")
    finish("agreement", results, dict.fromkeys(results, Target(WITHIN, at_least=False)))


if __name__ == "__main__":
    main()
