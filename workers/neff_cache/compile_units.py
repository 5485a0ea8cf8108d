"""Describes what an engine would compile for a model, without compiling it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from workers.messages.replica_config import ReplicaConfig
from workers.neff_cache.compiled_artifacts import LockedEntry, always


def compiles(config: ReplicaConfig) -> bool:
    """Returns whether the config's engine compiles artifacts that are kept."""
    if config.engine == "cpu":
        return bool(config.engine_options.get("compile"))
    if config.engine == "vllm":
        return config.claims is None  # on emulated hosts, its CPU back end compiles nothing
    return config.engine != "echo"


Tell = Callable[[int, int], None]
"""Reports progress: compiled graphs, total graphs."""


@dataclass(frozen=True, kw_only=True)
class Buildable:
    """A set of compiled artifacts that a start needs."""

    role: Literal["model", "draft"] = "model"
    source: Path  # checkpoint folder
    manifest: Mapping[str, Any]  # everything the artifacts depend on, as JSON
    is_whole: Callable[[Path], bool] = always  # further check of an entry's completeness
    # Compiles into an exclusively locked entry and finishes it; None: only a start can compile, on its cores.
    make: Callable[[LockedEntry, Tell], None] | None = None
    kept: bool = True  # False: kept by the package's own cache only
    unread: tuple[str, ...] = ()  # files that must be read for their digests in the manifest
