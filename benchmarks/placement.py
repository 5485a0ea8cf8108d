"""The planner against OR-tools CP-SAT and first fit, and its growth. Every plan goes through an independent checker.

    .venv/bin/python -m benchmarks.placement [--full] [--only PART] [--seeds N]

PART is one of weight, constrained, loads, speed, online; one of them on few seeds is quick:
``--only weight --seeds 3``. ``--full`` runs the solver's minutes anew that are otherwise read from
placement_parts/recorded.json. Parts:

- weight: cores served by grade on fresh fleets of 1 to 20 hosts that are asked for more than they have;
- constrained: the same with models that are spread and replicas that take host memory;
- loads: replicas to load in running fleets of 20 and of 100 hosts where everything wanted fits, though not always
  without moves;
- speed: CPU time at 1000 hosts against a plain first fit, and its growth from 10 hosts on;
- online: cores rejected over a long sequence of arrivals and departures, with at most four moves for each arrival.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.placement_parts import online
from benchmarks.placement_parts.checker import check
from benchmarks.placement_parts.exact import Loads, fewest_loads, most_served
from benchmarks.placement_parts.fleet import Fleet, share_served
from benchmarks.placement_parts.generator import churned, fresh
from benchmarks.placement_parts.plain import first_fit
from benchmarks.placement_parts.planner import arguments, layout
from benchmarks.placement_parts.recorded import recall, record
from benchmarks.placement_parts.timing import cold_ms
from benchmarks.report import Target, finish

SEEDS = 20
RECORDED_SEEDS = 5
ROUNDS = 7
ARRIVALS = 3000
WEIGHT_S = 15.0
"""Limit of one fleet's proof of the weight, all grades together."""

LOADS_S = 20.0
RECORDED_S = 60.0
SIZES = {10: 20, 30: 10, 100: 7, 300: 5, 1000: 5}
"""Hosts, and on how many fleets of so many the growth is measured."""

TARGETS = {
    "weight.worst_share_of_optimum": Target(1.0),
    "weight.median_share_of_optimum": Target(1.0),
    "constrained.median_share_of_optimum": Target(0.995),
    "loads.without_a_place": Target(0, at_least=False),
    "loads.20_hosts_over_optimum": Target(1.05, at_least=False),
    "loads.100_hosts_over_60_s_of_cp_sat": Target(1.0, at_least=False),
    "speed.over_first_fit": Target(3.0, at_least=False),
    "speed.1000_hosts_cpu_ms": Target(100.0, at_least=False),
    "speed.growth_over_n_log_n": Target(1.0, at_least=False),
    "online.rejected_over_first_fit": Target(0.70, at_least=False),
}


