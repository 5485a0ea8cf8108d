"""Finds the runner of the engine that a replica's configuration names, and opens the engine."""

from __future__ import annotations

import contextlib
import os
from importlib import import_module

from placements.engines.registry import ENGINES
from workers.compiled.host_sets import Buildable
from workers.engines.runner import Runner
from workers.messages.encoder_protocol import EncodeEngine
from workers.messages.engine_protocol import EngineLoadError, GenerateEngine
from workers.messages.replica_config import ReplicaConfig


def runner_of(engine: str) -> Runner:
    """Returns the runner of an engine of the registry, whose package is imported only when the engine is opened."""
    runner: Runner = import_module(f"workers.engines.{ENGINES[engine].module}.runner").RUNNER
    return runner


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
    generate = runner_of(config.model.engine).generate
    if generate is None:
        raise _unable(config)
    _prepare(config)
    return generate(config)


def open_encoder(config: ReplicaConfig) -> EncodeEngine:
    """Returns the engine of a model that does not generate, not loaded yet. Raises EngineLoadError."""
    assert config.model.kind != "generate"
    encode = runner_of(config.model.engine).encode
    if encode is None:
        raise _unable(config)
    _prepare(config)
    return encode(config)


def buildables(config: ReplicaConfig, read: bool) -> list[Buildable]:
    """Returns what a start of ``config`` compiles. With ``read`` False, no weights are read for their digests. Raises
    EngineLoadError."""
    build = runner_of(config.model.engine).buildables
    _prepare(config)
    return [] if build is None else build(config, read)


def _prepare(config: ReplicaConfig) -> None:
    if ENGINES[config.model.engine].imports_long:
        hide_progress_bars()


def _unable(config: ReplicaConfig) -> EngineLoadError:
    *names, last = (name for name, engine in ENGINES.items() if config.model.kind in engine.kinds)
    message = f"the engine {config.model.engine} does not serve models of kind {config.model.kind}"
    return EngineLoadError("engine-not-installed", message, f"use {', '.join(names)} or {last}")
