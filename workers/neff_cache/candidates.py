"""What was compiled and lies where a start looks for it: on this host, beside the model, and in its NEFF cache."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from workers.artifacts.sources.listing import SourceError
from workers.neff_cache import compiled_cache, compiler_cache
from workers.neff_cache.compiled_artifacts import MANIFEST, peek
from workers.neff_cache.entries import State, listed_entries, read_entries
from workers.neff_cache.file_states import damaged
from workers.neff_cache.predict import Candidate, has_more_buckets
from workers.neff_cache.record import LOCK_FILE, Proof, Record, decoded, name_of, place_of, read_record, records_in
from workers.neff_cache.sync import S3, Localized, localized, place_at, records_at
from workers.neff_cache.unavailable import in_words

CACHED = "transformers-neuronx"  # the engine whose graphs are in Neuron's cache; the others keep whole folders
BESIDE = "compiled"  # the folder of a checkpoint in which Optimum has left its NEFFs
RETRIED = "--retry_failed_compilation"


def candidates(
    wanted: Mapping[str, Any],
    root: Path,
    source: Path,
    environment: Mapping[str, str],
    *,
    kept: bool = True,
    neff_cache: str | None = None,
) -> list[Candidate]:
    """For a start that needs ``wanted``, with the artifacts of this host in ``root``. Reads small files, and of what
    matches the NEFFs; asks a cache elsewhere for its list and its records. One that gives no answer is ``silent``.

    ``kept`` false: of a model whose graphs are in the cache alone. ``neff_cache``: the model's, as its spec names it.
    """
    found = [*compiled_here(wanted, root)] if kept else []
    cached_too = wanted.get("engine") == CACHED
    if kept and cached_too and (folder := given(source, environment)) is not None:
        found.append(beside(folder))
    if cached_too:
        found += cached(wanted, environment, root)
    else:
        found += failed_here(wanted, environment, root)
    known = any(one.silent or (one.manifest == wanted and not one.missing) for one in found)
    if kept and neff_cache and not known:
        try:
            found += compiled_elsewhere(wanted, root, neff_cache)
        except SourceError as error:
            found.append(Candidate("elsewhere", neff_cache, None, silent=in_words(neff_cache, error)))
    return found


def compiled_here(wanted: Mapping[str, Any], root: Path) -> Iterator[Candidate]:
    """The complete entries of ``root``; only of the wanted one the files are looked at."""
    for file in sorted(root.glob(f"*/{MANIFEST}")):
        folder = file.parent
        try:
            manifest = json.loads(file.read_text())
        except (OSError, ValueError):
            continue
        told = read_record(folder / LOCK_FILE)
        is_it = folder.name == name_of(wanted)
        missing = (LOCK_FILE,) if told is None else damaged(folder, told.files) if is_it else ()
        yield Candidate("compiled", str(folder), manifest, "" if told is None else told.source, missing)


def compiled_elsewhere(wanted: Mapping[str, Any], root: Path, neff_cache: str) -> Iterator[Candidate]:
    """The entry that another host has pushed, where it is finished. Raises SourceError."""
    place = compiled_cache.where(peek(root, wanted), neff_cache)
    if not place.startswith(S3) and not Path(place).is_dir():
        return
    there = place_at(place)
    files = there.files()
    if {MANIFEST, LOCK_FILE} <= {file.name for file in files}:
        told = decoded(there.read(LOCK_FILE))
        if told is not None:
            missing = compiled_cache.missing(files, told)
            yield Candidate("elsewhere", there.url, told.manifest, told.source, missing)


def given(source: Path, environment: Mapping[str, str]) -> Path | None:
    """A folder of NEFFs that came with the model: Optimum's, or one that is named as the cache and holds them flat."""
    cache = compiler_cache.location(environment)
    for folder in (source / BESIDE, *([] if cache is None else [cache])):
        if any(folder.glob("*.neff")):
            return folder
    return None


def beside(folder: Path) -> Candidate:
    """The NEFFs of ``given``, with what their record proves."""
    told = read_record(folder / LOCK_FILE)
    if told is None:
        return Candidate("source", str(folder), None)
    return Candidate("source", str(folder), told.manifest, told.source, damaged(folder, told.files))


def failed_here(wanted: Mapping[str, Any], environment: Mapping[str, str], root: Path) -> Iterator[Candidate]:
    """The failures of this very manifest, for an engine whose graphs no other model finds in the cache."""
    place = localized(environment, keep_of(root))
    cache = compiler_cache.location(environment) if place is None else place.path
    told = None if cache is None else read_record(place_of(cache, name_of(wanted)))
    if cache is None or told is None or RETRIED in environment.get("NEURON_CC_FLAGS", "").split():
        return
    states = {entry.name: entry.state for entry in read_entries(cache)}
    if failed := tuple(one for one in told.failed if _is_stuck(cache, one, states.get(one))):
        yield Candidate("neff-cache", str(cache), told.manifest, told.source, failed, failed)


def cached(wanted: Mapping[str, Any], environment: Mapping[str, str], root: Path) -> Iterator[Candidate]:
    """What the records of the model's NEFF cache tell, those of one elsewhere too; one that is silent comes first."""
    place = localized(environment, keep_of(root))
    cache = compiler_cache.location(environment) if place is None else place.path
    if cache is None:
        return
    name = name_of(wanted)
    known = {told.name: told for told in records_in(cache)}
    afar: frozenset[str] = frozenset()
    shown = str(cache) if place is None else place.location
    proof = Proof(cache, known.values())
    mine = known.get(name)
    if place is not None and (mine is None or not mine.graphs or proof.missing(mine)):
        try:
            afar = _add_afar(place, known)
            proof = Proof(cache, known.values())
        except SourceError as error:
            yield Candidate("neff-cache", shown, None, silent=in_words(shown, error))
    states = {entry.name: entry.state for entry in read_entries(cache)}
    retried = RETRIED in environment.get("NEURON_CC_FLAGS", "").split()
    for told in known.values():
        if told.name == name or has_more_buckets(told.manifest, wanted):
            missing = tuple(one for one in proof.missing(told) if one not in afar)
            asked = () if retried else [one for one in (*told.graphs, *told.failed) if one not in afar]
            failed = tuple(one for one in asked if _is_stuck(cache, one, states.get(one)))
            missing = missing or told.failed  # what has failed once, and is tried again
            locked = tuple(one for one in missing if states.get(one) is State.LOCKED)
            yield Candidate("neff-cache", shown, told.manifest, told.source, missing, failed, locked)
        else:
            yield Candidate("neff-cache", shown, told.manifest, told.source)


def keep_of(root: Path) -> Path:
    """Where the local folders of caches elsewhere are kept, beside the compiled artifacts in ``root``."""
    return root.parent / "neff"


def _add_afar(place: Localized, known: dict[str, Record]) -> frozenset[str]:
    """The names of finished entries elsewhere; its records are added to ``known``."""
    there = place_at(place.location)
    files = there.files()
    for told in records_at(there, files):
        mine = known.get(told.name)
        if mine is None or mine.failed:
            known[told.name] = told
    return frozenset(entry.name for entry in listed_entries(files) if entry.state is State.SUCCESS)


def _is_stuck(cache: Path, name: str, state: State | None) -> bool:
    """Whether the compiler would not try it again, nor the start before it."""
    return state is State.FAILED and not compiler_cache.was_killed(
        compiler_cache.tail_of(cache / name / compiler_cache.LOG)
    )
