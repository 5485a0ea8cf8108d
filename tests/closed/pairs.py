"""Combinations of options that contain each possible pair of values."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
TRIES = 200  # random rows that are compared for each one taken


def all_pairs(options: Mapping[str, Sequence[Any]], is_allowed: Callable[[Row], bool], seed: int = 1) -> list[Row]:
    """Returns rows of one value for each option, so that each pair of values that an allowed row can have is in one.

    Values are compared by ``repr``. The same arguments give the same rows.
    """
    rng = random.Random(seed)
    missing = {
        frozenset({(name, repr(value)), (other, repr(other_value))})
        for (name, values), (other, other_values) in itertools.combinations(options.items(), 2)
        for value in values
        for other_value in other_values
    }
    rows: list[Row] = []
    while missing:
        pair = dict(min(missing, key=sorted))
        best: Row | None = None
        for _ in range(TRIES):
            row = {
                name: next((value for value in values if repr(value) == pair.get(name)), None)
                if name in pair
                else rng.choice(values)
                for name, values in options.items()
            }
            if is_allowed(row) and (best is None or len(_pairs(row) & missing) > len(_pairs(best) & missing)):
                best = row
        if best is None:  # no allowed row has it
            missing.discard(frozenset(pair.items()))
            continue
        missing -= _pairs(best)
        rows.append(best)
    return rows


def _pairs(row: Row) -> set[frozenset[tuple[str, str]]]:
    return {frozenset(pair) for pair in itertools.combinations([(name, repr(row[name])) for name in row], 2)}
