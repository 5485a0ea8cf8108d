"""Compares the hot paths' CPU time of the working tree with that of a commit, alternately on one machine.

    make bench-check                      # against HEAD~1
    make bench-check BASE=ac092cd
    .venv/bin/python -m benchmarks.check --base REV [--only gateway] [--rounds 3]

The commit is checked out into a temporary git worktree. Each round runs `benchmarks.costs` once in each of the two,
alternating which one runs first; a commit from before `benchmarks.costs` runs the working tree's copy of it. Ratios are
the working tree's figure over the commit's, medians of the rounds. More than LIMIT is a miss, and the exit status is 1.
About 10 minutes with three rounds and all parts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.report import Target, finish

ROOT = Path(__file__).parent.parent
LIMIT = 1.05
COSTS = Path("benchmarks") / "costs.py"
REFERENCE = "gateway.bare_us"  # does not depend on the product


@contextlib.contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """A temporary worktree of ``revision``. Raises CalledProcessError when git does not know it."""
    with tempfile.TemporaryDirectory(prefix="cwc-", dir="/tmp") as folder:
        tree = Path(folder) / "base"
        subprocess.run(["git", "worktree", "add", "--detach", "--quiet", tree, revision], cwd=ROOT, check=True)
        try:
            if not (tree / COSTS).exists():
                shutil.copy(ROOT / COSTS, tree / COSTS)
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def costs(tree: Path, parts: Sequence[str]) -> dict[str, float]:
    """The figures of one checkout. Raises RuntimeError with the end of its output when it fails."""
    only = [argument for part in parts for argument in ("--only", part)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.costs", *only], cwd=tree, env=environment, capture_output=True, text=True
    )
    if run.returncode:
        raise RuntimeError(f"benchmarks.costs failed in {tree}:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    results = json.loads(run.stdout.strip().splitlines()[-1])["results"]
    return {name: result["value"] for name, result in results.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="HEAD~1", help="the commit to compare with [default: HEAD~1]")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, each of which runs both [default: 3]")
    parser.add_argument("--only", action="append", default=[], help="a part of benchmarks.costs; may be repeated")
    arguments = parser.parse_args()
    measured: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with checked_out(arguments.base) as base:
        for number in range(arguments.rounds):
            figures = {}
            for tree in (base, ROOT) if number % 2 == 0 else (ROOT, base):
                figures[tree] = costs(tree, arguments.only)
            for name, before in figures[base].items():
                after = figures[ROOT][name]
                measured[name].append((before, after))
                print(f"{number + 1}: {name:<22} {before:10.2f} -> {after:10.2f}  {after / before:.3f}", flush=True)
    ratios = {name: statistics.median(after / before for before, after in pairs) for name, pairs in measured.items()}
    targets = {f"{name}_over_base": Target(LIMIT, at_least=False) for name in ratios if name != REFERENCE}
    finish("check", {f"{name}_over_base": ratio for name, ratio in ratios.items()}, targets)
    return int(any(ratio > LIMIT for name, ratio in ratios.items() if name != REFERENCE))


if __name__ == "__main__":
    sys.exit(main())
