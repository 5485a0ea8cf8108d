"""The record of how a worker runs one engine, which each engine's folder has as ``RUNNER`` of its module `runner`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workers.compiled.host_sets import Buildable
from workers.messages.encoder_protocol import EncodeEngine
from workers.messages.engine_protocol import GenerateEngine
from workers.messages.replica_config import ReplicaConfig

if TYPE_CHECKING:
    from workers.engines.server.server_process import CompletionServer


@dataclass(frozen=True, kw_only=True)
class Runner:
    """What a worker does with an engine. Each function may raise EngineLoadError; None: the engine has no such part."""

    generate: Callable[[ReplicaConfig], GenerateEngine] | None = None  # returns the engine, not loaded yet
    encode: Callable[[ReplicaConfig], EncodeEngine] | None = None  # the same, of the other kinds
    # Starts a server, and returns when it is ready; the descriptors stay open until its last process has ended.
    serve: Callable[[ReplicaConfig, Iterable[int]], CompletionServer] | None = None
    # What a start compiles; False: no weights are read for their digests.
    buildables: Callable[[ReplicaConfig, bool], list[Buildable]] | None = None
    # Checks beyond the files what a start needs except cores; None: ``buildables`` does.
    check: Callable[[ReplicaConfig], None] | None = None
    warm_imports: tuple[str, ...] = ()  # modules that a warm process imports after the libraries
