"""The plots of an HTML page."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.simulate.plots import distribution, ticks


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
