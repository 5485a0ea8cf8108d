"""How long the simulator takes for a day of twenty models.

    .venv/bin/python -m benchmarks.simulate

Twenty models share twelve hosts of 24 cores; 50 requests a second come for a day, 4.3 million in all, up and down with
the hour. Planner, router and autoscaler are production's. What counts is the CPU time of this process, on one core:
making up the requests and sorting the percentiles are part of it. Beside it, for what it costs, the same replicas
without planner and autoscaler.
"""

from __future__ import annotations

import sys
import time

from benchmarks.report import Target, finish
from benchmarks.routing_parts.fixed_replicas import serve_fixed
from benchmarks.scaling_parts.scenarios import scenario_of, sim_model
from orchestrator.simulate.report import Summary
from orchestrator.simulate.run import Joint, simulate
from orchestrator.simulate.workload import DAY_S, Workload

RATE = 50.0
HOSTS = 12
CORES, SLOTS = (2, 4, 8), (16, 16, 32)
MODELS = tuple(
    sim_model(
        f"m{i}",
        cores=CORES[i % 3],
        slots=SLOTS[i % 3],
        step_s=0.02,
        prefill_token_s=2e-5,
        load_s=60.0,
        least=(i + 1) % 2,
        most=8,
        objectives={"ttft_ms": 2000.0},
    )
    for i in range(20)
)
TARGETS = {"day_20_models_50_rps_s": Target(120.0, at_least=False)}


def main() -> int:
    shares = {model.name: 1 / (1 + i / 3) for i, model in enumerate(MODELS)}
    load = Workload("diurnal", tuple(shares), RATE, DAY_S, 0, shares=shares)
    began, cpu = time.monotonic(), time.process_time()
    outcome = simulate(scenario_of(MODELS, hosts=HOSTS), load, Joint())
    summaries = [Summary.of(value.ttfts) for value in outcome.measured.values()]
    day = time.process_time() - cpu
    wall = time.monotonic() - began
    requests = sum(value.arrived for value in outcome.measured.values())
    print(f"{requests} requests, {day:.1f} s of CPU, {wall:.1f} s of time", file=sys.stderr)
    print(f"{outcome.attainment:.1%} within 2 s, {sum(outcome.loads.values())} starts", file=sys.stderr)
    assert len(summaries) == len(MODELS)
    cpu = time.process_time()
    hour = Workload("diurnal", tuple(shares), RATE, 3600.0, 0, shares=shares)
    fixed = serve_fixed(MODELS, hour, replicas=dict.fromkeys(shares, 4))
    each = (time.process_time() - cpu) / sum(value.arrived for value in fixed.values())
    measured = {
        "day_20_models_50_rps_s": day,
        "requests": float(requests),
        "attainment": outcome.attainment,
        "fixed_us_a_request": each * 1e6,
    }
    finish("simulate", measured, TARGETS)
    return 0 if TARGETS["day_20_models_50_rps_s"].met(day) else 1


if __name__ == "__main__":
    sys.exit(main())
