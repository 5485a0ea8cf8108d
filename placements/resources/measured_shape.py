"""The shape that a measured speed belongs to. It holds for replicas of exactly this shape, and for no other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from placements.facts.checkpoints import Checkpoint
from placements.facts.engines import Engine
from placements.facts.topology import Host
from placements.spec.schema import ModelSpec

Shape = Mapping[str, Any]


def shape_of(model: ModelSpec, checkpoint: Checkpoint | None, engine: Engine, hosts: Sequence[Host]) -> dict[str, Any]:
    """Returns the shape of a model's replicas as JSON values; ``engine`` is the resolved engine.

    Emulated hosts have a machine of their own, so that what is measured there never corrects an estimate for a real
    instance type, and neither does a fleet of several types. A model without a readable checkpoint has no ``weights``.
    """
    return {
        "machine": " and ".join(sorted({_machine(host) for host in hosts})),
        "engine": engine,
        "weights": None if checkpoint is None else _weights(checkpoint),
        "tp_degree": model.tp_degree,
        "max_batch": model.max_batch,
        "max_len": model.length(checkpoint),
        "dtype": model.dtype_on(engine),
        "quantize": model.quantize,
        "quantize_kv": model.quantize_kv,
        "draft": None if model.draft is None else f"{model.draft.source}, {model.draft.k} tokens",
        "engine_options": json.dumps(model.engine_options, sort_keys=True) if model.engine_options else None,
    }


def difference(measured: Shape, wanted: Shape) -> str:
    """Returns the first field that differs, such as "tp_degree 8 instead of 4"; "" if none does."""
    for field, value in wanted.items():
        if field not in measured or measured[field] != value:
            return f"{field} {_text(measured.get(field))} instead of {_text(value)}"
    return ""


def _machine(host: Host) -> str:
    if host.topology is None:
        return "CPU"
    return f"emulated {host.topology.instance}" if host.emulated else host.topology.instance


def _weights(checkpoint: Checkpoint) -> str:
    heads = f"{checkpoint.heads} heads of {checkpoint.head_dim}, {checkpoint.kv_heads} KV heads"
    layers = f"{checkpoint.layers} layers of {checkpoint.hidden} and {checkpoint.ffn}"
    experts = f", {checkpoint.experts} experts" if checkpoint.experts else ""
    return f"{checkpoint.model_type}: {layers}{experts}, {heads}, {checkpoint.parameters} parameters"


def _text(value: object) -> str:
    return "none" if value is None else str(value)
