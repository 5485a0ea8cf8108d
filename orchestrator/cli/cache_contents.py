"""The contents of NEFF caches and of compiled artifacts, as JSON and as tables."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from orchestrator.cli.output import fields_of
from orchestrator.fleet.progress_text import size_text
from orchestrator.process.failure import Failed
from orchestrator.process.text_table import columns
from workers.artifacts.sources.listing import RemoteFile, SourceError
from workers.compiling.start_forecast import Verdict
from workers.messages.status import Failure
from workers.neff_cache import compiler_cache
from workers.neff_cache.candidates import keep_of
from workers.neff_cache.compiled_artifacts import MANIFEST
from workers.neff_cache.entries import CacheEntry, listed_entries, read_entries
from workers.neff_cache.predict import Difference, Prediction
from workers.neff_cache.pruning import Kept
from workers.neff_cache.record import LOCK_FILE, decoded
from workers.neff_cache.shared_artifacts import FOLDER, missing
from workers.neff_cache.sync import S3, localized, place_at

if TYPE_CHECKING:
    from orchestrator.starts.offline_configs import OfflineConfig

RETRY = "`corewright cache retry"
SHOWN = 6  # differences of a model in the table; -o json has all
MODEL = "key source revision folder bytes fetched_at used_at"


@dataclass(frozen=True)
class CacheContents:
    """The contents of the NEFF cache at ``place``."""

    place: str
    entries: Sequence[CacheEntry]  # graphs
    pushed: Sequence[dict[str, Any]]  # sets of `compile --push`

    @classmethod
    def read(cls, place: str) -> CacheContents:
        """Raises Failed if the cache cannot be read."""
        try:
            if place.startswith(S3):
                remote = place_at(place)
                files = remote.files()
                sets = [_below(file, FOLDER) for file in files if file.name.startswith(f"{FOLDER}/")]
                pushed = _pushed_sets(sets, lambda name: remote.read(f"{FOLDER}/{name}"))
                return cls(place, listed_entries(files), pushed)
            folder = Path(place) / FOLDER
            below = place_at(str(folder))
            pushed = _pushed_sets(below.files(), below.read) if folder.is_dir() else []
            return cls(place, read_entries(Path(place)), pushed)
        except SourceError as error:
            raise Failed(error.id, error.what, error.hint) from error

    def as_dict(self) -> dict[str, Any]:
        entries = [
            {
                **fields_of(entry, "name compiler key flags_key"),
                "state": entry.state.value,
                "bytes": entry.bytes,
                "changed_at": entry.changed_at or None,
                "flags": None if entry.flags is None else list(entry.flags),
                "words": entry.words,
            }
            for entry in self.entries
        ]
        return {"place": self.place, "entries": entries, "pushed": list(self.pushed)}

    def table(self) -> str:
        rows = [
            (
                entry.compiler,
                entry.module,
                entry.state.value,
                size_text(entry.bytes),
                age(entry.changed_at),
                " ".join(entry.flags or ()) or None,
                entry.words or None,
            )
            for entry in self.entries
        ]
        sets = [
            (
                *(row["name"], row["engine"], row["source"] or None, row["state"]),
                size_text(row["bytes"]),
                age(row["made_at"] or 0),
            )
            for row in self.pushed
        ]
        header = ("COMPILER", "MODULE", "STATE", "SIZE", "AGE", "FLAGS", "LAST WORDS")
        tables = [columns(header, rows)] if rows else []
        tables += [columns(("SET", "ENGINE", "SOURCE", "STATE", "SIZE", "AGE"), sets)] if sets else []
        return f"NEFF cache {self.place}\n" + ("\n".join(tables) or "empty")


def _pushed_sets(files: Sequence[RemoteFile], read: Callable[[str], bytes]) -> list[dict[str, Any]]:
    """Groups ``files`` into sets by the first part of their names. Raises SourceError."""
    sets: dict[str, list[RemoteFile]] = {}
    for file in files:
        name, slash, _ = file.name.partition("/")
        if slash:
            sets.setdefault(name, []).append(_below(file, name))
    rows = []
    for name, parts in sorted(sets.items()):
        names = {part.name for part in parts}
        record = decoded(read(f"{name}/{LOCK_FILE}")) if {MANIFEST, LOCK_FILE} <= names else None
        rows.append(
            {
                "name": name,
                "state": "unfinished" if record is None else "damaged" if missing(parts, record) else "whole",
                "bytes": sum(part.size for part in parts),
                **fields_of(record, "made_at source engine compiler"),
            }
        )
    return rows


def _below(file: RemoteFile, folder: str) -> RemoteFile:
    return msgspec.structs.replace(file, name=file.name[len(folder) + 1 :])


def verdict_dicts(offline: OfflineConfig, answer: list[Verdict] | Failure) -> list[dict[str, Any]]:
    """Returns the entry of each start of a model; a failure is a start that fails before anything is compiled."""
    about = fields_of(offline, "model target")
    if isinstance(answer, list):
        return [about | _verdict_dict(offline, verdict) for verdict in answer]
    entry = about | {"engine": None, "role": "model", "source": offline.source, "outcome": "fail", "hit": False}
    return [entry | {"where": "", "place": "", "reason": str(answer), "why": [], "missing": [], "failed": []}]


def _verdict_dict(offline: OfflineConfig, verdict: Verdict) -> dict[str, Any]:
    prediction = verdict.prediction
    return {
        "engine": getattr(offline.config, "engine", None),
        "role": verdict.role,
        "source": offline.draft_source if verdict.role == "draft" else offline.source,
        **fields_of(prediction, "outcome hit"),
        "where": prediction.where if prediction.where != "nothing" else "",
        "place": prediction.place,
        "reason": _reason(offline, prediction),
        "why": [fields_of(why, "field wanted found") for why in prediction.why],
        "missing": list(prediction.missing),
        "failed": list(prediction.failed),
    }


def _reason(offline: OfflineConfig, prediction: Prediction) -> str:
    """Returns the reason. Its `cache retry` gets `--cache` for a cache that `retry` does not search by default."""
    config = offline.config
    if not prediction.failed or isinstance(config, Failure) or not Path(prediction.place).is_dir():
        return prediction.reason
    is_local = localized({**os.environ, **config.env}, keep_of(Path(config.compiled or ""))) is not None
    if is_local or Path(prediction.place) == compiler_cache.location(os.environ):
        return prediction.reason
    return prediction.reason.replace(RETRY, f"{RETRY} --cache {shlex.quote(prediction.place)}")


def differences(label: str, verdict: dict[str, Any]) -> list[str]:
    """Returns the first lines of what differs, is missing or has failed."""
    lines = [str(Difference(**why)) for why in verdict["why"]]
    lines += [f"missing or damaged: {name}" for name in verdict["missing"]]
    lines += [f"failed: {name}" for name in verdict["failed"]]
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return [f"{label}: {line}" for line in (*lines[:SHOWN], *more)]


def _source(artifact: Kept, sources: Mapping[str, str]) -> str | None:
    """Returns the model's source as the spec names it, not the folder that it was fetched to."""
    return None if artifact.record is None else sources.get(artifact.record.source, artifact.record.source)