def weight(seeds: int, constrained: bool) -> dict[str, float]:
    """Fleets of 1, 2, ... 20 hosts. The share is of the best that CP-SAT found, which is the optimum where proven."""
    name = "constrained" if constrained else "weight"
    print(f"{name}: cores served by grade, plan and CP-SAT")
    shares, least = [], []
    equal = proven = 0
    for seed in (i * SEEDS // seeds for i in range(seeds)):
        fleet = fresh(seed, seed + 1, constrained)
        drawn = layout(arguments(fleet).plan())
        check(fleet, drawn, moves=0)
        ours, best = fleet.served(drawn.placed), most_served(fleet, WEIGHT_S)
        shares.append(share_served(ours, best.served))
        least.append(share_served(ours, best.bounds))
        equal += ours == best.served
        proven += best.proven
        bound = "" if best.proven else f", at most {best.bounds}"
        print(f"  {len(fleet.machines):2d} hosts: {ours} of {best.served}{bound}: {shares[-1]:.4f}", flush=True)
    print(f"  {equal} of {seeds} equal, {proven} proven", flush=True)
    return {
        f"{name}.worst_share_of_optimum": min(shares),
        f"{name}.median_share_of_optimum": statistics.median(shares),
        f"{name}.worst_share_of_bound": min(least),
        f"{name}.equal": equal,
        f"{name}.proven": proven,
        f"{name}.fleets": seeds,
    }


def loads(seeds: int, full: bool) -> dict[str, float]:
    """Fleets of 20 hosts against the optimum, and of 100 hosts against a recorded minute of CP-SAT."""
    few, proven, missing = _loads(seeds, 20, lambda name, fleet: fewest_loads(fleet, LOADS_S))

    def long_run(name: str, fleet: Fleet) -> Loads:
        known = None if full else recall(fleet)
        if known is None:
            known = fewest_loads(fleet, RECORDED_S)
            record(name, fleet, known)
        return known

    many, proven_too, missing_too = _loads(min(seeds, RECORDED_SEEDS), 100, long_run)
    return {
        "loads.without_a_place": missing + missing_too,
        "loads.20_hosts_over_optimum": statistics.median(few),
        "loads.20_hosts_worst": max(few),
        "loads.20_hosts_proven": proven,
        "loads.20_hosts_fleets": len(few),
        "loads.100_hosts_over_60_s_of_cp_sat": statistics.median(many),
        "loads.100_hosts_worst": max(many),
        "loads.100_hosts_proven": proven_too,
        "loads.100_hosts_fleets": len(many),
    }


def _loads(seeds: int, hosts: int, solve: Callable[[str, Fleet], Loads]) -> tuple[list[float], int, int]:
    """Each fleet's loads over the solver's; how many of these are proven; and the replicas without a place."""
    print(f"loads on {hosts} hosts: replicas to load, plan and CP-SAT")
    ratios = []
    proven = missing = 0
    for seed in range(seeds):
        fleet = churned(seed, hosts)
        drawn = layout(arguments(fleet).plan())
        check(fleet, drawn, moves=None)
        new = fleet.replicas - len(fleet.running)
        ours = new + len(drawn.moves)
        best = solve(f"loads {hosts} hosts {seed}", fleet)
        proven += best.proven
        missing += len(drawn.refused)
        ratios.append(ours / best.loads if best.loads else 1.0)
        least = "" if best.proven else f", at least {best.bound}"
        print(
            f"  {seed:2d}: {new} new, {len(drawn.refused)} of them without a place, and {len(drawn.moves)} moved;"
            f" CP-SAT {best.loads}{least} in {best.seconds:.1f} s: {ratios[-1]:.3f}",
            flush=True,
        )
    return ratios, proven, missing


def speed(rounds: int) -> dict[str, float]:
    """Each round is another fleet of 1000 hosts; first fit and plan take turns in being first."""
    print("speed: CPU ms, first fit and plan, without moves and with any number")
    ratios, without, times = [], [], []
    for seed in range(rounds):
        fleet = churned(seed, 1000)
        problem = arguments(fleet)
        order = ("first fit", "plan", "plan without moves")
        took = {}
        for way in order if seed % 2 else reversed(order):
            if way == "first fit":
                took[way], placed = cold_ms(partial(first_fit, problem))
            elif way == "plan":
                took[way], drawn = cold_ms(problem.plan)
                check(fleet, layout(drawn), moves=None)
            else:
                took[way], kept = cold_ms(partial(problem.plan, moves=0))
                check(fleet, layout(kept), moves=0)
        ratios.append(took["plan"] / took["first fit"])
        without.append(took["plan without moves"] / took["first fit"])
        times.append(took["plan"])
        print(
            f"  {seed}: {fleet.replicas} replicas, first fit {took['first fit']:.1f} places {len(placed)}, plan"
            f" {took['plan']:.1f} places {len(drawn.placements)} with {len(drawn.moves)} moves, without moves"
            f" {took['plan without moves']:.1f} places {len(kept.placements)}",
            flush=True,
        )
    return {
        "speed.over_first_fit": statistics.median(ratios),
        "speed.over_first_fit_without_moves": statistics.median(without),
        "speed.1000_hosts_cpu_ms": statistics.median(times),
        "speed.1000_hosts_best_cpu_ms": min(times),
        **growth(),
    }


def growth() -> dict[str, float]:
    """The mean over fleets of the best of three rounds, at each size."""
    print("growth: CPU ms of plan")
    took = {}
    for hosts, fleets in SIZES.items():
        best = []
        for seed in range(fleets):
            problem = arguments(churned(seed, hosts))
            best.append(min(cold_ms(problem.plan)[0] for _ in range(3)))
        took[hosts] = statistics.mean(best)
        print(f"  {hosts:4d} hosts: {took[hosts]:.2f}, {took[hosts] / hosts * 1e3:.0f} us a host", flush=True)
    low, high = min(SIZES), max(SIZES)
    allowed = high * math.log(high) / (low * math.log(low))
    return {
        "speed.growth_over_n_log_n": took[high] / took[low] / allowed,
        **{f"speed.{hosts}_hosts_growth_ms": ms for hosts, ms in took.items() if hosts < high},
    }


def rejections(seeds: int) -> dict[str, float]:
    """The same sequence for first fit, for plan with up to four moves, and for plan without."""
    print(f"online: cores rejected of those asked for, {online.HOSTS} hosts, load {online.LOAD}, {ARRIVALS} arrivals")
    four, none, every, shares = [], [], [], []
    for seed in range(seeds):
        sequence = online.arrivals(seed, ARRIVALS)
        demanded = online.demanded(sequence)
        plain = online.rejected_by_first_fit(sequence)
        moving, still, free = (online.rejected_by_plan(sequence, moves) for moves in (4, 0, None))
        four.append(moving / plain)
        none.append(still / plain)
        every.append(free / plain)
        shares.append(plain / demanded)
        print(
            f"  {seed:2d}: first fit {plain / demanded:.3f}, plan {moving / demanded:.3f}, without moves"
            f" {still / demanded:.3f}, with any number {free / demanded:.3f}",
            flush=True,
        )
    return {
        "online.rejected_over_first_fit": statistics.median(four),
        "online.worst_over_first_fit": max(four),
        "online.without_moves_over_first_fit": statistics.median(none),
        "online.any_moves_over_first_fit": statistics.median(every),
        "online.first_fit_rejects": statistics.median(shares),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.placement")
    parser.add_argument("--full", action="store_true", help="run the solver's minutes anew and record them")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="fleets of each part, instead of 20")
    parts: dict[str, Callable[[], dict[str, float]]] = {
        "weight": lambda: weight(options.seeds, constrained=False),
        "constrained": lambda: weight(options.seeds, constrained=True),
        "loads": lambda: loads(options.seeds, options.full),
        "speed": lambda: speed(min(ROUNDS, options.seeds)),
        "online": lambda: rejections(options.seeds),
    }
    parser.add_argument("--only", choices=parts)
    options = parser.parse_args(arguments)
    measured: dict[str, float] = {}
    for name, part in parts.items():
        if options.only in (None, name):
            measured |= part()
    finish("placement", measured, TARGETS)


if __name__ == "__main__":
    main()
