"""What the gateway costs, against Ray Serve's default HTTP proxy and against a bare socket proxy.

    .venv/bin/python -m benchmarks.gateway
    .venv/bin/python -m benchmarks.gateway --only latency --only streams

All stacks are there in one run, before the same replica (one process: the echo engine that emits tokens at once, the
real batcher, the real data plane, and beside it a face that speaks ready HTTP), and take turns in each round. Ratios
are the medians of the rounds' ratios. Load comes from yet another process, which compares every answer with what the
echo engine must say, token for token; one wrong answer ends the run.

- *ours*: the real gateway in a process of its own, with a key that it checks, its metrics, cancellation and limits as
  always. Only the controller is played.
- *serve*: a Ray Serve deployment behind Serve's default HTTP proxy. The deployment speaks to the replica over the same
  data plane, and streams ready events; it checks no key and counts nothing.
- *bare*: an asyncio proxy on uvloop, which copies bytes between the client and the replica's HTTP face, one connection
  there for each here, and reads none of them.

CPU is user and system time of the gateway's process, by its CPU clock, over a job of some seconds; all requests of the
job have ended at its end. Of Serve it is the proxy's process and the deployment's, which do together what the gateway
does: HTTP, JSON, the data plane and the events. Metrics that end with ``proxy_alone`` count Serve's proxy only. Ray's
other processes are not counted.

- ``streamed``: 32 connections, answers of 128 tokens, at once one after the other. A token costs the gateway less the
  more of them have come since it looked, so ``paced`` is the same with a step of 20 ms: then no stack can write two
  tokens at once.
- ``unary``: 32 connections, answers of one token that are no streams, as fast as they come.
- ``added_p99``: requests of one token come as a Poisson process, and latency counts from the time at which a request
  was due. Saturation is the highest rate at which all of it, load generator and replica on the same cores, still keeps
  up: from the rate that ours reached with ``unary`` downwards, until half of the answers take less than KEEPS_UP_MS.
  Half of that is measured at, and CALM_RATE, at which processes need not wait for a core. The 99th percentile less that
  of the same requests put to the replica's HTTP face directly. Serve is not running meanwhile.
- ``streams``: a fresh gateway; 2,000 streams are asked for at once of a replica with 2,048 slots and steps of 1.5 s,
  and wait for their second token. Memory is the growth of the gateway's resident set since before the first connection,
  over 2,000. ``first_byte_2000th_over_1st``: the time to the first byte of a stream of another, fast model while these
  wait, over the same before they were there; medians of 100. ``first_byte_together``: of the 2,000, the wait of the one
  opened last over that of the one opened first. All come while the replica is in a step, so that all can be in the next
  one; their first bytes are ``first_bytes_apart_s`` apart.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gateway_parts.child import Child, cpu_s, rss_bytes
from benchmarks.report import Target, finish

PARTS = "benchmarks.gateway_parts."
ROUNDS = 3
SECONDS = 4.0
CONNECTIONS = 32
STREAM_TOKENS = 128
PACED_TOKENS = 48
PACED_STEP_MS = 20.0
MAX_LEN = 4096
STREAMS = 2000
IDLE_SLOTS = 2048
IDLE_STEP_MS = 1500.0
IDLE_MAX_LEN = 2**17  # so long that the prompts of all streams fit into one prefill
PROBES = 100
PRIMER_S = 0.2
LATENCY_CONNECTIONS = 64
KEEPS_UP_MS = 5.0
LEAST_RATE = 200.0
CALM_RATE = 500.0
TARGETS = {
    "streamed_over_serve": Target(20),
    "streamed_over_bare": Target(0.5),
    "unary_over_serve": Target(20),
    "unary_cpu_over_bare": Target(2.5, at_least=False),
    "added_p99_ms": Target(1.0, at_least=False),
    "streams_errors": Target(0, at_least=False),
    "idle_stream_kb": Target(50, at_least=False),
    "first_byte_2000th_over_1st": Target(2.0, at_least=False),
    "first_byte_together_last_over_first": Target(2.0, at_least=False),
}


@dataclass(frozen=True)
class Stack:
    """Something that answers on ``port``."""

    name: str
    port: int
    pids: dict[str, list[int]]  # of its processes, by what they are
    key: str | None = None


class Bench:
    """The processes of a run and what was measured so far."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cwg-", dir="/tmp")))
        self.load = self.start("load", None)
        self.ratios: dict[str, list[float]] = defaultdict(list)

    def start(self, part: str, argument: Any) -> Child:
        return self._stack.enter_context(Child(PARTS + part, argument, log=self.folder / f"{part}.log"))

    def engine(self, name: str, slots: int, max_len: int, step_ms: float) -> Child:
        socket = str(self.folder / name)
        return self.start("engine", {"socket": socket, "slots": slots, "max_len": max_len, "step_ms": step_ms})

    def gateway(self, home: str, **models: int) -> tuple[Child, Stack]:
        """``models``: the longest answer of each; its socket has its name."""
        engines = [{"name": name, "socket": str(self.folder / name), "max_len": most} for name, most in models.items()]
        child = self.start("ours", {"home": str(self.folder / home), "models": engines})
        return child, Stack("ours", child.ready["port"], {"gateway": [child.pid]}, child.ready["key"])

    def ask(self, stack: Stack, kind: str, **job: Any) -> dict[str, Any]:
        """Raises RuntimeError when an answer was wrong."""
        base = {"model": "echo", "prompt_chars": 64, "stream": False, "tokens": 1, "kind": kind}
        result = self.load.ask({**base, "port": stack.port, "key": stack.key, **job})
        return checked(stack, result)

    def cost_us(self, stack: Stack, each: str, **job: Any) -> tuple[dict[str, float], dict[str, Any]]:
        """CPU microseconds of each process for each of ``tokens`` or ``answers``, and what the load generator says.

        ``step_ms``, if the job has it, is the length of the replica's steps. Raises RuntimeError if a connection
        received more than one token for each step.
        """
        self.ask(stack, "closed", **{**job, "seconds": 0.3})  # warm
        before = {name: cpu_s(pids) for name, pids in stack.pids.items()}
        result = self.ask(stack, "closed", **job)
        used = {name: cpu_s(pids) - before[name] for name, pids in stack.pids.items()}
        step_ms = job.get("step_ms", 0.0)
        if result["tokens"] * step_ms > job["connections"] * result["wall_s"] * 1000:
            raise RuntimeError(f"{stack.name}: {result['tokens']} tokens are too many for steps of {step_ms} ms")
        return {name: seconds / result[each] * 1e6 for name, seconds in used.items()}, result


