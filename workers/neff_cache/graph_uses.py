"""Finds the cache entries that a model uses, by watching the cache while the model is compiled or loaded.

No API reports them: folders are named by a digest of the graph's text, and a model's saved files by another digest.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workers.neff_cache import compiler_cache
from workers.neff_cache.compiler_cache import LOG, NEFF
from workers.neff_cache.entries import EntryState, read_entries
from workers.neff_cache.file_states import Part, about, part_of
from workers.neff_cache.record import ManifestRecord, place_of, record_of, write_record

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
