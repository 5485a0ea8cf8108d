"""Parameters of which some belong to the fast tests and the others to the slow ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def everyday(values: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Returns ``values`` as parameters; those outside ``fast`` are slow tests. Raises ValueError for an unknown one."""
    values = list(values)
    if unknown := [value for value in fast if value not in values]:
        raise ValueError(f"{unknown} are not among {values}")
    parameters = []
    for value in values:
        arguments = value if isinstance(value, tuple) else (value,)
        parameters.append(pytest.param(*arguments, marks=[] if value in fast else [pytest.mark.slow]))
    return parameters
