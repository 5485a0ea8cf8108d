"""The engines, each in a module that imports its libraries only when it is opened."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from workers.messages.engine_protocol import EngineLoadError

if TYPE_CHECKING:
    from workers.messages.engine_protocol import GenerateEngine

CPU_PACKAGES = "python -m pip install torch safetensors numpy, in the Python of the replica"


class EngineConfig(Protocol):
    """What of a replica's configuration concerns its engine."""

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
    """Of loading and downloading: in a log each of their states is a line, or one line of a thousand states.

    The variable is for the processes that compile, and for whatever is imported later; the call is for transformers
    before 4.51, which reads none.
    """
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    with contextlib.suppress(ImportError):  # which the engine tells in its own words
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def open_engine(config: EngineConfig) -> GenerateEngine:
    """The engine, not loaded yet. Raises EngineLoadError for one that this host does not have."""
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
