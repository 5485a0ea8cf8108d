"""The places where a start finds a set of compiled artifacts or its graphs, in the order in which it uses them.

One ordered list answers for a start, for commands that compile ahead, check or fetch, and for their predictions:

1. the sets of this host,
2. the sets that other hosts have pushed to the model's ``neff_cache``,
3. NEFFs that came with the model,
4. the graphs in Neuron's cache, local and remote.

Otherwise the set is compiled.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace

from placements.engines.registry import ENGINES
from workers.artifacts.sources.listing import SourceError
from workers.compiled import neuron_cache, shared_sets
from workers.compiled.file_states import damaged, files_below
from workers.compiled.graph_records import Proof, records_in
from workers.compiled.graph_sync import cache_of, pull_for, records_at
from workers.compiled.host_sets import MANIFEST, Buildable, Tell, always, entry, peek, read_manifest
from workers.compiled.manifest import LOCK_FILE, ManifestRecord, name_of, plain_of, read_record
from workers.compiled.neuron_cache import RETRIED, EntryState, flags_of, is_stuck, listed_entries, read_entries
from workers.compiled.orders import NEEDS_DEVICE, Built, Wanted, Working
from workers.compiled.prediction import ArtifactCandidate, Prediction, has_more_buckets, predict
from workers.compiled.shared_sets import SharedSet, pull_or_log, set_location
from workers.compiled.storage import describe, storage_at
from workers.host import file_lock
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure

CACHED = frozenset(name for name, engine in ENGINES.items() if engine.uses_neuron_cache)
HERE = Prediction("hit", "compiled", "it was compiled on this host")
BESIDE = "compiled"  # folder of a checkpoint with NEFFs from Optimum


@dataclass(frozen=True)
class Fetched:
    """What a place has sent to this host."""

    name: str  # for display; {} stands for the role of the set
    bytes: int


class Place(Protocol):
    """A place that may have what a manifest needs."""

    def candidates(self, wanted: Mapping[str, Any], ask: bool = True) -> Iterator[ArtifactCandidate]:
        """Yields what is there for ``wanted``, and what explains the difference. Reads small files, and the NEFFs of
        matching candidates. ``ask`` False: no remote storage is asked, since one does not answer. One that does not
        answer becomes a candidate with ``silent``."""
        ...

    def fetch(self, wanted: Mapping[str, Any]) -> Fetched | None:
        """Fetches what a start from this host would lack; None: nothing. Raises SourceError, EngineLoadError and
        OSError."""
        ...


@dataclass(frozen=True)
class HostSets:
    """The sets of this host."""

    root: Path
    is_whole: Callable[[Path], bool] = always

    def candidates(self, wanted: Mapping[str, Any], ask: bool = True) -> Iterator[ArtifactCandidate]:
        """Yields the complete sets; verifies the files of the wanted one only."""
        for file in sorted(self.root.glob(f"*/{MANIFEST}")):
            folder = file.parent
            if (manifest := read_manifest(folder)) is None:
                continue
            record, missing = read_record(folder / LOCK_FILE), tuple[str, ...]()
            if record is None:
                missing = (LOCK_FILE,)
            elif folder.name == name_of(wanted):
                missing = damaged(folder, record.files) or (() if self.is_whole(folder) else (folder.name,))
            source = "" if record is None else record.source
            yield ArtifactCandidate("compiled", str(folder), manifest, source, missing)

    def fetch(self, wanted: Mapping[str, Any]) -> Fetched | None:
        return None


@dataclass(frozen=True)
class SharedSets:
    """The sets of a model's ``neff_cache``."""

    location: str  # as written in the spec
    root: Path  # of the sets of this host

    def candidates(self, wanted: Mapping[str, Any], ask: bool = True) -> Iterator[ArtifactCandidate]:
        """Yields the finished set that another host has pushed, if any."""
        if not ask:
            return
        try:
            shared = SharedSet.at(set_location(name_of(wanted), self.location))
        except SourceError as error:
            yield ArtifactCandidate("elsewhere", self.location, None, silent=describe(self.location, error))
            return
        if (record := shared.record) is not None:
            yield ArtifactCandidate("elsewhere", shared.storage.url, record.manifest, record.source, shared.missing)

    def fetch(self, wanted: Mapping[str, Any]) -> Fetched | None:
        with entry(self.root, wanted) as held:
            if held.complete:
                return None
            try:
                is_here = shared_sets.pull(held, self.location)
            finally:
                with contextlib.suppress(OSError):
                    held.path.rmdir()  # only if nothing was fetched, and it is empty
            size = sum(status.st_size for _, status in files_below(held.path))
            return Fetched("compiled {}", size) if is_here else None


