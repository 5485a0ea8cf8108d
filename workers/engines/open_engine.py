"""Opens the engine that a replica's configuration names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from workers.messages.engine_protocol import EngineLoadError

if TYPE_CHECKING:
    from workers.messages.engine_protocol import GenerateEngine


class EngineConfig(Protocol):
    """The part of a replica's configuration that its engine reads."""

    @property
    def engine(self) -> str: ...
    @property
    def source(self) -> str | None: ...
    @property
    def dtype(self) -> str: ...
    @property
    def slots(self) -> int: ...
    @property
    def max_len(self) -> int: ...
    @property
    def draft_source(self) -> str | None: ...
    @property
    def draft_k(self) -> int: ...
    @property
    def allow_pickle(self) -> bool: ...
    @property
    def trust_remote_code(self) -> bool: ...
    @property
    def engine_options(self) -> Mapping[str, Any]: ...
    @property
    def tp_degree(self) -> int: ...
    @property
    def sampling(self) -> Literal["host", "device"]: ...
    @property
    def prefill_buckets(self) -> Sequence[int]: ...
    @property
    def decode_buckets(self) -> Sequence[int]: ...
    @property
    def quantize(self) -> str | None: ...
    @property
    def quantize_kv(self) -> str | None: ...
    @property
    def group_query_attention(self) -> str | None: ...
    @property
    def fuse_qkv(self) -> bool | None: ...
    @property
    def compile_workers(self) -> int | None: ...
    @property
    def compiled(self) -> str | None: ...


def hide_progress_bars() -> None:
    """Disable the progress bars of loading and downloading, which fill a log with their intermediate states.

    The variable is for compile processes and for later imports; the call is for transformers before 4.51, which
    ignores the variable.
    """
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    with contextlib.suppress(ImportError):  # which the engine reports itself
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def open_engine(config: EngineConfig) -> GenerateEngine:
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
        from workers.engines.nxd_inference.engine import open_neuronx_distributed

        return open_neuronx_distributed(config)
    raise EngineLoadError(
        "engine-not-installed",
        f"this version has no engine {config.engine!r}",
        "use cpu, echo, transformers-neuronx or nxd-inference",
    )
