"""Builds a replica's start configuration from the spec and its placement."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec.structs

from placements.facts.engines import SERVER_ENGINES
from workers.messages.replica_config import DRAFT, ReplicaConfig, ServerCommand

if TYPE_CHECKING:
    from orchestrator.control.resolve.resolved_revision import ResolvedRevision
    from orchestrator.messages.controller_settings import ControllerSettings
    from orchestrator.process.home import Home
    from placements.facts.engines import Engine
    from placements.planner.placement import Placement
    from placements.spec.schema import ModelSpec
    from placements.spec.sections import Server


def replica_config(
    generation: ResolvedRevision,
    placement: Placement,
    home: Home,
    fleet: ControllerSettings | None = None,
) -> ReplicaConfig:
    """Returns the configuration of a replica without an epoch and a socket; ``fleet`` None: it gets no requests.

    Remote sources are still to be fetched (`artifact_fetcher.py`).
    """
    model = generation.spec.model(placement.model)
    assert model is not None
    index, host = next((i, host) for i, host in enumerate(generation.hosts) if host.name == placement.host)
    engine = generation.engines[model.name]
    over_tcp = fleet is not None and fleet.data_plane == "tcp"
    return msgspec.structs.replace(
        unplaced_config(
            model,
            engine,
            source=generation.source(model),
            draft_source=generation.draft_source(model),
            length=generation.length(model),
        ),
        replica=placement.replica,
        host=placement.host,
        revision=generation.commit(model),
        draft_revision=None if model.draft is None else generation.commit(model, DRAFT),
        adapter_origins=generation.adapter_origins(model),
        cores=[] if placement.cores is None else list(placement.cores),
        claims=str(home.claims(index)) if host.emulated else None,
        env=dict(placement.env),
        log=str(home.log(model.name, placement.replica)),
        token="" if fleet is None else fleet.token,
        listen="tls" if over_tcp else "",
        uses_socket=not over_tcp,
        credentials=None if fleet is None else fleet.replica,
        compiled=str(home.compiled),
        python=None if engine in SERVER_ENGINES else generation.spec.python_for(engine),
        warm=generation.spec.is_warm(engine),
        server_python=generation.spec.python_for(engine) if engine in SERVER_ENGINES else None,
        server_launch=generation.spec.launch_of(engine) if engine in SERVER_ENGINES else [],
        start_s=model.deadlines.start_s + model.deadlines.compile_s if engine in SERVER_ENGINES else 0.0,
        version=generation.versions[model.name],
        tokenizer=generation.tokenizers[model.name],
    )


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
