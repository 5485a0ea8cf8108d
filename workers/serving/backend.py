"""Opens what answers a replica's requests: a batcher over an engine, or a relay to a server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from placements.facts.engines import SERVER_ENGINES
from workers.batching.batcher import Batcher
from workers.batching.batcher_stats import BatcherStats
from workers.batching.encode_batcher import EncodeBatcher
from workers.engines.checkpoint_files import contents_of
from workers.engines.open_engine import open_encoder, open_engine
from workers.host.core_claims import CoreClaim
from workers.host.start_phases import START
from workers.messages.engine_protocol import EngineLoadError, EngineSpec
from workers.messages.replica_config import ReplicaConfig
from workers.messages.requests import GenerateRequest, TokenEvent
from workers.text.tokenizer import load_tokenizer


class Backend(Protocol):
    """The methods of `Batcher`, `EncodeBatcher` and `CompletionRelay` that their users call; see there."""

    @property
    def spec(self) -> EngineSpec: ...
    @property
    def stats(self) -> BatcherStats: ...
    def submit(self, request: GenerateRequest) -> None: ...
    def cancel(self, id: str) -> None: ...
    def taken(self, id: str, count: int) -> None: ...
    def drain(self, timeout_s: float = 0.0) -> bool: ...
    def close(self) -> None: ...
    def warm_guides(self) -> None: ...
    def run(self, after_step: Callable[[], None] = lambda: None) -> None: ...


def local_contents(config: ReplicaConfig) -> str:
    """Returns the fingerprint of the local folders that a replica loads; "" without any. Raises EngineLoadError if it
    is not that of the other replicas of its version."""
    folders = [Path(folder) for folder in config.local_folders()]
    contents = contents_of(folders) if folders else ""
    if config.contents not in ("", contents):
        what = f"the files in {' and '.join(map(str, folders))} have changed since {config.model} loaded them here"
        hint = f"load them with corewright rollout restart {config.model}, or put the former files back"
        raise EngineLoadError("source-changed", what, hint)
    return contents


def open_backend(config: ReplicaConfig, claim: CoreClaim | None, emit: Callable[[list[TokenEvent]], None]) -> Backend:
    """Loads the model and returns the backend, whose ``run`` is still to be called on a thread of its own. ``claim``
    stays held while a process of the backend lives. Raises EngineLoadError."""
    if config.engine in SERVER_ENGINES:
        from workers.servers.completion_relay import CompletionRelay

        held = () if claim is None else claim.descriptors
        if config.server is not None:
            from workers.servers.command_server import start_server

            return CompletionRelay(start_server(config, held), None, emit)
        from workers.servers.vllm_engine import start_vllm

        server = start_vllm(config, held)
        return CompletionRelay(server, load_tokenizer(config.engine, config.source), emit)
    if config.kind != "generate":
        encoder = open_encoder(config)
        encoder.load()
        START.end("engine")
        return EncodeBatcher(encoder, emit, config.max_wait_s)
    engine = open_engine(config)
    engine.load()
    START.end("engine")
    tokenizer = load_tokenizer(config.engine, config.source)
    START.end("tokenizer")
    return Batcher(engine, tokenizer, emit)
