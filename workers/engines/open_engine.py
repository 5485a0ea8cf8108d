"""Opens the engine that a replica's configuration names."""

from __future__ import annotations

import contextlib
import os

from workers.messages.encoder_protocol import EncodeEngine
from workers.messages.engine_protocol import EngineLoadError, GenerateEngine
from workers.messages.replica_config import ReplicaConfig


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
    if config.engine != "echo":
        hide_progress_bars()
    if config.engine == "echo":
        from workers.engines.echo import EchoEngine

        step_ms = float(config.engine_options.get("step_ms", 0))
        return EchoEngine(slots=config.slots, max_len=config.max_len, step_ms=step_ms)
    if config.engine == "cpu":
        from workers.engines.cpu.engine import open_cpu

        return open_cpu(config)
    if config.engine == "transformers-neuronx":
        from workers.engines.transformers_neuronx.engine import open_transformers_neuronx

        return open_transformers_neuronx(config)
    if config.engine == "nxd-inference":
        from workers.engines.nxd_inference.block_engine import open_neuronx_distributed

        return open_neuronx_distributed(config)
    if config.engine == "optimum-neuron":
        from workers.engines.optimum_neuron.engine import open_optimum

        return open_optimum(config)
    raise EngineLoadError(
        "engine-not-installed",
        f"this version has no engine {config.engine!r}",
        "use cpu, echo, transformers-neuronx, nxd-inference or optimum-neuron",
    )


def open_encoder(config: ReplicaConfig) -> EncodeEngine:
    """Returns the engine of a model that does not generate, not loaded yet. Raises EngineLoadError."""
    assert config.kind != "generate"
    if config.engine == "echo":
        from workers.engines.encoder.echo import WIDTH, EchoEncoder

        step_ms = float(config.engine_options.get("step_ms", 0))
        width = 1 if config.kind == "rerank" else WIDTH
        return EchoEncoder(rows=config.slots, max_len=config.max_len, width=width, step_ms=step_ms)
    if config.engine == "cpu":
        from workers.engines.encoder.cpu import open_cpu_encoder

        hide_progress_bars()
        return open_cpu_encoder(config)
    if config.engine == "torch-neuronx":
        from workers.engines.torch_neuronx.engine import open_torch_neuronx

        hide_progress_bars()
        return open_torch_neuronx(config)
    what = f"this version has no engine {config.engine!r} for kind {config.kind}"
    raise EngineLoadError("engine-not-installed", what, "use cpu, echo or torch-neuronx")
