"""Optimum Neuron's adapter, opened for the usual traffic."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.doubles import forget
from tests.workers.nxdi_traffic import replica_config
from workers.engines.optimum_neuron import artifacts
from workers.engines.optimum_neuron.engine import OptimumEngine
from workers.engines.optimum_neuron.settings import OptimumSettings
from workers.messages.replica_config import ReplicaConfig


def config_of(source: Path, compiled: Path | None, **fields: Any) -> ReplicaConfig:
    """The configuration of a replica with 4 slots of 96 tokens in float32, on two cores."""
    usual = {"engine": "optimum-neuron", "prefill_buckets": [], "decode_buckets": []}
    return replica_config(source, compiled, **(usual | fields))


def opened(source: Path, compiled: Path | None, kind: Any = OptimumEngine, **fields: Any) -> Any:
    """A loaded adapter, or a mutant of it."""
    engine = kind(OptimumSettings.of(config_of(source, compiled, **fields)), compiled)
    engine.load()
    return engine


def export_here(settings: OptimumSettings, entry: Any) -> None:
    """Instead of a process of its own, which takes seconds to start."""
    artifacts.export_here(settings, entry.path)


def play(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """The stand-in of that version is installed."""
    real = metadata.version
    monkeypatch.setenv("NEURON_DOUBLE_OPTIMUM_VERSION", version)
    monkeypatch.setattr(metadata, "version", lambda name: version if name == "optimum-neuron" else real(name))
    forget("optimum")
