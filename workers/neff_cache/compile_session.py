"""Prepares the NEFF cache before a model is compiled, and records its graphs afterwards."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from workers.artifacts.sources.listing import SourceError
from workers.messages.engine_protocol import EngineLoadError
from workers.neff_cache import compiler_cache
from workers.neff_cache.candidates import cache_of
from workers.neff_cache.compiler_cache import LOG, NEFF
from workers.neff_cache.entries import EntryState, read_entries
from workers.neff_cache.file_states import Part, about, part_of
from workers.neff_cache.record import (
    ManifestRecord,
    Proof,
    is_finished,
    name_of,
    of_one_model,
    place_of,
    read_record,
    record_of,
    records_in,
    write_record,
)
from workers.neff_cache.sync import URL, Localized, log_unavailable, place_at, pull, push

log = logging.getLogger(__name__)

LONG_AGO = 86400 * 10**9  # ns since the epoch
CLOCK = 10**9  # ns: tolerance for file times that lag behind the clock


class GraphUses:
    """Watches one cache from before a model is compiled. Concurrent loads of the same graphs see each other's reads."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._failed = {
            path: status.st_mtime_ns
            for path in cache.glob(f"{compiler_cache.GRAPHS}/{LOG}")
            if (status := about(path)) is not None
        }
        self._began = time.time_ns() - CLOCK
        # time of the last read before marking; None: cannot be marked
        self._before = {path: _marked(path) for path in cache.glob(f"{compiler_cache.GRAPHS}/{NEFF}")}

    def record(self, manifest: Mapping[str, Any], source: str, saved: Path | None = None) -> ManifestRecord | None:
        """Writes the record of a compiled ``manifest`` into the cache and returns it; None: no graphs, or not
        writable. ``saved``: the folder with the model's NEFFs, if the package saved them."""
        graphs = self._new_or_read() if saved is None else self._equal_to_saved(saved)
        self._restore_times()
        return None if not graphs else self._write(record_of(manifest, source, graphs=graphs))

    def record_failure(self, manifest: Mapping[str, Any], source: str, error: BaseException) -> ManifestRecord | None:
        """Records which graphs of ``manifest`` could not be compiled."""
        modules = set(re.findall(r"MODULE_[^\s/]+", str(error)))
        failures = []
        for path in sorted(self._cache.glob(f"{compiler_cache.GRAPHS}/{LOG}")):
            if (now := about(path)) is None:
                continue
            is_new = self._failed.get(path) != now.st_mtime_ns
            if (is_new or path.parent.name in modules) and not compiler_cache.was_killed(compiler_cache.tail_of(path)):
                failures.append(f"{path.parent.parent.name}/{path.parent.name}")
        self._restore_times()
        return None if not failures else self._write(record_of(manifest, source, failed=tuple(failures)))

    def _write(self, record: ManifestRecord) -> ManifestRecord | None:
        try:
            write_record(place_of(self._cache, record.name), record)
        except OSError as error:
            log.warning("cannot record the compiled graphs; `cache verify` will not find them: %s", error)
            return None
        return record

    def _equal_to_saved(self, saved: Path) -> dict[str, Part]:
        """Returns the finished entries whose NEFF equals a saved file."""
        saved_parts = [part_of(path) for path in saved.glob("*.neff")]
        sizes = {part.size for part in saved_parts}
        same_size = self._graphs(lambda file: file.stat().st_size in sizes)
        graphs = {name: part for name, part in same_size.items() if part in saved_parts}
        return graphs if {part.digest for part in graphs.values()} == {part.digest for part in saved_parts} else {}

    def _new_or_read(self) -> dict[str, Part]:
        """Returns the entries that were created or read since the start.

        On a file system without access times, all entries; `cache verify` may then predict a compile for a graph that
        the model does not need.
        """
        if os.statvfs(self._cache).f_flag & os.ST_NOATIME:
            return self._graphs(lambda _: True)
        return self._graphs(lambda file: self._before.get(file) is None or file.stat().st_atime_ns >= self._began)

    def _graphs(self, is_used: Callable[[Path], bool]) -> dict[str, Part]:
        """Returns the finished entries whose NEFF is used."""
        graphs = {}
        for entry in read_entries(self._cache):
            file = self._cache / entry.name / NEFF
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                if entry.state is EntryState.SUCCESS and is_used(file):
                    graphs[entry.name] = part_of(file)
        return graphs

    def _restore_times(self) -> None:
        """Restores the access times of unread files, which ``cache prune`` uses."""
        for path, before in self._before.items():
            now = about(path)
            if before is not None and before > LONG_AGO and now is not None and now.st_atime_ns == LONG_AGO:
                with contextlib.suppress(OSError):
                    os.utime(path, ns=(before, now.st_mtime_ns))