@dataclass(frozen=True)
class ShippedGraphs:
    """NEFFs that came with the model."""

    folder: Path

    def candidates(self, wanted: Mapping[str, Any], ask: bool = True) -> Iterator[ArtifactCandidate]:
        """Yields the folder, with its record if there is one."""
        record = read_record(self.folder / LOCK_FILE)
        if record is None:
            yield ArtifactCandidate("source", str(self.folder), None)
        else:
            missing = damaged(self.folder, record.files)
            yield ArtifactCandidate("source", str(self.folder), record.manifest, record.source, missing)

    def fetch(self, wanted: Mapping[str, Any]) -> Fetched | None:
        return None


@dataclass(frozen=True)
class CachedGraphs:
    """The graphs in Neuron's cache of a process with this environment."""

    environment: Mapping[str, str]
    root: Path  # of the sets of this host

    def candidates(self, wanted: Mapping[str, Any], ask: bool = True) -> Iterator[ArtifactCandidate]:
        """Yields the records of the cache; a remote cache that does not answer comes first. Graphs of engines that keep
        complete sets are not shared between models, so only their recorded failures count."""
        cache, localized = cache_of(self.environment, self.root)
        if cache is None:
            return
        name, is_shared = name_of(wanted), wanted.get("engine") in CACHED
        place = str(cache) if localized is None else localized.location
        records = {record.name: record for record in records_in(cache)}
        proof, mine, remote_graphs = Proof(cache, records.values()), records.get(name), frozenset[str]()
        if ask and is_shared and localized is not None and (mine is None or not mine.graphs or proof.missing(mine)):
            try:
                remote_graphs = _add_remote_records(localized.location, records)
                proof = Proof(cache, records.values())
            except SourceError as error:
                yield ArtifactCandidate("neff-cache", place, None, silent=describe(place, error))
        entries = {entry.name: entry for entry in read_entries(cache)}
        is_retried = RETRIED in flags_of(self.environment)
        stuck = {name for name, entry in entries.items() if not is_retried and is_stuck(cache, entry)} - remote_graphs
        for record in records.values():
            missing, failed, locked = tuple[str, ...](), tuple[str, ...](), tuple[str, ...]()
            if record.name == name or (is_shared and has_more_buckets(record.manifest, wanted)):
                failed = tuple(graph for graph in (*record.graphs, *record.failed) if graph in stuck)
                missing = tuple(graph for graph in proof.missing(record) if graph not in remote_graphs)
                missing = missing or record.failed  # failed before, and will be retried
                locked = tuple(
                    graph for graph in missing if graph in entries and entries[graph].state is EntryState.LOCKED
                )
            if is_shared or failed:
                yield ArtifactCandidate("neff-cache", place, record.manifest, record.source, missing, failed, locked)

    def fetch(self, wanted: Mapping[str, Any]) -> Fetched | None:
        _, localized = cache_of(self.environment, self.root)
        if localized is None or wanted.get("engine") not in CACHED:
            return None
        got = pull_for(localized, wanted)
        return Fetched(f"{len(got.entries)} graphs of the {{}}", got.bytes) if got.entries else None


def shipped_graphs(source: Path, environment: Mapping[str, str]) -> ShippedGraphs | None:
    """Returns the NEFFs that came with a model: Optimum's, or a flat folder configured as the cache; None: none did."""
    cache = neuron_cache.location(environment)
    for folder in (source / BESIDE, *([] if cache is None else [cache])):
        if any(folder.glob("*.neff")):
            return ShippedGraphs(folder)
    return None


def places_for(unit: Buildable, config: ReplicaConfig, ahead: bool = False) -> tuple[Place, ...]:
    """Returns the places of a start that needs ``unit``, in its order. ``ahead``: for a compilation ahead of time,
    which does not use NEFFs that came with the model."""
    assert config.run.compiled is not None
    root, environment = Path(config.run.compiled), {**os.environ, **config.place.env}
    places: list[Place] = []
    if unit.kept:
        places.append(HostSets(root, unit.is_whole))
        if config.model.neff_cache:
            places.append(SharedSets(config.model.neff_cache, root))
        is_cached = unit.manifest.get("engine") in CACHED
        if is_cached and not ahead and (shipped := shipped_graphs(unit.source, environment)) is not None:
            places.append(shipped)
    return (*places, CachedGraphs(environment, root))


