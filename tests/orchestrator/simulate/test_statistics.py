"""Means and percentiles of measured values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.simulate.statistics import PERCENTILES, Summary

numbers = st.floats(min_value=-1e9, max_value=1e9)


def test_an_empty_list_has_no_summary() -> None:
    assert Summary.of([]) is None


@settings(deadline=None)
@given(st.lists(numbers, min_size=1, max_size=60))
def test_percentiles_equal_numpys(values: list[float]) -> None:
    """With its default method, linear interpolation; never outside of the values."""
    summary = Summary.of(values)
    assert summary is not None
    for percent in PERCENTILES:
        value = getattr(summary, f"p{percent}")
        assert value == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-6)
        assert min(values) <= value <= max(values)


@settings(deadline=None)
@given(st.lists(numbers, min_size=1, max_size=60))
def test_percentiles_grow(values: list[float]) -> None:
    """p50 <= p90 <= p95 <= p99, whatever the order of the values."""
    summary = Summary.of(values)
    assert summary is not None
    assert summary.p50 <= summary.p90 <= summary.p95 <= summary.p99
    assert summary == Summary.of(values[::-1])
