"""What corewright costs in front of real vLLM, and what its queue saves over routers that choose a server at once.

    COREWRIGHT_VLLM_PYTHON=.venv-vllm/bin/python .venv/bin/python -m benchmarks.servers

Overhead (needs vLLM's interpreter, as `make test VLLM=1` builds it): one vLLM server alone and one behind corewright,
with the same flags and the same llama, whose steps take 20 ms and more. Both servers are pinned to one CPU and all else
to another one; they take turns, at 1, 8 and 32 requests at a time. Throughput is in output tokens a second.

Routing: servers whose steps sleep, four slots each, ragged lengths, Poisson arrivals at LOAD of what the same servers
do when all slots are busy. Late binding (corewright) against round robin of the client, and against vLLM's own router,
which is installed into a virtual environment of its own. A figure is the 99th percentile of TTFT.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import uvloop

from benchmarks.report import Target, finish
from benchmarks.servers_parts import sleeping_server
from benchmarks.servers_parts.load import Load, Run, send
from orchestrator.process.addresses import free_port
from placements.spec.schema import ModelSpec
from tests.checkpoints import make_checkpoint
from tests.fleet import LiveFleet, until
from workers.engines.server.server_process import Address
from workers.engines.vllm.engine import arguments, installation
from workers.messages.replica_config import ReplicaConfig

TARGETS = {
    **{f"throughput_{n}_over_alone": Target(0.97) for n in (1, 8, 32)},
    "added_ttft_p50_ms": Target(3.0, at_least=False),
    "ttft_p99_over_round_robin": Target(0.5, at_least=False),
}
SLOTS, MAX_LEN = 32, 512
CONCURRENT = {1: 6, 8: 24, 32: 64}  # requests at a time -> requests of a round
ROUNDS = 3
PROMPT, OUTPUT = 32, 48  # tokens
SLEEPERS, SLEEPER_SLOTS, STEP_MS = 4, 4, 20.0
LOAD = 0.85
REQUESTS = 1200
START_S = 300.0
POLICIES = ("round_robin", "power_of_two", "cache_aware")  # of vLLM's router
VLLM_SPEC = """\
hosts: {{emulate: inf2.xlarge}}
engines: {{vllm: {{python: {python}}}}}
models:
  llama: {{source: {source}, engine: vllm, dtype: fp32, max_batch: {slots}, max_len: {max_len}}}
"""
SLEEPER_SPEC = """\
hosts: {{emulate: inf2.8xlarge, count: 2}}
models:
  sleeper:
    engine: server
    replicas: {replicas}
    max_queue: 10000
    server:
      command: [{python}, -m, benchmarks.servers_parts.sleeping_server, --uds, "{{socket}}", --slots, "{slots}",
                --step-ms, "{step_ms}"]
      slots: {slots}
      listen: unix
      env: {{PYTHONPATH: {root}}}
"""


def measure(urls: Sequence[str], load: Load) -> Run:
    """Sends a load to one URL, or to several in turn."""
    return uvloop.run(send(urls, load))


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


# Overhead


def overhead(python: str, rounds: int, folder: Path) -> dict[str, float]:
    """Alone and behind corewright, in turns."""
    servers, others = cpus()
    os.sched_setaffinity(0, {others})
    pinned = folder / "python"
    pinned.write_text(f'#!/bin/sh\nexec taskset -c {servers} {python} "$@"\n')
    pinned.chmod(0o755)
    source = make_checkpoint(folder / "llama", "llama", hidden=768, layers=8, heads=12, eos=None)
    with ExitStack() as stack:
        alone = stack.enter_context(vllm_alone(str(pinned), source))
        spec = VLLM_SPEC.format(python=pinned, source=source, slots=SLOTS, max_len=MAX_LEN)
        behind = stack.enter_context(fleet_of(spec))
        throughput: dict[tuple[str, int], list[float]] = {}
        ttft: dict[str, list[float]] = {alone: [], behind: []}
        steps: list[float] = []
        for number in range(rounds + 1):
            for concurrency, requests in CONCURRENT.items():
                for url in (alone, behind) if number % 2 else (behind, alone):
                    result = measure([url], Load(requests, [(PROMPT, OUTPUT)], concurrency=concurrency))
                    if number == 0:
                        continue  # warm-up
                    throughput.setdefault((url, concurrency), []).append(result.tokens_per_s)
                    if concurrency == 1:
                        ttft[url] += [answer.ttft_ms for answer in result.answers]
                        steps += [answer.tpot_ms for answer in result.answers]
    results = {"step_ms": statistics.median(steps)}
    print(f"a step alone takes {results['step_ms']:.1f} ms")
    for concurrency in CONCURRENT:
        ours, theirs = (statistics.median(throughput[url, concurrency]) for url in (behind, alone))
        print(f"{concurrency:3} at a time: {ours:8.1f} tokens/s behind corewright, {theirs:8.1f} alone")
        results[f"throughput_{concurrency}_over_alone"] = ours / theirs
    results["added_ttft_p50_ms"] = statistics.median(ttft[behind]) - statistics.median(ttft[alone])
    return results


def cpus() -> tuple[int, int]:
    """One CPU for the servers, and one for all else."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        raise SystemExit("this benchmark needs two CPUs")
    return usable[0], usable[1]


