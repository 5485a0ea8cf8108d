"""Configurations of replicas for tests, by the names of single fields."""

from __future__ import annotations

from typing import Any

import msgspec.structs

from placements.spec.notation import is_path
from placements.spec.schema import Buckets, Compiler, Draft, ModelSpec
from workers.messages.replica_config import Origin, ReplicaConfig, ReplicaPlace, ReplicaRun, key_of

_PLACE = set(ReplicaPlace.__struct_fields__)
_MODEL = ModelSpec.model_fields.keys() - _PLACE  # both have cores
_SHORT = {"slots", "prefill_buckets", "decode_buckets", "draft_source", "draft_k", "draft_method", "compile_workers"}


def replica_config(model: str = "m", **fields: Any) -> ReplicaConfig:
    """The configuration with these fields of the model, of the place or of the run; nothing is validated. Short names:
    ``slots``, ``prefill_buckets``, ``decode_buckets``, ``draft_source``, ``draft_k``, ``draft_method`` and
    ``compile_workers``."""
    start = ReplicaConfig(
        model=ModelSpec.model_construct(name=model, source="./m", engine="cpu", dtype="fp32", max_len=64)
    )
    return changed(start, **fields)


def changed(config: ReplicaConfig, **fields: Any) -> ReplicaConfig:
    """The configuration with other values of these fields, as in `replica_config`."""
    given = {name: fields.pop(name) for name in _SHORT & fields.keys()}
    model = {name: fields.pop(name) for name in _MODEL & fields.keys()}
    if "model" in fields:
        model["name"] = fields.pop("model")
    if model.get("source", "") is None:
        model["source"] = "echo"  # as the parser does
    if "slots" in given:
        model["max_batch"] = given["slots"]
    lengths = config.model.buckets
    prefill, decode = given.get("prefill_buckets", lengths.prefill), given.get("decode_buckets", lengths.decode)
    model.setdefault("buckets", Buckets.model_construct(prefill=tuple(prefill or ()), decode=tuple(decode or ())))
    if "compile_workers" in given:
        model["compiler"] = Compiler(workers=given["compile_workers"])
    draft = config.model.draft
    if (source := given.get("draft_source", draft and draft.source)) is None:
        model.setdefault("draft", None)
    else:
        k, method = given.get("draft_k", draft.k if draft else 4), given.get("draft_method", "draft_model")
        model["draft"] = Draft.model_construct(source=source, k=k, method=method)
    place = {name: fields.pop(name) for name in fields.keys() & _PLACE}
    run = {name: fields.pop(name) for name in fields.keys() & set(ReplicaRun.__struct_fields__)}
    result = msgspec.structs.replace(
        config,
        model=config.model.model_copy(update=model),
        place=msgspec.structs.replace(config.place, **place),
        run=msgspec.structs.replace(config.run, **run),
        **fields,
    )
    away = {key_of(keys): Origin(source=source) for keys, source in result.sources() if not is_path(source)}
    return msgspec.structs.replace(result, origins=away | result.origins)