def find(unit: Buildable, config: ReplicaConfig, ahead: bool = False) -> Prediction:
    """Predicts from which place a start gets what it needs, in the replica's environment. Later places are not asked
    once one has all of it. ``ahead``: as in `places_for`."""
    if unit.unread:
        reason = f"{len(unit.unread)} files of the checkpoint need digests and are unread; read them with --read"
        return Prediction("compile", "nothing", reason)
    if config.run.compiled is None:
        return Prediction("compile", "nothing", "there is no folder for compiled artifacts")
    wanted, existing = plain_of(unit.manifest), list[ArtifactCandidate]()
    for place in places_for(unit, config, ahead):
        if any(candidate.manifest == wanted and not candidate.missing for candidate in existing):
            break
        existing += place.candidates(wanted, ask=not any(candidate.silent for candidate in existing))
    return predict(wanted, existing, str(unit.source))


def wanted_of(config: ReplicaConfig, unit: Buildable, prediction: Prediction) -> Wanted:
    """Returns what a start needs, with the prediction of where it gets it."""
    is_kept = config.run.compiled is not None and unit.kept and not unit.unread
    return Wanted(
        role=unit.role,
        source=str(unit.source),
        manifest=dict(unit.manifest),
        folder=str(peek(Path(config.run.compiled or ""), unit.manifest).path) if is_kept else "",
        complete=prediction.hit and prediction.where == "compiled",
        ahead=unit.make is not None,
        unread=list(unit.unread),
        prediction=prediction,
    )


def ensure(
    units: Iterable[Buildable],
    config: ReplicaConfig,
    report: Callable[[Working], None],
    *,
    push: bool = False,
    make: bool = True,
) -> Built:
    """Provides all sets that need no device: each is fetched from the config's ``neff_cache`` if it is there, else
    compiled. One that does not answer is skipped.

    ``push``: push the sets to the ``neff_cache``; a failed push does not fail the compile. ``make`` False: nothing is
    compiled. Raises EngineLoadError, also for a set that only a device compiles, and errors of the package.
    """
    began, built = time.monotonic(), Built()
    if config.run.compiled is None:
        raise EngineLoadError("compiled-unwritable", "there is no folder for compiled artifacts", "set `compiled`")
    for unit in units:
        built.wanted.append(wanted_of(config, unit, HERE))
        if not unit.kept and unit.make is None:
            raise _needs_device(unit)
        if not unit.kept:
            continue
        held = peek(Path(config.run.compiled), unit.manifest)
        working = Working(key=held.path.name, role=unit.role)
        if file_lock.is_locked(held.path.with_name(f"{working.key}.lock")):
            report(working)
        with entry(held.path.parent, unit.manifest, unit.is_whole) as held:
            if not held.complete:
                report(replace(working, phase="looking"))
                if pull_or_log(held, config.model.neff_cache, built.warnings):
                    built.pulled.append(working.key)
                elif make and unit.make is not None:
                    report(replace(working, phase="compiling"))
                    unit.make(held, _counted(report, replace(working, phase="compiling")))
                    built.compiled.append(working.key)
                else:
                    held.path.rmdir()  # empty
                    if make:
                        raise _needs_device(unit)
                    built.missing.append(working.key)
        if push and config.model.neff_cache and working.key not in built.missing:
            report(replace(working, phase="sending"))
            with entry(held.path.parent, unit.manifest, unit.is_whole) as held:  # with a shared lock now
                try:
                    if shared_sets.push(held, config.model.neff_cache):
                        built.pushed.append(working.key)
                except SourceError as error:  # the compile succeeded, and the next push sends it
                    built.unsent.append(Failure(error.id, error.what, error.hint))
        report(replace(working, phase="done"))
    return replace(built, seconds=round(time.monotonic() - began, 3))


def _counted(report: Callable[[Working], None], working: Working) -> Tell:
    """Returns the function by which a compiler reports its graphs."""
    return lambda done, total: report(replace(working, done=done, total=total))


def _needs_device(unit: Buildable) -> EngineLoadError:
    """Returns the error of a set that only a start compiles, on its cores."""
    message = f"{unit.manifest.get('engine')} can compile {unit.source} only on its cores, when a replica starts"
    return EngineLoadError(NEEDS_DEVICE, message, "start a replica: its result is kept for later starts")


def _add_remote_records(location: str, records: dict[str, ManifestRecord]) -> frozenset[str]:
    """Returns the names of finished remote graphs, and adds the remote records to ``records``."""
    remote = storage_at(location)
    files = remote.files()
    for record in records_at(remote, files):
        mine = records.get(record.name)
        if mine is None or mine.failed:
            records[record.name] = record
    return frozenset(entry.name for entry in listed_entries(files) if entry.state is EntryState.SUCCESS)
