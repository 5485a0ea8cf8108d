"""Replicas and the requests that they get: a Poisson process at a part of what the replicas can do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from random import Random
from statistics import mean

from benchmarks.routing_parts.fixed_replicas import serve_fixed
from benchmarks.scaling_parts.scenarios import sim_model
from orchestrator.simulate.scenario import Arrival, SimModel
from orchestrator.simulate.simulated_replica import SimReplica
from orchestrator.simulate.workload import Lengths

MODEL = "llama-2-7b"

# Llama-2-7B at tp 8 on inf2, by the formulas of placements/resources/estimate.py: W 13.5 GB, KV 1.1 GB a core, and 14
# GFLOP for a token of a prompt.
FAST = sim_model(
    MODEL,
    slots=4,
    step_s=0.018,
    prefill_base_s=0.016,
    prefill_token_s=0.00014,
    prefill_tokens=4096,
    max_queue=10**6,
)
SHORT_PROMPT, SHORT_OUTPUT, SIGMA = 161, 338, 1.0
SATURATION = 2.0  # times what the replicas can do at the most


def slower(times: float) -> SimModel:
    """The same, and everything takes so many times as long."""
    speed = FAST.speed
    slow = replace(
        speed,
        step_s=speed.step_s * times,
        prefill_base_s=speed.prefill_base_s * times,
        prefill_token_s=speed.prefill_token_s * times,
    )
    return replace(FAST, speed=slow)


@cache
def lengths(name: str) -> tuple[tuple[int, int], ...]:
    """Pairs of prompt and output tokens, to be drawn from.

    - ``short``: lognormal, with the means that the paper of vLLM gives for ShareGPT, 161 and 338 tokens
    - ``chat``: those of `corewright simulate`, of Azure's conversation trace; means of 1,130 and 230 tokens, about
    """
    if name == "chat":
        return Lengths.parse(name).pairs
    random = Random("short")

    def draw(middle: float, longest: int) -> int:
        return max(1, min(longest, round(random.lognormvariate(math.log(middle) - SIGMA**2 / 2, SIGMA))))

    return tuple((draw(SHORT_PROMPT, 4096), draw(SHORT_OUTPUT, 2048)) for _ in range(20000))


def arrivals(pairs: Sequence[tuple[int, int]], rate: float, count: int, seed: object) -> list[Arrival]:
    """``count`` requests, ``rate`` a second on the average."""
    random = Random(f"routing {seed}")
    at, drawn = 0.0, []
    for _ in range(count):
        at += random.expovariate(rate)
        drawn.append(Arrival(at, MODEL, *random.choice(pairs)))
    return drawn


def capacity(models: Sequence[SimModel], pairs: Sequence[tuple[int, int]]) -> float:
    """Requests a second that the replicas do when a queue always waits, as measured."""
    prompt, output = mean(prompt for prompt, _ in pairs), mean(output for _, output in pairs)
    costs = (  # of a request: its prefill, in which nothing else runs, and its part of the decodes that all slots share
        speed.prefill_base_s + speed.prefill_token_s * prompt + (output - 1) * speed.step_s / slots
        for speed, slots in ((model.speed, model.slots) for model in models)
    )
    rate = SATURATION * sum(1 / cost for cost in costs)
    coming = arrivals(pairs, rate, 20000, "capacity")
    replicas = [SimReplica(model, index) for index, model in enumerate(models)]
    served = serve_fixed([models[0]], coming, replicas={MODEL: replicas}, until=coming[-1].at)[MODEL]
    return len(served.ttfts) / coming[-1].at
