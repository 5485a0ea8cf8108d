"""The figures and the plots of a report."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.simulate.page import areas, distribution, ticks
from orchestrator.simulate.report import PERCENTILES, Summary, sparkline, timeline
from orchestrator.simulate.simulated_fleet import Change, SimulatedPhase
from placements.facts.core_range import CoreRange
from placements.planner.placement import Placement

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


def test_the_areas_of_a_plot_are_stacked() -> None:
    """The upper one starts where the lower one ends."""
    picture = ElementTree.fromstring(
        areas({"a": [1.0], "b": [2.0]}, 10.0, "cores", 4.0).partition("</svg>")[0] + "</svg>"
    )
    low, high = (
        [tuple(map(float, point.split(","))) for point in str(polygon.get("points")).split()]
        for polygon in picture.findall("polygon")
    )
    assert low[:2] == high[:1:-1]
    assert low[0][1] - high[0][1] == pytest.approx(2 * (low[2][1] - low[0][1]), abs=0.2)


def test_a_timeline_divides_held_cores_over_its_bins() -> None:
    """A replica that runs to the end, and one that ends within a bin; and the plot."""
    a, b = (Placement(name, 0, "h", CoreRange.parse(cores), 1) for name, cores in (("a", "0-7"), ("b", "8")))
    changes = [
        Change(0.0, a, SimulatedPhase.LOADING),
        Change(5.0, b, SimulatedPhase.LOADING),
        Change(15.0, b, SimulatedPhase.GONE),
    ]
    assert timeline(changes, ["a", "b"], 20.0, 2) == {"a": [8.0, 8.0], "b": [0.5, 0.5]}
    assert sparkline([0.0, 0.01, 4.0, 8.0], 8.0) == " ▁▄█"


@example([5e-324], None)
@settings(deadline=None)
@given(st.lists(st.floats(0, 1e7), max_size=300), st.none() | st.floats(0.001, 1e6))
def test_a_distribution_stays_within_its_frame(values: list[float], bound: float | None) -> None:
    """For any data."""
    plot = distribution(values, bound)
    ElementTree.fromstring(plot)
    for points in re.findall(r'points="([^"]*)"', plot):
        for pair in points.split():
            x, y = (float(part) for part in pair.split(","))
            assert 0 <= x <= 460
            assert 0 <= y <= 240


@settings(deadline=None)
@given(st.floats(1e-6, 1e9))
def test_ticks_are_few_and_within_the_range(top: float) -> None:
    """From 0 on."""
    values = ticks(top)
    assert values[0] == 0
    assert values[-1] <= top * 1.0001
    assert 4 <= len(values) <= 11
