"""Opens the engine that a replica's configuration names, and lists what it compiles.

An engine's module imports the engine's package, so that it is imported only when it is needed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, cast

from workers.messages.encoder_protocol import EncodeEngine
from workers.messages.engine_protocol import EngineLoadError, GenerateEngine
from workers.messages.replica_config import ReplicaConfig
from workers.neff_cache.compiled_artifacts import Buildable

GENERATING: Mapping[str, str] = MappingProxyType(
    {
        "cpu": "workers.engines.cpu.engine:open_cpu",
        "echo": "workers.engines.echo:open_echo",
        "transformers-neuronx": "workers.engines.transformers_neuronx.engine:open_transformers_neuronx",
        "nxd-inference": "workers.engines.nxd_inference.block_engine:open_neuronx_distributed",
        "optimum-neuron": "workers.engines.optimum_neuron.engine:open_optimum",
    }
)
"""Engine -> the function that opens it, as MODULE:NAME."""

ENCODING: Mapping[str, str] = MappingProxyType(
    {
        "cpu": "workers.engines.encoder.cpu:open_cpu_encoder",
        "echo": "workers.engines.echo:open_echo_encoder",
        "torch-neuronx": "workers.engines.torch_neuronx.engine:open_torch_neuronx",
    }
)

COMPILING: Mapping[str, str] = MappingProxyType(
    {
        "cpu": "workers.engines.cpu.engine:buildables",
        "transformers-neuronx": "workers.engines.transformers_neuronx.engine:buildables",
        "nxd-inference": "workers.engines.nxd_inference.engine:buildables",
        "torch-neuronx": "workers.engines.torch_neuronx.engine:buildables",
        "optimum-neuron": "workers.engines.optimum_neuron.engine:buildables",
    }
)


def hide_progress_bars() -> None:
    """Disable the progress bars of loading and downloading, which fill a log with their intermediate states.

    The variable is for compile processes and for later imports; the call is for transformers before 4.51, which
    ignores the variable.
    """
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    with contextlib.suppress(ImportError):  # which the engine reports itself
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def open_engine(config: ReplicaConfig) -> GenerateEngine:
    """Returns the engine, not loaded yet. Raises EngineLoadError for one that this host does not have."""
    return cast(GenerateEngine, _call(GENERATING, config))


def open_encoder(config: ReplicaConfig) -> EncodeEngine:
    """Returns the engine of a model that does not generate, not loaded yet. Raises EngineLoadError."""
    assert config.model.kind != "generate"
    return cast(EncodeEngine, _call(ENCODING, config, what=f" for kind {config.model.kind}"))


def buildables(config: ReplicaConfig, read: bool) -> list[Buildable]:
    """Returns what a start of ``config`` compiles. With ``read`` False, no weights are read for their digests. Raises
    EngineLoadError."""
    return [] if config.model.engine == "echo" else cast(list[Buildable], _call(COMPILING, config, read))


def _call(table: Mapping[str, str], config: ReplicaConfig, *arguments: object, what: str = "") -> Any:
    if config.model.engine not in table:
        *names, last = table
        message = f"this version has no engine {config.model.engine!r}{what}"
        raise EngineLoadError("engine-not-installed", message, f"use {', '.join(names)} or {last}")
    if config.model.engine != "echo":
        hide_progress_bars()
    module, _, name = table[config.model.engine].partition(":")
    return getattr(import_module(module), name)(config, *arguments)
