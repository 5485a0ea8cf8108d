"""Tests of what the forecast learns: the arrivals within spells, and the weights of the estimates."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from orchestrator.scaling.forecast import PREDICTIONS, PRIOR, EstimateWeights, History, Load, Spells, likelihoods

SPELL = 4  # the estimate of the spells


def spells(arrivals: Iterable[int], known: Spells | None = None, at: float = 0.0) -> Spells:
    """So many arrivals in each second from ``at`` on."""
    known = known or Spells()
    for second, arrived in enumerate(arrivals, 1):
        known = known.after(at + second, 1.0, arrived)
    return known


def history(rate: Callable[[int], int], seconds: int = 3600, models: int = 4) -> History:
    """Reports every 5 s, with the arrivals that ``rate`` has for the second."""
    known = History()
    for now in range(5, seconds + 5, 5):
        known = known.after(float(now), {f"chat-{i}": Load(5.0, arrived=rate(now + 150 * i)) for i in range(models)})
    return known


def test_a_returning_model_is_expected_to_have_the_arrivals_of_its_earlier_spells() -> None:
    """Its first request is enough, whatever the silence between has done to the averages."""
    known = spells([2] * 300 + [0] * 600)
    assert known.rate(900.0) == 0.0
    assert spells([1], known, 900.0).rate(901.0) == pytest.approx(2.0, rel=0.1)


def test_a_spell_lasts_through_pauses_of_a_minute() -> None:
    known = spells([1] * 60 + [0] * 60)
    assert known.rate(120.0) > 0.0
    assert spells([0], known, 120.0).rate(121.0) == 0.0


def test_the_first_arrivals_of_a_model_make_no_forecast() -> None:
    assert spells([4]).rate(1.0) == pytest.approx(4 / 16)


def test_the_weights_of_estimates_sum_to_one() -> None:
    assert sum(PRIOR) == pytest.approx(1.0)
    assert sum(history(lambda now: 5).learned.weights) == pytest.approx(1.0)


def test_an_estimate_that_predicts_well_gains_weight() -> None:
    """Those of the others shrink, but never to zero: the prior remains."""
    judged = [likelihoods(12, (12.0, 2.0, 2.0, 2.0, 2.0, 2.0), 1.5)] * 100
    weights = EstimateWeights().after(judged).after(judged).after(judged).weights
    assert weights[0] > 0.9
    assert min(weights) > 0.0


def test_only_the_last_predictions_count() -> None:
    """A fleet whose demand changes learns again."""
    first = likelihoods(12, (12.0, 2.0, 2.0, 2.0, 2.0, 2.0), 1.5)
    second = likelihoods(12, (2.0, 12.0, 2.0, 2.0, 2.0, 2.0), 1.5)
    weights = EstimateWeights().after([first] * PREDICTIONS)
    for _ in range(3):
        weights = weights.after([second] * PREDICTIONS)
    assert weights.weights[1] > 0.9


def test_demand_in_spells_gives_weight_to_the_estimate_of_spells() -> None:
    """With steady demand the averages are as good, and keep theirs."""
    off_and_on = history(lambda now: 10 if now % 600 < 200 else 0).learned.weights
    steady = history(lambda now: 5 if now % 10 else 0).learned.weights
    assert off_and_on[SPELL] > 0.5 > steady[SPELL]


def test_a_model_without_requests_teaches_nothing() -> None:
    assert history(lambda now: 0).learned.weights == PRIOR
