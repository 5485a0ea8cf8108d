"""What all engines share before they load: the checkpoint, the dtype, the lengths and the draft's vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from placements.engines.registry import ENGINES
from workers.batching.buckets import checked_buckets
from workers.messages.encoder_protocol import EncoderSpec
from workers.messages.engine_protocol import EngineLoadError, EngineSpec
from workers.messages.replica_config import ReplicaConfig

if TYPE_CHECKING:
    from typing_extensions import Self

TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # ours -> torch's
Spec = TypeVar("Spec", EngineSpec, EncoderSpec)


class LoadableEngine(Generic[Spec]):
    """The part of engines and encoders that does not depend on the model: a ``spec`` once it is loaded."""

    _spec: Spec | None = None  # set by ``load``

    @property
    def spec(self) -> Spec:
        if self._spec is None:
            raise RuntimeError("the engine is not loaded")
        return self._spec


class CheckpointSettings(msgspec.Struct, frozen=True):
    """The part of a replica's configuration that the artifacts of an engine depend on, by the names of its fields."""

    @classmethod
    def of(cls, config: ReplicaConfig) -> Self:
        """Returns the settings of ``config``. Raises EngineLoadError without a checkpoint."""
        source_of(config)
        model = config.model
        values: dict[str, Any] = {
            "slots": model.max_batch,
            "prefill_buckets": model.buckets.prefill,
            "decode_buckets": model.buckets.decode,
        }
        for field in msgspec.structs.fields(cls):
            if field.required and field.name not in values:  # what the configuration derives, such as a folder, first
                values[field.name] = getattr(config if hasattr(config, field.name) else model, field.name)
        return msgspec.convert(values, cls)


def source_of(config: ReplicaConfig) -> Path:
    """Returns the folder of the checkpoint. Raises EngineLoadError without one."""
    if config.source is None:
        fact = f"the {config.model.engine} engine needs a checkpoint"
        raise EngineLoadError("source-missing", fact, "set `source` to a folder")
    return Path(config.source)


def kept_in(config: ReplicaConfig) -> Path | None:
    """Returns the folder of kept artifacts, if they are kept."""
    return None if config.run.compiled is None else Path(config.run.compiled)


def not_installed(engine: str, name: str) -> EngineLoadError:
    """Returns the error of an engine without a package that it imports."""
    return EngineLoadError("engine-not-installed", f"the {engine} engine needs {name}", ENGINES[engine].install)


def dtype_on(engine: str, dtype: str, names: Mapping[str, str] = TORCH_DTYPES) -> str:
    """Returns the engine's name of ``dtype``, from ``names``. Raises EngineLoadError for an unsupported one."""
    if dtype not in names:
        fact = f"dtype {dtype!r} is not supported by the {engine} engine"
        raise EngineLoadError("bad-dtype", fact, f"use {', '.join(names)}")
    return names[dtype]


def checked_lengths(
    prefill: Sequence[int], decode: Sequence[int], max_len: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the buckets of prompts and of the KV cache. Raises EngineLoadError."""
    try:
        lengths = checked_buckets("prefill", prefill, max_len), checked_buckets("decode", decode, max_len)
    except ValueError as error:
        raise EngineLoadError("bad-buckets", str(error)) from error
    if lengths[1][-1] != max_len:
        message = f"the largest decode bucket is {lengths[1][-1]}, less than max_len {max_len}"
        raise EngineLoadError("bad-buckets", message, f"add {max_len}")
    return lengths


def check_vocabularies(own: int | None, draft: int | None) -> None:
    """Raises EngineLoadError where the vocabulary of the draft model differs from the model's."""
    if own != draft:
        fact = f"the draft model's vocabulary has {draft} ids, the model's {own}"
        raise EngineLoadError("bad-draft", fact, "use a draft model with the same tokenizer")