def compiled_dict(artifact: Kept, sources: Mapping[str, str]) -> dict[str, Any]:
    return {
        **fields_of(artifact, "name state bytes used_at"),
        "source": _source(artifact, sources),
        **fields_of(artifact.record, "engine compiler flags tp_degree dtype shapes layout"),
        "damaged": list(artifact.damaged),
    }


def compiled_table(folder: Path, artifacts: Sequence[Kept], sources: Mapping[str, str]) -> str:
    header = ("NAME", "ENGINE", "SOURCE", "COMPILER", "TP", "DTYPE", "STATE", "SIZE", "USED")
    rows = []
    for artifact in artifacts:
        engine, compiler, tp_degree, dtype = fields_of(artifact.record, "engine compiler tp_degree dtype").values()
        made = (artifact.name, engine, _source(artifact, sources) or None, compiler or None, tp_degree, dtype)
        rows.append((*made, artifact.state, size_text(artifact.bytes), age(artifact.used_at)))
    return f"Compiled artifacts in {folder}\n" + (columns(header, rows) if rows else "none")


def age(at: float) -> str | None:
    """Returns the age of a time in its largest unit; None for an unknown time, 0."""
    if not at:
        return None
    age_s = max(0.0, time.time() - at)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= size:
            return f"{age_s / size:.0f} {unit}"
    return f"{age_s:.0f} s"
