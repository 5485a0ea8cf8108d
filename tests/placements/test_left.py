"""Values of a spec that were removed."""

from __future__ import annotations

import pytest

from placements.spec.left import LEFT
from placements.spec.parse import parse


@pytest.mark.parametrize("line", LEFT)
def test_a_removed_value_names_what_to_use_instead(line: str) -> None:
    """At its place, and not as an unknown value."""
    field, _, value = line.partition(": ")
    outer, _, inner = field.partition(".")
    text = f"models: {{chat: {{engine: echo, {outer}: {{{inner}: {value}}}}}}}\n"

    (problem,) = parse(text, "fleet.yaml").problems
    assert (problem.id, problem.severity, problem.what) == ("value-removed", "error", f"{line} was removed")
    assert (problem.hint, problem.where) == (LEFT[line], f"fleet.yaml:1:{text.index(inner) + 1}")
