"""Checks sources with precompiled or sharded weights against the spec, by their small files."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.control.resolve.checkpoint_reader import CheckpointFacts, SourcePart
from placements.engines.registry import capabilities
from placements.spec.problems import Problem
from placements.spec.schema import ModelSpec, Spec
from workers.compiled.neuron_target import target_of
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import DRAFT, Origin, ReplicaConfig, key_of

_NEEDED = frozenset(
    {"allow_pickle", "buckets", "draft", "dtype", "engine", "engine_options", "fuse_qkv", "max_batch", "max_len"}
    | {"quantize", "quantize_kv", "sampling", "source", "tp_degree"}
)


def precompiled_problems(spec: Spec, facts: CheckpointFacts) -> Iterator[Problem]:
    """Yields an error for each model whose start would fail; models without a known config.json are skipped. Blocks."""
    for model in spec.models:
        loads = capabilities(model.engine).loads_compiled  # ``auto`` on Neuron is resolved on the host
        if loads and model.name in facts.checkpoints and not _NEEDED & model.broken:
            problem = _problem(spec, model, facts)
            if problem is not None:
                yield problem


def _problem(spec: Spec, model: ModelSpec, facts: CheckpointFacts) -> Problem | None:
    own = SourcePart(model)
    parts = [own] if model.draft is None else [own, SourcePart(model, DRAFT)]
    folders = [(part, folder) for part in parts if (folder := _folder(part, facts)) is not None]
    if len(folders) < len(parts):
        return None  # the options that depend on it cannot be compared
    source = folders[0][1]
    config = ReplicaConfig(
        model=model.resolved(model.engine, facts.checkpoints[model.name]),
        origins={key_of(part.keys): Origin(source=part.source, folder=folder) for part, folder in folders},
    )
    error = _start_error(config, spec)
    if error is None:
        return None
    fact, hint = (text.replace(source, own.source) for text in (error.what, error.hint))
    return Problem(error.id, "error", own.where(spec), f"{model.name}: {fact}", hint)


def _start_error(config: ReplicaConfig, spec: Spec) -> EngineLoadError | None:
    if not capabilities(config.model.engine).exports_graphs:
        from workers.engines.nxd_inference.precompiled import start_error

        return start_error(config)
    from workers.engines.optimum_neuron.compiled_folder import start_error as optimum_error

    return optimum_error(config, {target_of(entry.instance) for entry in spec.hosts if entry.instance})


def _folder(part: SourcePart, facts: CheckpointFacts) -> str | None:
    """Returns the local folder of its small files."""
    head = facts.heads.get(part.key)
    return part.folder if head is None else head.folder