def checked(stack: Stack, result: dict[str, Any]) -> dict[str, Any]:
    if result["errors"]:
        raise RuntimeError(f"{stack.name}: {result['errors']} wrong answers, such as: {result['error']}")
    return result


def compare(bench: Bench, what: str, stacks: list[Stack], each: str, **job: Any) -> dict[str, float]:
    """One round of all stacks. Gives the rates that they reached, for each second."""
    costs, rates = {}, {}
    for stack in stacks:
        cost, result = bench.cost_us(stack, each, **job)
        rates[stack.name] = result[each] / result["wall_s"]
        costs[stack.name] = cost
        parts = ", ".join(f"{name} {us:.2f}" for name, us in cost.items())
        merged = f", {result['tokens'] / result['reads']:.1f} tokens a read" if job["stream"] else ""
        print(f"{what:<9} {stack.name:<6} us: {parts}; {rates[stack.name]:,.0f} {each}/s{merged}", flush=True)
    ours = sum(costs["ours"].values())
    if "serve" in costs:
        bench.ratios[f"{what}_over_serve"].append(sum(costs["serve"].values()) / ours)
        bench.ratios[f"{what}_over_serve_proxy_alone"].append(costs["serve"]["proxy"] / ours)
    bare = sum(costs["bare"].values())
    if what == "unary":
        bench.ratios["unary_cpu_over_bare"].append(ours / bare)
    else:
        bench.ratios[f"{what}_over_bare"].append(bare / ours)
    bench.ratios[f"{what}_us"].append(ours)
    return rates


def saturation(bench: Bench, ours: Stack, closed: float) -> float:
    """Requests/s that come whether or not the ones before are answered; ``closed`` is the rate of clients that wait."""
    rate = closed
    while rate > LEAST_RATE:
        job = {"rate": rate, "seconds": 1.5, "connections": LATENCY_CONNECTIONS}
        if bench.ask(ours, "paced", **job)["p50_ms"] < KEEPS_UP_MS:
            break
        rate *= 0.85
    return rate


def latency(bench: Bench, stacks: list[Stack], rate: float, name: str = "") -> None:
    """One round; ``stacks`` are ours, bare, and the replica itself as *direct*. ``name`` ends the metrics' names."""
    results = {}
    for stack in stacks:
        job = {"rate": rate, "seconds": SECONDS, "connections": LATENCY_CONNECTIONS}
        results[stack.name] = answer = bench.ask(stack, "paced", **job)
        p50, p99 = answer["p50_ms"], answer["p99_ms"]
        print(f"latency   {stack.name:<6} at {rate:,.0f}/s: p50 {p50:.3f} ms, p99 {p99:.3f} ms", flush=True)
    direct = results["direct"]
    bench.ratios[f"added_p99_ms{name}"].append(results["ours"]["p99_ms"] - direct["p99_ms"])
    bench.ratios[f"added_p99_ms_of_bare{name}"].append(results["bare"]["p99_ms"] - direct["p99_ms"])
    bench.ratios[f"added_p50_ms{name}"].append(results["ours"]["p50_ms"] - direct["p50_ms"])


