"""The buckets in which gateways count latencies, and percentiles of such counts."""

from __future__ import annotations

from collections.abc import Sequence

# Bounds of vLLM v1 (`vllm/v1/metrics/loggers.py`), in seconds.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
# The first three are not vLLM's: a small model on a NeuronCore is faster than vLLM's first bound.
TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)


def percentile(counts: Sequence[int], bounds: Sequence[float], percent: float) -> float | None:
    """Returns the percentile of observations that are counted by bucket; None without any.

    As `histogram_quantile` of Prometheus: linear within a bucket, and the last bound for what is above all of them.
    """
    rank = sum(counts) * percent / 100
    if rank == 0:
        return None
    below = 0.0
    for place, upper in enumerate(bounds):
        count = counts[place]
        if below + count >= rank:
            lower = bounds[place - 1] if place else 0.0
            return lower + (upper - lower) * (rank - below) / count
        below += count
    return bounds[-1]
