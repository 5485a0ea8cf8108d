"""How tables show numbers."""

from __future__ import annotations

import pytest

from orchestrator.process.text_table import three_digits


@pytest.mark.parametrize(
    ("value", "shown"), [(3617.2, "3620"), (1_234_567.0, "1230000"), (266.4, "266"), (20.0, "20"), (0.0123, "0.0123")]
)
def test_a_number_has_three_digits_and_no_exponent(value: float, shown: str) -> None:
    """Three significant ones."""
    assert three_digits(value) == shown
