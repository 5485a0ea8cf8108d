"""The cores that each model held over the time of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from orchestrator.simulate.simulated_fleet import Change
from placements.facts.core_range import CoreRange


@dataclass(frozen=True)
class Timeline:
    """Mean cores by model in bins of equal width, including loading and draining replicas."""

    width_s: float
    cores: dict[str, list[float]]


def timeline(changes: Iterable[Change], models: Sequence[str], seconds: float, bins: int) -> Timeline:
    """Returns the timeline of a run of ``seconds``."""
    width = max(seconds, 1e-9) / bins
    cores: dict[str, list[float]] = {model: [0.0] * bins for model in models}
    since: dict[tuple[str, int], float] = {}
    sizes: dict[tuple[str, int], int] = {}
    for change in changes:
        id = change.model, change.replica
        if change.what == "start":
            since[id] = change.at
            sizes[id] = len(CoreRange.parse(change.cores)) if change.cores else 0
        elif change.what == "end":
            _spread(cores[change.model], since.pop(id), change.at, sizes[id], width)
    for (model, replica), began in since.items():
        _spread(cores[model], began, seconds, sizes[model, replica], width)
    return Timeline(width, cores)


def _spread(bins: list[float], began: float, ended: float, cores: int, width: float) -> None:
    first, last = int(began / width), min(int(ended / width), len(bins) - 1)
    for i in range(first, last + 1):
        share = min(ended, (i + 1) * width) - max(began, i * width)
        bins[i] += cores * max(0.0, share) / width


BARS = " ▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], most: float) -> str:
    """Returns one character per value; every value above 0 is visible."""
    steps = len(BARS) - 1
    return "".join(
        BARS[0] if value <= 1e-9 else BARS[max(1, min(steps, round(value / (most or 1.0) * steps)))] for value in values
    )