def _marked(path: Path) -> int | None:
    """Sets the access time back, so that the next read is visible; returns the old one in ns since the epoch.

    None: the file is gone or belongs to another user. By its manual, a ``relatime`` mount (Linux's default) updates the
    access time on the first read after it was set back.
    """
    try:
        before = path.stat()
        os.utime(path, ns=(LONG_AGO, before.st_mtime_ns))
    except OSError:
        return None
    return before.st_atime_ns


class CompileSession:
    """The compile session of one manifest. The engine's package reads the cache's location from the environment."""

    def __init__(self, manifest: Mapping[str, Any], source: Path, root: Path | None, shared: bool = True) -> None:
        """``root``: folder of compiled artifacts, beside the local folders of remote caches; None: the package uses a
        cache in S3 directly. ``shared`` False: graphs are not fetched, since their keys contain a path of this host
        (the ``--logfile`` of neuronx-distributed's ``ModelBuilder``)."""
        self._manifest = manifest
        self._source = str(source)
        self._cache, self._place = cache_of(os.environ, root)
        self._shared = shared
        self._uses: GraphUses | None = None

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """The context in which the package compiles what the cache lacks.

        1. Removes leftovers of killed compilers, and damaged entries.
        2. Copies entries of a remote cache to this host and points the package to them. An unavailable cache is
           logged, and the missing graphs are compiled. Raises EngineLoadError if this host's disk cannot be written.
        3. Records failed graphs, for ``cache verify``.
        """
        if self._cache is None:
            yield
            return
        compiler_cache.make_ready(self._cache)  # 1
        _remove_damaged(self._cache, self._manifest)
        if self._place is not None and self._shared and not _has_all(self._cache, self._manifest):  # 2
            _bring(self._place, self._manifest)
        self._uses = GraphUses(self._cache)
        try:
            with _package_pointed_to(self._place):
                yield
        except Exception as error:
            self._uses.record_failure(self._manifest, self._source, error)  # 3
            raise

    def record_compiled(self, saved: Path | None = None, *, wait: bool = False) -> None:
        """Records a successful compile and pushes new entries. ``saved``: where the package saved its NEFFs.

        The push runs in the background unless ``wait``, and the next compiled model starts another. Its errors do not
        fail a start.
        """
        if self._uses is not None:
            self._uses.record(self._manifest, self._source, saved)
        if self._place is None or self._place.why == "read-only":
            return
        sender = threading.Thread(target=_send, args=(self._place,), name="neff-push", daemon=True)
        sender.start()
        if wait:
            sender.join()


@contextlib.contextmanager
def _package_pointed_to(place: Localized | None) -> Iterator[None]:
    """Points the package to the local folder of a remote cache inside the context only: the next model of this
    process, such as a draft, needs the original value."""
    if place is None:
        yield
        return
    before = os.environ.get(URL)
    os.environ[URL] = str(place.path)
    try:
        yield
    finally:
        del os.environ[URL]
        if before is not None:
            os.environ[URL] = before


def _has_all(cache: Path, manifest: Mapping[str, Any]) -> bool:
    """Returns whether all graphs of the manifest's record are here, so that the remote cache is not needed. Damaged
    ones have been removed before."""
    record = read_record(place_of(cache, name_of(manifest)))
    return record is not None and bool(record.graphs) and all(is_finished(cache, name) for name in record.graphs)


def _bring(place: Localized, manifest: Mapping[str, Any]) -> None:
    """Pulls the graphs of the manifest. Raises EngineLoadError."""
    record = record_of(manifest)
    try:
        got = pull(place_at(place.location), place.path, record=record.name, compiler=record.compiler)
    except SourceError as error:
        log_unavailable(place.location, error)
        return
    except OSError as error:
        message = f"cannot write the NEFF cache {place.location} to {place.path}: {error}"
        raise EngineLoadError("compiled-unwritable", message, "check the free disk space") from error
    log.info(
        "pulled %d graphs (%.1f GB) from the NEFF cache %s to %s",
        len(got.entries),
        got.bytes / 1e9,
        place.location,
        place.path,
    )


def _send(place: Localized) -> None:
    try:
        sent = push(place.path, place_at(place.location))
    except (SourceError, OSError) as error:
        log.warning("cannot push compiled graphs to the NEFF cache %s: %s", place.location, error)
        return
    log.info("pushed %d graphs (%.1f GB) to the NEFF cache %s", len(sent.entries), sent.bytes / 1e9, place.location)


def _remove_damaged(cache: Path, manifest: Mapping[str, Any]) -> None:
    """Removes damaged graphs that the compiler's wrapper would use: all those of the model, since manifests with other
    buckets share some of them."""
    records = records_in(cache)
    for name in Proof(cache, records).damaged(of_one_model(records, manifest)):
        if compiler_cache.remove(cache / name):
            log.warning("removed %s: its NEFF does not match its record; it will be compiled again", cache / name)
