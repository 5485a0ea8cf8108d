"""How many requests are answered in time when many models share the cores: corewright's autoscaler and three rivals.

    .venv/bin/python -m benchmarks.scaling [--tuning] [--seeds FIRST-LAST] [--traces NAME,...]

48 models of tp 2, 4 and 8 on 8 and on 12 emulated inf2.48xlarge, five kinds of traces, ten seeds each. Everyone is run
by production's planner and router on the simulator's virtual clock, and begins with the same replicas. The numbers of
the rules were chosen on seeds 0 to 9 (``--tuning``), without the trace `drift`; judged are seeds 100 to 109.

- static split: replicas in proportion to the mean work of each model in the long run
- Ray Serve's policy and Knative's pod autoscaler (KPA) at their defaults, from their documentation
  (benchmarks/scaling_parts/rivals.py)
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from benchmarks.report import Target, finish
from benchmarks.scaling_parts.runs import OURS, RIVALS, Result, Run, run
from benchmarks.scaling_parts.traces import HELD_OUT, TUNED

HOSTS = (8, 12)
TUNING, JUDGED = "0-9", "100-109"
PROCESSES = 2


def main() -> None:
    """Run all, print a table, and the last line."""
    options = _options()
    first, _, last = (TUNING if options.tuning else options.seeds).partition("-")
    seeds = range(int(first), int(last or first) + 1)
    kinds = TUNED if options.tuning else tuple(options.traces.split(","))
    everyone = (OURS, *RIVALS)
    runs = [
        Run(kind, hosts, seed, policy) for kind in kinds for hosts in HOSTS for seed in seeds for policy in everyone
    ]
    began = time.monotonic()
    with ProcessPoolExecutor(PROCESSES) as pool:
        results = dict(zip(runs, pool.map(run, runs), strict=True))
    print(f"{len(runs)} runs in {time.monotonic() - began:.0f} s", file=sys.stderr)
    measured, targets = _judge(results, kinds)
    _print_table(results, kinds)
    finish("scaling", measured, targets)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tuning", action="store_true", help="seeds 0-9, without the trace that is kept out of tuning")
    parser.add_argument("--seeds", default=JUDGED, metavar="FIRST-LAST")
    parser.add_argument("--traces", default=",".join((*TUNED, HELD_OUT)), metavar="NAME,...")
    return parser.parse_args()


def _of(results: dict[Run, Result], kind: str, hosts: int, policy: str) -> list[Result]:
    return [item for what, item in results.items() if (what.kind, what.hosts, what.policy) == (kind, hosts, policy)]


def _attained(results: dict[Run, Result], kind: str, hosts: int, policy: str) -> float:
    """Per cent, the mean of the seeds."""
    return 100.0 * statistics.mean(result.attained for result in _of(results, kind, hosts, policy))


def _loads(results: dict[Run, Result], policy: str) -> int:
    return sum(item.loads for what, item in results.items() if what.policy == policy)


def _judge(results: dict[Run, Result], kinds: Sequence[str]) -> tuple[dict[str, float], dict[str, Target]]:
    """How far we are above the best rival of each trace, in points; and the starts, over those of KPA."""
    measured: dict[str, float] = {}
    targets: dict[str, Target] = {}
    for kind in kinds:
        for hosts in HOSTS:
            metric = f"{kind}_{hosts}_hosts_points_above_best"
            best = max(_attained(results, kind, hosts, policy) for policy in RIVALS)
            measured[metric] = _attained(results, kind, hosts, OURS) - best
            targets[metric] = Target(10.0 if (kind, hosts) == ("onoff", 12) else -2.0)
    measured["loads_over_kpa"] = _loads(results, OURS) / max(1, _loads(results, "KPA"))
    targets["loads_over_kpa"] = Target(0.3, at_least=False)
    return measured, targets


def _print_table(results: dict[Run, Result], kinds: Sequence[str]) -> None:
    """SLO attainment in per cent, and the starts of a run, both as means of the seeds."""
    everyone = (OURS, *RIVALS)
    print("| trace | hosts | " + " | ".join(everyone) + " | starts: " + " | ".join(everyone) + " |")
    print("|---" * (2 + 2 * len(everyone)) + "|")
    for kind in kinds:
        for hosts in HOSTS:
            parts = [f"{_attained(results, kind, hosts, policy):.1f}" for policy in everyone]
            parts += [
                f"{statistics.mean(result.loads for result in _of(results, kind, hosts, policy)):.0f}"
                for policy in everyone
            ]
            print(f"| {kind} | {hosts} | " + " | ".join(parts) + " |")


if __name__ == "__main__":
    main()
