"""The weights of a forecast's estimates, learned from how well each has predicted the fleet's demand. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PRIOR = (0.24, 0.16, 0.08, 0.26, 0.20, 0.06)
"""Weights before anything was predicted: of the averages over 30, 120, 600 and 3600 s, the spells and the peak."""

PRIOR_PREDICTIONS = 10.0  # weight of PRIOR, in predictions
PREDICTIONS = 400  # that are remembered, of all models together
PASSES = 2  # of the search for the best weights, whenever there is a new prediction

Likelihoods = tuple[float, ...]
"""The likelihood of the arrivals of a window by each estimate, relative to the best of them."""


@dataclass(frozen=True)
class EstimateWeights:
    """The weights with which a mixture of the estimates predicts best (expectation maximization)."""

    predictions: tuple[Likelihoods, ...] = ()
    weights: tuple[float, ...] = PRIOR

    def after(self, judged: Iterable[Likelihoods]) -> EstimateWeights:
        """Returns the weights with further predictions."""
        new = tuple(judged)
        if not new:
            return self
        predictions = (*self.predictions, *new)[-PREDICTIONS:]
        weights = self.weights
        for _ in range(PASSES):
            weights = _improved(weights, predictions)
        return EstimateWeights(predictions, weights)


def _improved(weights: Sequence[float], predictions: Sequence[Likelihoods]) -> tuple[float, ...]:
    """Returns the mean share of each estimate in the predictions, beginning with PRIOR."""
    sums = [PRIOR_PREDICTIONS * weight for weight in PRIOR]
    for likelihoods in predictions:
        parts = [weight * likelihood for weight, likelihood in zip(weights, likelihoods, strict=True)]
        total = sum(parts)
        for i, part in enumerate(parts):
            sums[i] += part / total
    total = len(predictions) + PRIOR_PREDICTIONS
    return tuple(each / total for each in sums)


def likelihoods(count: int, expected: Sequence[float], dispersion: float) -> Likelihoods:
    """Returns the likelihoods of so many arrivals, where each estimate expected another number.

    Counts have a negative binomial distribution with that variance over mean.
    """
    logs = [_log_likelihood(count, max(mean, 1e-3), max(dispersion, 1.05)) for mean in expected]
    best = max(logs)
    return tuple(math.exp(each - best) for each in logs)


def _log_likelihood(count: int, mean: float, dispersion: float) -> float:
    """Without the terms that are the same for every mean."""
    size = mean / (dispersion - 1.0)
    return math.lgamma(count + size) - math.lgamma(size) - size * math.log(dispersion)
