"""How long property tests search: `EXAMPLES=300` is at least so many examples of each, as `make test SLOW=1` does."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

EXAMPLES = int(os.environ.get("EXAMPLES", "0"))
USUAL = 50


def search(usual: int = USUAL, *, cost: int = 1, **options: Any) -> settings:
    """Returns the settings of a property test.

    ``usual``: the examples of an everyday run. ``cost``: how many times longer an example takes than a usual one; the
    test gets that part of EXAMPLES.
    """
    return settings(max_examples=max(usual, EXAMPLES // cost), **options)
