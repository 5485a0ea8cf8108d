"""Finds compiled artifacts that a start could use: on this host, beside the model, and in the NEFF cache."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from placements.engines.registry import ENGINES
from workers.artifacts.sources.listing import SourceError
from workers.neff_cache import compiler_cache, shared_artifacts
from workers.neff_cache.compiled_artifacts import MANIFEST, peek
from workers.neff_cache.entries import EntryState, listed_entries, read_entries
from workers.neff_cache.file_states import damaged
from workers.neff_cache.predict import ArtifactCandidate, has_more_buckets
from workers.neff_cache.record import LOCK_FILE, ManifestRecord, Proof, name_of, place_of, read_record, records_in
from workers.neff_cache.sync import Localized, describe, localized, place_at, records_at

CACHED = frozenset(name for name, engine in ENGINES.items() if engine.uses_neuron_cache)
BESIDE = "compiled"  # folder of a checkpoint with NEFFs from Optimum
RETRIED = "--retry_failed_compilation"


def candidates(
    wanted: Mapping[str, Any],
    root: Path,
    source: Path,
    environment: Mapping[str, str],
    *,
    kept: bool = True,
    neff_cache: str | None = None,
) -> list[ArtifactCandidate]:
    """Returns the candidates for a start that needs ``wanted``; ``root``: this host's compiled artifacts.

    Reads small files, and the NEFFs of matching candidates; lists a remote cache and reads its records. A cache that
    does not answer becomes a candidate with ``silent``. ``kept`` False: the model's graphs are only in the cache.
    ``neff_cache``: as written in the spec.
    """
    results = [*compiled_here(wanted, root)] if kept else []
    cached_too = wanted.get("engine") in CACHED
    if kept and cached_too and (folder := given(source, environment)) is not None:
        results.append(beside(folder))
    if cached_too:
        results += cached(wanted, environment, root)
    else:
        results += failed_here(wanted, environment, root)
    is_settled = any(
        candidate.silent or (candidate.manifest == wanted and not candidate.missing) for candidate in results
    )
    if kept and neff_cache and not is_settled:
        try:
            results += compiled_elsewhere(wanted, root, neff_cache)
        except SourceError as error:
            results.append(ArtifactCandidate("elsewhere", neff_cache, None, silent=describe(neff_cache, error)))
    return results


def compiled_here(wanted: Mapping[str, Any], root: Path) -> Iterator[ArtifactCandidate]:
    """Yields the complete entries of ``root``; verifies the files of the wanted one only."""
    for file in sorted(root.glob(f"*/{MANIFEST}")):
        folder = file.parent
        try:
            manifest = json.loads(file.read_text())
        except (OSError, ValueError):
            continue
        record = read_record(folder / LOCK_FILE)
        is_it = folder.name == name_of(wanted)
        missing = (LOCK_FILE,) if record is None else damaged(folder, record.files) if is_it else ()
        yield ArtifactCandidate("compiled", str(folder), manifest, "" if record is None else record.source, missing)


def compiled_elsewhere(wanted: Mapping[str, Any], root: Path, neff_cache: str) -> Iterator[ArtifactCandidate]:
    """Yields the finished entry that another host has pushed, if any. Raises SourceError."""
    remote = place_at(shared_artifacts.entry_location(peek(root, wanted), neff_cache))
    files = shared_artifacts.listed_files(remote)
    record = shared_artifacts.finished_record(remote, files)
    if record is not None:
        missing = shared_artifacts.missing(files, record)
        yield ArtifactCandidate("elsewhere", remote.url, record.manifest, record.source, missing)


def given(source: Path, environment: Mapping[str, str]) -> Path | None:
    """Returns a folder of NEFFs that came with the model: Optimum's, or a flat folder configured as the cache."""
    cache = compiler_cache.location(environment)
    for folder in (source / BESIDE, *([] if cache is None else [cache])):
        if any(folder.glob("*.neff")):
            return folder
    return None


