"""The manifest of a set of compiled artifacts, all that it depends on, and the record of the files compiled from it.

A record is a lock file beside artifacts and in each cache of graphs: the names of NEFFs show neither their compiler nor
their flags, and no name shows the model of a graph. With the record, a start that would compile is known in advance,
and artifacts that do not match are refused.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from hashlib import blake2s
from pathlib import Path
from typing import Any

import msgspec

from workers.compiled.file_states import Part, damaged, sync_to_disk

LOCK_FILE = "corewright.lock.json"  # in a folder of artifacts
SHAPES = (
    "batch_size",
    "n_positions",
    "context_length_estimate",
    "seq_len",
    "max_context_length",
    "context_encoding_buckets",
    "token_generation_buckets",
    "ctx_batch_size",
    "tkg_batch_size",
    "continuous_batching",
    "speculation_length",
)
LAYOUT = ("group_query_attention", "fuse_qkv", "fused_qkv", "quant", "kv_cache_quant", "quantized")


class ManifestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one manifest. The fields up to ``layout`` repeat parts of it for readers."""

    name: str  # of the set of compiled artifacts
    source: str  # the model's, on the host that compiled it
    engine: str
    compiler: str  # version; empty: none
    flags: str  # NEURON_CC_FLAGS
    target: str | None  # trn1, trn2
    lnc: int | str | None
    tp_degree: int | None
    dtype: str | None
    shapes: dict[str, Any]  # slots and buckets, by the package's names
    layout: dict[str, Any]  # tensor layouts and sharding options
    manifest: dict[str, Any]
    files: dict[str, Part] = {}  # beside the record
    graphs: dict[str, Part] = {}  # name of a graph in the cache -> its model.neff
    failed: tuple[str, ...] = ()  # graphs that the compiler could not compile
    made_at: float = 0.0  # seconds since the epoch


def plain_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the manifest after a round trip through JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(manifest))
    return plain


def name_of(manifest: Mapping[str, Any]) -> str:
    """Returns 20 hex digits, equal for equal manifests."""
    return blake2s(json.dumps(plain_of(manifest), sort_keys=True).encode(), digest_size=10).hexdigest()


def record_of(
    manifest: Mapping[str, Any],
    source: str = "",
    *,
    files: Mapping[str, Part] | None = None,
    graphs: Mapping[str, Part] | None = None,
    failed: tuple[str, ...] = (),
) -> ManifestRecord:
    """Creates a record of an engine's manifest; for other manifests the repeated fields are empty."""
    plain = plain_of(manifest)
    given_options = _value(plain, "options", dict) or {}
    options = {
        **given_options,
        **(_value(given_options, "constructor", dict) or {}),
        **(_value(given_options, "neuron", dict) or {}),
    }
    versions, environment = (_value(plain, name, dict) or {} for name in ("versions", "environment"))
    dtypes = (_value(options, "amp", str), _value(options, "torch_dtype", str), _value(plain, "dtype", str))
    lnc = _value(plain, "lnc", str)
    return ManifestRecord(
        name=name_of(plain),
        source=source,
        engine=_value(plain, "engine", str) or "",
        compiler=_value(versions, "neuronx-cc", str) or _value(plain, "compiler", str) or "",
        flags=_value(environment, "NEURON_CC_FLAGS", str) or "",
        target=_value(plain, "target", str),
        lnc=_value(plain, "lnc", int) if lnc is None else lnc,
        tp_degree=_value(options, "tp_degree", int),
        dtype=next(filter(None, dtypes), None),
        shapes=_value(plain, "shapes", dict) or {key: value for key, value in options.items() if key in SHAPES},
        layout={key: value for key, value in options.items() if key.endswith("_layout") or key in LAYOUT},
        manifest=plain,
        files=dict(files or {}),
        graphs=dict(graphs or {}),
        failed=failed,
        made_at=time.time(),
    )


def _value(of: Mapping[str, Any], name: str, kind: type) -> Any:
    """Returns a value if it is of that type; else None."""
    value = of.get(name)
    return value if type(value) is kind else None


def write_record(file: Path, record: ManifestRecord) -> None:
    """Writes a record atomically and syncs it to disk. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    written = file.with_name(f"{file.name}.{os.getpid()}.new")
    written.write_bytes(encoded(record))
    sync_to_disk(written)
    written.replace(file)
    sync_to_disk(file.parent)


def encoded(record: ManifestRecord) -> bytes:
    """Returns the record as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1)


def read_record(file: Path) -> ManifestRecord | None:
    """Reads a record; None: the file is missing or not a record."""
    try:
        return decoded(file.read_bytes())
    except OSError:
        return None


def decoded(data: bytes) -> ManifestRecord | None:
    try:
        return msgspec.json.decode(data, type=ManifestRecord)
    except msgspec.DecodeError:
        return None


def missing_files(folder: Path) -> tuple[str, ...] | None:
    """Returns the missing or changed files of the record in ``folder``; None without a record."""
    record = read_record(folder / LOCK_FILE)
    return None if record is None else damaged(folder, record.files)
