"""What a model was compiled from, and what came of it: a lock file beside each model's compiled artifacts, and one in
each cache that its graphs lie in.

The names of NEFFs tell neither their compiler nor their flags, and no name tells which model a graph belongs to. The
record does, so that a start that would compile is known beforehand, and one that would load what does not match is
refused.
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
from workers.neff_cache.entries import DONE, OWN, State, read_entry
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


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Of one manifest. The fields up to ``layout`` repeat for people what is in it."""

    name: str  # of the entry of compiled artifacts
    source: str  # of the model, on the host that compiled it
    engine: str
    compiler: str  # its version; empty: it has none
    flags: str  # NEURON_CC_FLAGS
    target: str | None  # trn1, trn2
    lnc: int | str | None
    tp_degree: int | None
    dtype: str | None
    shapes: dict[str, Any]  # slots and buckets, by the package's names
    layout: dict[str, Any]  # how tensors lie and are sharded, as far as the spec says it
    manifest: dict[str, Any]
    files: dict[str, Part] = {}  # beside the record
    graphs: dict[str, Part] = {}  # of a cache: the name of an entry -> its model.neff
    failed: tuple[str, ...] = ()  # entries of a cache that the compiler could not compile
    made_at: float = 0.0  # seconds since the epoch


def plain_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """As it is when it has been JSON."""
    found: dict[str, Any] = json.loads(json.dumps(manifest))
    return found


def name_of(manifest: Mapping[str, Any]) -> str:
    """20 hex digits, equal for equal manifests."""
    return blake2s(json.dumps(plain_of(manifest), sort_keys=True).encode(), digest_size=10).hexdigest()


def record_of(
    manifest: Mapping[str, Any],
    source: str = "",
    *,
    files: Mapping[str, Part] | None = None,
    graphs: Mapping[str, Part] | None = None,
    failed: tuple[str, ...] = (),
) -> Record:
    """Made now, of a manifest as the engines make them; of another the fields for people are empty."""
    plain = plain_of(manifest)
    told = _mapping(plain, "options")
    options = {**told, **_mapping(told, "constructor"), **_mapping(told, "neuron")}
    degree, lnc = options.get("tp_degree"), plain.get("lnc")
    dtypes = (_text(one) for one in (options.get("amp"), options.get("torch_dtype"), plain.get("dtype")))
    versions, environment = _mapping(plain, "versions"), _mapping(plain, "environment")
    return Record(
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
    found = of.get(name)
    return found if isinstance(found, dict) else {}


def place_of(cache: Path, name: str) -> Path:
    """Where a cache keeps the record of that name."""
    return cache / OWN / f"{name}{SUFFIX}"


def write_record(file: Path, record: Record) -> None:
    """Whole or not at all, and on the disk. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    written = file.with_name(f"{file.name}.{os.getpid()}.new")
    written.write_bytes(encoded(record))
    sync_to_disk(written)
    written.replace(file)
    sync_to_disk(file.parent)


def encoded(record: Record) -> bytes:
    """For a file that people read."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1)


def read_record(file: Path) -> Record | None:
    """None where there is none, or what is there is no record."""
    try:
        return decoded(file.read_bytes())
    except OSError:
        return None


def decoded(data: bytes) -> Record | None:
    try:
        return msgspec.json.decode(data, type=Record)
    except msgspec.DecodeError:
        return None


def records_in(cache: Path) -> tuple[Record, ...]:
    """All that a cache of this host keeps, the newest first."""
    found = [told for file in sorted((cache / OWN).glob(f"*{SUFFIX}")) if (told := read_record(file)) is not None]
    return tuple(sorted(found, key=lambda told: -told.made_at))


def missing_files(folder: Path) -> tuple[str, ...] | None:
    """Of the files that the record in ``folder`` names, those that are not as they were; None: there is no record."""
    told = read_record(folder / LOCK_FILE)
    return None if told is None else damaged(folder, told.files)


def missing_graphs(cache: Path, record: Record) -> tuple[str, ...]:
    """The entries of the record that are not finished in ``cache``, or have another NEFF than they had."""
    return tuple(name for name, part in record.graphs.items() if not is_finished(cache, name, part))


def of_one_model(records: Iterable[Record], manifest: Mapping[str, Any]) -> list[Record]:
    """Those of the same model and compiler as ``manifest``: they name the graphs that its start may take."""
    wanted = record_of(manifest)
    return [
        told
        for told in records
        if told.compiler == wanted.compiler and told.manifest.get("model") == wanted.manifest.get("model")
    ]


class Proof:
    """What all records of a cache say of its NEFFs. Each NEFF is read once, when it is first asked for.

    A graph that two models share may have been compiled anew by the second: then the first one's record is of another
    NEFF, and the graph is good none the less.
    """

    def __init__(self, cache: Path, records: Iterable[Record]) -> None:
        self._cache = cache
        self._known: dict[str, list[Part]] = {}
        for told in records:
            for name, part in told.graphs.items():
                self._known.setdefault(name, []).append(part)
        self._parts: dict[str, Part | None] = {}

    def is_good(self, name: str) -> bool:
        """Whether a start would take it, and some record tells its very NEFF."""
        return name in self._known and is_finished(self._cache, name) and self.part(name) in self._known[name]

    def is_refuted(self, name: str) -> bool:
        """Whether there are records of it, and none tells its NEFF."""
        return name in self._known and not self.is_good(name)

    def damaged(self, records: Iterable[Record]) -> list[str]:
        """Of the graphs of these records those that the compiler's wrapper would take, though none tells that NEFF."""
        names = dict.fromkeys(name for told in records for name in told.graphs)
        return [name for name in names if looks_finished(self._cache, name) and self.is_refuted(name)]

    def missing(self, record: Record) -> tuple[str, ...]:
        """Of the graphs of one of the records those that are not good."""
        return tuple(name for name in record.graphs if not self.is_good(name))

    def part(self, name: str) -> Part | None:
        """Its NEFF; None: it cannot be read."""
        if name not in self._parts:
            try:
                self._parts[name] = part_of(self._cache / name / NEFF)
            except OSError:
                self._parts[name] = None
        return self._parts[name]


def is_finished(cache: Path, name: str, part: Part | None = None) -> bool:
    """Whether a start would take that entry; with ``part``, whether it has the very NEFF."""
    if read_entry(cache, name).state is not State.SUCCESS:
        return False
    return part is None or not damaged(cache / name, {NEFF: part})


def looks_finished(cache: Path, name: str) -> bool:
    """Whether the compiler's wrapper would take it, whatever it holds."""
    return (cache / name / NEFF).exists() and (cache / name / DONE).exists()
