"""Builds the engine's part of a replica's configuration from its model in the spec."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.messages.replica_config import ReplicaConfig, ServerCommand

if TYPE_CHECKING:
    from placements.engines.registry import Engine
    from placements.spec.schema import ModelSpec
    from placements.spec.sections import Server


def unplaced_config(
    model: ModelSpec, engine: Engine, *, source: str | None, draft_source: str | None, length: int
) -> ReplicaConfig:
    """Returns the engine's configuration of a replica without a placement. ``length``: tokens of a slot."""
    return ReplicaConfig(
        model=model.name,
        engine=engine,
        kind=model.kind,
        max_wait_s=model.max_wait_ms / 1000,
        source=source,
        dtype=model.dtype_on(engine),
        slots=model.max_batch,
        max_len=length,
        engine_options=model.given_options,
        draft_source=draft_source,
        draft_k=0 if model.draft is None else model.draft.k,
        draft_method="draft_model" if model.draft is None else model.draft.method,
        adapters=model.adapter_places,
        allow_pickle=model.allow_pickle,
        trust_remote_code=model.trust_remote_code,
        tp_degree=model.tp_degree,
        sampling=model.sampling,
        prefill_buckets=list(model.buckets.prefill),
        decode_buckets=list(model.buckets.decode),
        quantize=model.quantize,
        quantize_kv=model.quantize_kv,
        group_query_attention=model.group_query_attention,
        fuse_qkv=model.fuse_qkv,
        compile_workers=model.compiler.workers,
        neff_cache=model.neff_cache_location,
        server=None if model.server is None else _server(model, model.server),
    )


def _server(model: ModelSpec, server: Server) -> ServerCommand:
    return ServerCommand(
        command=model.server_command,
        listen=server.listen,
        ready=server.ready,
        env=dict(server.env),
        cores_env=server.cores_env,
    )
