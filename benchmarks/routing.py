"""How long requests wait for their first token, by production's router and by others, on the simulator's replicas.

    .venv/bin/python -m benchmarks.routing

Production's is `orchestrator.dispatch.dispatcher.Dispatcher`: a request leaves its line for the slot that
`orchestrator.dispatch.replica_choice.choose` names; with two gateways each has half of the requests and a line of its
own, and a replica refuses (BUSY) what it has no slot for and promises the next one, as the data plane does. The others
are in routing_parts/rivals.py, written from their definitions. Replicas are static slots whose prefill stops their
decodes (`orchestrator.simulate.simulated_replica`).

Requests come as a Poisson process, at LOAD of what the same replicas do when a queue always waits. The first tenth of
them is not measured. The fleets:

- ``equal``: 24 replicas of 4 slots
- ``mixed``: two such and four that take SLOWER times as long for everything
- ``mixed_less``: the same with LESS

A figure is the 99th percentile of TTFT, in seconds; ratios are those of the means over the seeds. All routers get the
same requests. Targets are for requests of the lengths ``short``; those of ``chat``, with long prompts, inform.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

from benchmarks.report import Target, finish
from benchmarks.routing_parts import rivals
from benchmarks.routing_parts.fixed_replicas import Router, serve_fixed
from benchmarks.routing_parts.traffic import FAST, MODEL, arrivals, capacity, lengths, slower
from orchestrator.simulate.scenario import SimModel
from orchestrator.simulate.simulated_replica import SimReplica

LOAD = 0.85
SLOWER, LESS = 4.0, 2.0
SEEDS = 8
REQUESTS = 20000
FLEETS = {
    "equal": [FAST] * 24,
    "mixed": [FAST] * 2 + [slower(SLOWER)] * 4,
    "mixed_less": [FAST] * 2 + [slower(LESS)] * 4,
}
OURS, TWO = "late binding", "late binding, two gateways"
RIVALS: dict[str, Callable[[int], Router]] = {
    "random": rivals.random_router,
    "round robin": rivals.round_robin,
    "power of two": rivals.power_of_two,
    "shortest queue": rivals.shortest_queue,
    "oracle": rivals.oracle,
}
TARGETS = {
    "equal_over_power_of_two": Target(0.15, at_least=False),
    "equal_two_gateways_over_power_of_two": Target(0.25, at_least=False),
    "mixed_over_power_of_two": Target(0.06, at_least=False),
    "equal_over_oracle": Target(1.05, at_least=False),
}


@dataclass(frozen=True)
class Fleet:
    """Replicas and what they are asked for; ``rate``: requests a second."""

    models: Sequence[SimModel]
    pairs: Sequence[tuple[int, int]]
    rate: float

    @classmethod
    def loaded(cls, models: Sequence[SimModel], pairs: Sequence[tuple[int, int]]) -> Fleet:
        return cls(models, pairs, LOAD * capacity(models, pairs))

    def p99(self, router: str, seed: int, count: int) -> float:
        """Of TTFT, in seconds."""
        coming = arrivals(self.pairs, self.rate, count, seed)
        result = serve_fixed(
            [self.models[0]],
            coming,
            replicas={MODEL: [SimReplica(model, index) for index, model in enumerate(self.models)]},
            gateways=2 if router == TWO else 1,
            choice=RIVALS[router](seed) if router in RIVALS else None,
            seed=seed,
            since=coming[count // 10].at,
        )[MODEL]
        if result.refused or len(result.ttfts) != result.arrived:
            raise RuntimeError(f"{router}: {result.arrived} requests came, {len(result.ttfts)} were answered")
        return sorted(result.ttfts)[int(0.99 * (len(result.ttfts) - 1))]


def compare(name: str, fleet: Fleet, seeds: int, count: int) -> dict[str, float]:
    """The p99 of each router, the mean over the seeds; prints them."""
    results = {}
    print(f"{name}: {len(fleet.models)} replicas, {fleet.rate:.2f} requests/s, {seeds} seeds of {count} requests")
    for router in (OURS, TWO, *RIVALS):
        each = [fleet.p99(router, seed, count) for seed in range(seeds)]
        results[router] = mean(each)
        print(f"  {router:28}{results[router]:10.3f}   {min(each):.3f} to {max(each):.3f}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of a seed")
    options = parser.parse_args()
    measured = {}
    for kind in ("short", "chat"):
        prefix = "" if kind == "short" else f"{kind}_"
        for name, models in FLEETS.items():
            fleet = Fleet.loaded(models, lengths(kind))
            result = compare(f"{name}, {kind}", fleet, options.seeds, options.requests)
            measured[f"{prefix}{name}_p99_s"] = result[OURS]
            measured[f"{prefix}{name}_over_power_of_two"] = result[OURS] / result["power of two"]
            measured[f"{prefix}{name}_two_gateways_over_power_of_two"] = result[TWO] / result["power of two"]
            measured[f"{prefix}{name}_over_oracle"] = result[OURS] / result["oracle"]
            measured[f"{prefix}{name}_oracle_over_power_of_two"] = result["oracle"] / result["power of two"]
    finish("routing", measured, TARGETS)


if __name__ == "__main__":
    main()
