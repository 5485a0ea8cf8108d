"""What an engine compiles for a model, told without compiling it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from workers.messages.replica_config import ReplicaConfig
from workers.neff_cache.compiled_artifacts import Entry


def compiles(config: ReplicaConfig) -> bool:
    """Whether its engine compiles anything that is kept."""
    return config.engine != "echo" and (config.engine != "cpu" or bool(config.engine_options.get("compile")))


Tell = Callable[[int, int], None]
"""How many graphs are compiled, of how many."""


def _always(path: Path) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Buildable:
    """One set of compiled artifacts that a start looks for."""

    role: Literal["model", "draft"] = "model"
    source: Path  # the folder of the checkpoint
    manifest: Mapping[str, Any]  # all that they depend on, as JSON
    is_whole: Callable[[Path], bool] = _always  # of an entry, what its manifest alone does not tell
    # Compile into an entry that is held alone, and finish it; None: only a start can, on its cores.
    make: Callable[[Entry, Tell], None] | None = None
    kept: bool = True  # False: the package's own cache is all that keeps them
    unread: tuple[str, ...] = ()  # files whose digests the manifest wants, and which nobody has read yet
