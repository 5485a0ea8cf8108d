"""How a benchmark ends: one line of JSON, the last of stdout and stderr together."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """What a metric should be at least (``at_least``) or at most."""

    value: float
    at_least: bool = True

    def met(self, measured: float) -> bool:
        return measured >= self.value if self.at_least else measured <= self.value


def finish(benchmark: str, measured: dict[str, float], targets: dict[str, Target]) -> None:
    """Print the last line; a metric without a target is information."""
    results = {}
    for metric, value in measured.items():
        target = targets.get(metric)
        results[metric] = {
            "value": round(value, 4),
            "target": None if target is None else target.value,
            "met": None if target is None else target.met(value),
        }
    sys.stderr.flush()
    print(json.dumps({"benchmark": benchmark, "results": results}), flush=True)