def many_streams(bench: Bench) -> None:
    """2,000 streams on a gateway of their own."""
    bench.engine("idle", IDLE_SLOTS, IDLE_MAX_LEN, IDLE_STEP_MS)
    child, ours = bench.gateway("home-of-many", echo=MAX_LEN, idle=IDLE_MAX_LEN)
    many = bench.start("load", None)
    probe: dict[str, Any] = {"count": PROBES, "stream": True, "tokens": 1}
    bench.ask(ours, "closed", stream=True, tokens=8, connections=8, seconds=0.5)
    alone = bench.ask(ours, "one_by_one", **probe)
    child.ask({})
    before = rss_bytes(child.pid)
    job = {"model": "idle", "prompt_chars": 8, "stream": True, "port": ours.port, "key": ours.key}
    many.tell({**job, "tokens": 2, "kind": "together", "connections": STREAMS, "primer_s": PRIMER_S})
    many.hear()  # all are connected
    bench.load.tell(
        {**job, "tokens": 1, "kind": "closed", "connections": 1, "seconds": 0}
    )  # the step in which they come
    checked(ours, bench.load.hear())
    many.hear()  # all have their first byte
    began = time.monotonic()
    child.ask({})
    after = rss_bytes(child.pid)
    beside = bench.ask(ours, "one_by_one", **probe)
    if time.monotonic() - began > IDLE_STEP_MS / 1000:
        raise RuntimeError("the streams have not waited for as long as it took to look at them")
    result = many.hear()
    print(
        f"streams   {result['answers']} answered, {result['errors']} wrong; asked for in {result['asked_s']:.3f} s,"
        f" first bytes {result['first_byte_s']:.3f} to {result['last_byte_s']:.3f} s later;"
        f" memory {before / 2**20:.1f} to {after / 2**20:.1f} MiB;"
        f" first byte alone {alone['first_byte_ms']:.3f} ms, beside them {beside['first_byte_ms']:.3f} ms",
        flush=True,
    )
    if result["error"]:
        print(f"streams   wrong: {result['error']}", flush=True)
    bench.ratios["streams_errors"].append(result["errors"])
    bench.ratios["idle_stream_kb"].append((after - before) / STREAMS / 1000)
    bench.ratios["first_byte_2000th_over_1st"].append(beside["first_byte_ms"] / alone["first_byte_ms"])
    bench.ratios["first_byte_together_last_over_first"].append(result["last_opened_s"] / result["first_opened_s"])
    bench.ratios["first_bytes_apart_s"].append(result["last_byte_s"] - result["first_byte_s"])


def run(parts: set[str]) -> dict[str, float]:
    with contextlib.ExitStack() as stack:
        bench = Bench(stack)
        engine = bench.engine("echo", 64, MAX_LEN, 0.0)
        _, ours = bench.gateway("home", echo=MAX_LEN)
        proxy = bench.start("bare", engine.ready["port"])
        bare = Stack("bare", proxy.ready["port"], {"proxy": [proxy.pid]})
        direct = Stack("direct", engine.ready["port"], {})
        stacks = [ours, bare]
        closing = contextlib.ExitStack()  # of what ends before the rest
        if "serve" in parts:
            with_ray = Child(
                PARTS + "serve",
                {"socket": str(bench.folder / "echo"), "folder": str(bench.folder / "ray")},
                log=bench.folder / "serve.log",
            )
            stack.enter_context(closing).callback(with_ray.close)
            pids = {name: with_ray.ready[name] for name in ("proxy", "handler")}
            stacks.append(Stack("serve", with_ray.ready["port"], pids))
        reached = []
        streams = {"connections": CONNECTIONS, "seconds": SECONDS, "stream": True}
        unary = {"connections": CONNECTIONS, "seconds": SECONDS, "stream": False, "tokens": 1}
        for _ in range(ROUNDS):
            if "throughput" in parts:
                compare(bench, "streamed", stacks, "tokens", tokens=STREAM_TOKENS, **streams)
                engine.ask({"step_ms": PACED_STEP_MS})
                compare(bench, "paced", stacks, "tokens", tokens=PACED_TOKENS, step_ms=PACED_STEP_MS, **streams)
                engine.ask({"step_ms": 0.0})
            if parts & {"throughput", "latency"}:
                reached.append(compare(bench, "unary", stacks, "answers", **unary)["ours"])
        closing.close()
        if "latency" in parts:
            most = saturation(bench, ours, statistics.median(reached))
            print(f"latency   saturated at {most:,.0f}/s", flush=True)
            for _ in range(ROUNDS):
                latency(bench, [direct, ours, bare], most / 2)
                latency(bench, [direct, ours, bare], CALM_RATE, "_calm")
        if "streams" in parts:
            many_streams(bench)
        return {name: statistics.median(each) for name, each in bench.ratios.items()}


def main() -> None:
    names = ["throughput", "serve", "latency", "streams"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=names, action="append", help="serve alone is nothing; it joins throughput")
    parts = set(parser.parse_args().only or names)
    finish("gateway", run(parts), TARGETS)


if __name__ == "__main__":
    main()