def beside(folder: Path) -> ArtifactCandidate:
    """Returns the candidate of a folder from ``given``, with its record if there is one."""
    record = read_record(folder / LOCK_FILE)
    if record is None:
        return ArtifactCandidate("source", str(folder), None)
    return ArtifactCandidate("source", str(folder), record.manifest, record.source, damaged(folder, record.files))


def failed_here(wanted: Mapping[str, Any], environment: Mapping[str, str], root: Path) -> Iterator[ArtifactCandidate]:
    """Yields the recorded failures of this manifest, for an engine whose graphs are not shared between models."""
    cache, _ = cache_of(environment, root)
    record = None if cache is None else read_record(place_of(cache, name_of(wanted)))
    if cache is None or record is None or RETRIED in environment.get("NEURON_CC_FLAGS", "").split():
        return
    states = {entry.name: entry.state for entry in read_entries(cache)}
    if failed := tuple(graph for graph in record.failed if _is_stuck(cache, graph, states.get(graph))):
        yield ArtifactCandidate("neff-cache", str(cache), record.manifest, record.source, failed, failed)


def cached(wanted: Mapping[str, Any], environment: Mapping[str, str], root: Path) -> Iterator[ArtifactCandidate]:
    """Yields the candidates of the model's NEFF cache, local and remote; an unavailable one comes first."""
    cache, place = cache_of(environment, root)
    if cache is None:
        return
    name = name_of(wanted)
    records = {record.name: record for record in records_in(cache)}
    remote_graphs: frozenset[str] = frozenset()
    shown = str(cache) if place is None else place.location
    proof = Proof(cache, records.values())
    mine = records.get(name)
    if place is not None and (mine is None or not mine.graphs or proof.missing(mine)):
        try:
            remote_graphs = _add_remote_records(place, records)
            proof = Proof(cache, records.values())
        except SourceError as error:
            yield ArtifactCandidate("neff-cache", shown, None, silent=describe(shown, error))
    states = {entry.name: entry.state for entry in read_entries(cache)}
    retried = RETRIED in environment.get("NEURON_CC_FLAGS", "").split()
    for record in records.values():
        if record.name == name or has_more_buckets(record.manifest, wanted):
            missing = tuple(graph for graph in proof.missing(record) if graph not in remote_graphs)
            graphs = (
                () if retried else [graph for graph in (*record.graphs, *record.failed) if graph not in remote_graphs]
            )
            failed = tuple(graph for graph in graphs if _is_stuck(cache, graph, states.get(graph)))
            missing = missing or record.failed  # failed before, and will be retried
            locked = tuple(graph for graph in missing if states.get(graph) is EntryState.LOCKED)
            yield ArtifactCandidate("neff-cache", shown, record.manifest, record.source, missing, failed, locked)
        else:
            yield ArtifactCandidate("neff-cache", shown, record.manifest, record.source)


def cache_of(environment: Mapping[str, str], root: Path | None) -> tuple[Path | None, Localized | None]:
    """Returns the NEFF cache of a process with this environment on this host, and what it replaces. None: no cache, or
    nothing. Local folders of remote caches are beside the compiled artifacts in ``root``."""
    place = None if root is None else localized(environment, keep_of(root))
    return (compiler_cache.location(environment), None) if place is None else (place.path, place)


def keep_of(root: Path) -> Path:
    """Returns the parent of the local folders of remote caches, beside the compiled artifacts in ``root``."""
    return root.parent / "neff"


def _add_remote_records(place: Localized, records: dict[str, ManifestRecord]) -> frozenset[str]:
    """Returns the names of finished remote entries, and adds the remote records to ``records``."""
    remote = place_at(place.location)
    files = remote.files()
    for record in records_at(remote, files):
        mine = records.get(record.name)
        if mine is None or mine.failed:
            records[record.name] = record
    return frozenset(entry.name for entry in listed_entries(files) if entry.state is EntryState.SUCCESS)


def _is_stuck(cache: Path, name: str, state: EntryState | None) -> bool:
    """Returns whether an entry has a failure that neither the compiler nor the start retries."""
    return state is EntryState.FAILED and not compiler_cache.was_killed(
        compiler_cache.tail_of(cache / name / compiler_cache.LOG)
    )
