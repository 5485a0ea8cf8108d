"""What a replica is told at its start, from the spec and the place that the plan gives it."""

from __future__ import annotations

from orchestrator.fleet import FleetSettings
from orchestrator.generation import Generation
from orchestrator.home import Home
from placements.placement import Placement
from workers.config import ReplicaConfig


def replica_config(
    generation: Generation,
    placement: Placement,
    home: Home,
    fleet: FleetSettings | None = None,
) -> ReplicaConfig:
    """Of a replica that has no epoch and no socket yet; ``fleet`` None: nobody will reach it.

    Sources elsewhere are still to be fetched: see bringing.py.
    """
    model = generation.spec.model(placement.model)
    assert model is not None
    index, host = next((i, host) for i, host in enumerate(generation.hosts) if host.name == placement.host)
    engine = generation.engines[model.name]
    return ReplicaConfig(
        model=model.name,
        replica=placement.replica,
        epoch=0,
        host=placement.host,
        engine=engine,
        source=generation.source(model),
        revision=generation.commit(model),
        dtype=model.dtype_on(engine),
        slots=model.max_batch,
        max_len=generation.length(model),
        cores=[] if placement.cores is None else list(placement.cores),
        claims=str(home.claims(index)) if host.emulated else None,
        env=dict(placement.env),
        log=str(home.log(model.name, placement.replica)),
        socket="",
        token="" if fleet is None else fleet.token,
        listen="tls" if fleet is not None and fleet.data_plane == "tcp" else "",
        credentials=None if fleet is None else fleet.replica,
        engine_options=dict(model.engine_options),
        draft_source=generation.draft_source(model),
        draft_revision=generation.draft_commit(model),
        draft_k=0 if model.draft is None else model.draft.k,
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
        compiled=str(home.compiled),
        neff_cache=model.neff_cache_location,
        python=generation.spec.python_for(engine),
        version=generation.versions[model.name],
        tokenizer=generation.tokenizers[model.name],
    )
