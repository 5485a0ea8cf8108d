"""Records what a model was compiled from and the resulting files: a lock file beside artifacts and in each cache.

The names of NEFFs show neither their compiler nor their flags, and no name shows the model of a graph. With the record,
a start that would compile is known in advance, and artifacts that do not match are refused.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from hashlib import blake2s
from pathlib import Path
from typing import Any

import msgspec

from workers.neff_cache.compiler_cache import NEFF
from workers.neff_cache.entries import DONE, OWN, EntryState, read_entry
from workers.neff_cache.file_states import Part, damaged, part_of, sync_to_disk

LOCK_FILE = "corewright.lock.json"  # in a folder of artifacts
SUFFIX = ".lock.json"  # in a cache
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

    name: str  # of the entry of compiled artifacts
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
    graphs: dict[str, Part] = {}  # cache entry name -> its model.neff
    failed: tuple[str, ...] = ()  # cache entries that the compiler could not compile
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
    given_options = _mapping(plain, "options")
    options = {**given_options, **_mapping(given_options, "constructor"), **_mapping(given_options, "neuron")}
    degree, lnc = options.get("tp_degree"), plain.get("lnc")
    dtypes = (_text(dtype) for dtype in (options.get("amp"), options.get("torch_dtype"), plain.get("dtype")))
    versions, environment = _mapping(plain, "versions"), _mapping(plain, "environment")
    return ManifestRecord(
        name=name_of(plain),
        source=source,
        engine=_text(plain.get("engine")) or "",
        compiler=_text(versions.get("neuronx-cc")) or _text(plain.get("compiler")) or "",
        flags=_text(environment.get("NEURON_CC_FLAGS")) or "",
        target=_text(plain.get("target")),
        lnc=_number(lnc) if _text(lnc) is None else _text(lnc),
        tp_degree=_number(degree),
        dtype=next(filter(None, dtypes), None),
        shapes=_mapping(plain, "shapes") or {key: value for key, value in options.items() if key in SHAPES},
        layout={key: value for key, value in options.items() if key.endswith("_layout") or key in LAYOUT},
        manifest=plain,
        files=dict(files or {}),
        graphs=dict(graphs or {}),
        failed=failed,
        made_at=time.time(),
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _mapping(of: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = of.get(name)
    return value if isinstance(value, dict) else {}


def place_of(cache: Path, name: str) -> Path:
    """Returns the path of a record in a cache."""
    return cache / OWN / f"{name}{SUFFIX}"


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


def records_in(cache: Path) -> tuple[ManifestRecord, ...]:
    """Returns all records of a local cache, the newest first."""
    records = [record for file in sorted((cache / OWN).glob(f"*{SUFFIX}")) if (record := read_record(file)) is not None]
    return tuple(sorted(records, key=lambda record: -record.made_at))


def missing_files(folder: Path) -> tuple[str, ...] | None:
    """Returns the missing or changed files of the record in ``folder``; None: there is no record."""
    record = read_record(folder / LOCK_FILE)
    return None if record is None else damaged(folder, record.files)


def of_one_model(records: Iterable[ManifestRecord], manifest: Mapping[str, Any]) -> list[ManifestRecord]:
    """Returns the records with the model and compiler of ``manifest``: a start may use their graphs."""
    expected = record_of(manifest)
    return [
        record
        for record in records
        if record.compiler == expected.compiler and record.manifest.get("model") == expected.manifest.get("model")
    ]


class Proof:
    """Verifies the NEFFs of a cache against all of its records. Each NEFF is read once, on first use.

    A graph shared by two models may have been compiled again for the second one. The first record then has another
    digest, but the graph is still good.
    """

    def __init__(self, cache: Path, records: Iterable[ManifestRecord]) -> None:
        self._cache = cache
        self._known: dict[str, list[Part]] = {}
        for record in records:
            for name, part in record.graphs.items():
                self._known.setdefault(name, []).append(part)
        self._parts: dict[str, Part | None] = {}

    def is_good(self, name: str) -> bool:
        """Returns whether the entry is finished and its NEFF matches at least one record."""
        return name in self._known and is_finished(self._cache, name) and self.part(name) in self._known[name]

    def is_refuted(self, name: str) -> bool:
        """Returns whether the entry has records but its NEFF matches none of them."""
        return name in self._known and not self.is_good(name)

    def damaged(self, records: Iterable[ManifestRecord]) -> list[str]:
        """Returns the graphs of these records that the compiler's wrapper would use although no record matches."""
        names = dict.fromkeys(name for record in records for name in record.graphs)
        return [name for name in names if looks_finished(self._cache, name) and self.is_refuted(name)]

    def missing(self, record: ManifestRecord) -> tuple[str, ...]:
        """Returns the graphs of the record that are not good."""
        return tuple(name for name in record.graphs if not self.is_good(name))

    def part(self, name: str) -> Part | None:
        """Returns the state of the entry's NEFF; None: it cannot be read."""
        if name not in self._parts:
            try:
                self._parts[name] = part_of(self._cache / name / NEFF)
            except OSError:
                self._parts[name] = None
        return self._parts[name]


def is_finished(cache: Path, name: str) -> bool:
    """Returns whether the entry is finished."""
    return read_entry(cache, name).state is EntryState.SUCCESS


def looks_finished(cache: Path, name: str) -> bool:
    """Returns whether the compiler's wrapper would use the entry, regardless of its content."""
    return (cache / name / NEFF).exists() and (cache / name / DONE).exists()