@contextmanager
def vllm_alone(python: str, source: Path) -> Iterator[str]:
    """The server that corewright starts, with the same flags, on a port."""
    port = free_port()
    config = ReplicaConfig(
        model=ModelSpec(name="llama", engine="vllm", source=str(source), dtype="fp32", max_batch=SLOTS, max_len=MAX_LEN)
    )
    flags = arguments(config, installation(python), Address(port=port))
    env = {
        **os.environ,
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    with process([python, "-m", "vllm.entrypoints.cli.main", "serve", *flags], f"http://127.0.0.1:{port}", env) as url:
        yield url


@contextmanager
def fleet_of(spec: str) -> Iterator[str]:
    fleet = LiveFleet(spec)
    try:
        yield fleet.wait_ready(START_S).url
    finally:
        fleet.stop()
        fleet.clean()


@contextmanager
def process(command: Sequence[str], url: str, env: dict[str, str] | None = None) -> Iterator[str]:
    """Runs a server until the end of the context; its children end with its group."""
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
        try:
            until(lambda: answers(url) or server.poll() is not None, START_S, f"{command[0]} answers")
            if server.poll() is not None:
                log.seek(0)
                raise RuntimeError(f"{command} has ended: {log.read()[-2000:].decode(errors='replace')}")
            yield url
        finally:
            os.killpg(server.pid, 15)
            try:
                server.wait(20)
            finally:
                subprocess.run(["pkill", "-KILL", "-s", str(server.pid)], check=False)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5.0).status_code == 200
    except httpx.TransportError:
        return False


# Routing


def routing(router: Path | None, requests: int) -> dict[str, float]:
    """The p99 of TTFT in seconds by each router, at the same arrivals and lengths."""
    draw = random.Random(5)
    ragged = [(16, draw.choice((4, 8, 16, 32, 64, 128))) for _ in range(997)]
    p99: dict[str, float] = {}
    with ExitStack() as stack:
        urls = [stack.enter_context(sleeper()) for _ in range(SLEEPERS)]
        full = measure(urls, Load(requests // 4, ragged, concurrency=2 * SLEEPERS * SLEEPER_SLOTS))
        rate = LOAD * len(full.answers) / full.duration_s
        print(f"{SLEEPERS} servers of {SLEEPER_SLOTS} slots do {rate / LOAD:.2f} requests/s; {rate:.2f} are sent")
        load = Load(requests, ragged, rate=rate, seed=3)

        def run(name: str, targets: Sequence[str]) -> None:
            answers = measure(targets, load).answers
            p99[name] = quantile([answer.ttft_ms for answer in answers], 0.99) / 1000
            print(f"  {name:28}{p99[name]:10.3f} s", flush=True)

        run("round robin", urls)
        for policy in POLICIES if router else ():
            port, metrics = free_port(), free_port()
            command = [str(router), "--worker-urls", *urls, "--policy", policy, "--port", str(port)]
            command += ["--host", "127.0.0.1", "--prometheus-port", str(metrics), "--log-level", "error"]
            with process(command, f"http://127.0.0.1:{port}") as url:
                run(f"vllm-router, {policy}", [url])
    spec = SLEEPER_SPEC.format(
        python=sys.executable,
        root=Path(__file__).parents[1],
        replicas=SLEEPERS,
        slots=SLEEPER_SLOTS,
        step_ms=STEP_MS,
    )
    with fleet_of(spec) as url:
        run("corewright", [url])
    theirs = [value for name, value in p99.items() if name.startswith("vllm-router")]
    return {
        "ttft_p99_s": p99["corewright"],
        "ttft_p99_over_round_robin": p99["corewright"] / p99["round robin"],
        **({"ttft_p99_over_best_vllm_router": p99["corewright"] / min(theirs)} if theirs else {}),
    }


@contextmanager
def sleeper() -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", sleeping_server.__name__, "--port", str(port), "--slots", str(SLEEPER_SLOTS)]
    with process([*command, "--step-ms", str(STEP_MS)], f"http://127.0.0.1:{port}") as url:
        yield url


def install_router(folder: Path) -> Path | None:
    """Installs vLLM's router; None where that fails."""
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    pip = [str(folder / "venv" / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", "vllm-router"]
    if subprocess.run(pip, check=False, capture_output=True, timeout=300).returncode:
        say("vllm-router cannot be installed: its figures are left out")
        return None
    return folder / "venv" / "bin" / "vllm-router"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=os.environ.get("COREWRIGHT_VLLM_PYTHON"), help="vLLM's interpreter")
    parser.add_argument("--router", type=Path, help="vllm-router where it is installed; without: it is installed")
    parser.add_argument("--only", choices=("overhead", "routing"))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of a router")
    options = parser.parse_args()
    began = time.monotonic()
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="cwb-", dir="/tmp") as name:
        folder = Path(name)
        if options.only != "overhead":
            results |= routing(options.router or install_router(folder), options.requests)
        if options.only != "routing":
            if not options.python:
                raise SystemExit("set COREWRIGHT_VLLM_PYTHON, or use --only routing")
            results |= overhead(options.python, options.rounds, folder)
    say(f"{time.monotonic() - began:.0f} s")
    finish("servers", results, TARGETS)


if __name__ == "__main__":
    main()
