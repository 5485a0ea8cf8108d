"""Makes a fork of a warm process the same as a fresh process that has imported the same packages.

Which variables they read when is listed in docs/engines.md; `fork_server.refusal` refuses the forks that no adjustment
makes the same.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

imported: frozenset[str] = frozenset()
"""The modules that this process has from the warm process; empty in a fresh process."""


def adjust(environment: Mapping[str, str]) -> None:
    """Applies the environment in a new fork. Python's own random numbers and tempfile's folder need nothing."""
    os.environ.clear()
    os.environ.update(environment)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else all forks would draw the same numbers
    if "torch" in sys.modules:
        sys.modules["torch"].seed()


def use_threads() -> None:
    """Applies OMP_NUM_THREADS in a fork. To be called in each thread that computes: OpenMP has read the variable when
    torch was imported, and ``set_num_threads`` changes OpenMP's number for the calling thread only."""
    if "torch" in imported and (threads := os.environ.get("OMP_NUM_THREADS")):
        sys.modules["torch"].set_num_threads(int(threads))
