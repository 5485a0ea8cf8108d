"""Which graphs of Neuron's cache belong to which manifest: the records beside them, their proof, and their writer."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from workers.compiled import neuron_cache
from workers.compiled.file_states import Part, about, part_at, part_of
from workers.compiled.manifest import ManifestRecord, name_of, read_record, record_of, write_record
from workers.compiled.neuron_cache import DONE, GRAPHS, LOG, NEFF, OWN, EntryState, is_finished, read_entries

log = logging.getLogger(__name__)

SUFFIX = ".lock.json"
LONG_AGO = 86400 * 10**9  # ns since the epoch
CLOCK = 10**9  # ns: tolerance for file times that lag behind the clock


def record_file(cache: Path, name: str) -> Path:
    """Returns the path of a record in a cache."""
    return cache / OWN / f"{name}{SUFFIX}"


def record_in(cache: Path, manifest: Mapping[str, Any]) -> ManifestRecord | None:
    """Returns the record of a manifest in a local cache."""
    return read_record(record_file(cache, name_of(manifest)))


def records_in(cache: Path) -> tuple[ManifestRecord, ...]:
    """Returns all records of a local cache, the newest first."""
    records = [record for file in sorted((cache / OWN).glob(f"*{SUFFIX}")) if (record := read_record(file)) is not None]
    return tuple(sorted(records, key=lambda record: -record.made_at))


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

    def missing(self, record: ManifestRecord) -> tuple[str, ...]:
        """Returns the graphs of the record that are not good."""
        return tuple(name for name in record.graphs if not self.is_good(name))

    def part(self, name: str) -> Part | None:
        """Returns the state of the entry's NEFF; None: it cannot be read."""
        if name not in self._parts:
            self._parts[name] = part_at(self._cache / name / NEFF)
        return self._parts[name]


def remove_damaged(cache: Path, manifest: Mapping[str, Any]) -> None:
    """Removes the damaged graphs that the compiler's wrapper would use: all those of the model and compiler, since
    manifests with other buckets share some of them."""
    records, expected = records_in(cache), record_of(manifest)
    proof = Proof(cache, records)
    related = [
        record
        for record in records
        if record.compiler == expected.compiler and record.manifest.get("model") == expected.manifest.get("model")
    ]
    for name in dict.fromkeys(name for record in related for name in record.graphs):
        folder = cache / name
        is_used = (folder / NEFF).exists() and (folder / DONE).exists()  # whatever the content
        if is_used and proof.is_refuted(name) and neuron_cache.remove(folder):
            log.warning("removed %s: its NEFF does not match its record; it will be compiled again", folder)


class GraphUses:
    """Watches one cache from before a model is compiled. Concurrent loads of the same graphs see each other's reads."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._failed = {
            path: status.st_mtime_ns for path in cache.glob(f"{GRAPHS}/{LOG}") if (status := about(path)) is not None
        }
        self._began = time.time_ns() - CLOCK
        # time of the last read before marking; None: cannot be marked
        self._before = {path: _marked(path) for path in cache.glob(f"{GRAPHS}/{NEFF}")}

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
        for path in sorted(self._cache.glob(f"{GRAPHS}/{LOG}")):
            if (now := about(path)) is None:
                continue
            is_new = self._failed.get(path) != now.st_mtime_ns
            if (is_new or path.parent.name in modules) and not neuron_cache.was_killed(neuron_cache.tail_of(path)):
                failures.append(f"{path.parent.parent.name}/{path.parent.name}")
        self._restore_times()
        return None if not failures else self._write(record_of(manifest, source, failed=tuple(failures)))

    def _write(self, record: ManifestRecord) -> ManifestRecord | None:
        try:
            write_record(record_file(self._cache, record.name), record)
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
