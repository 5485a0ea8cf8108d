"""Which entries of the cache a model's graphs are, found out while the model is compiled or taken from there.

Nothing tells it: the folders are named by a digest of the graph's text, the files that a model saves by another one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.neff_cache import compiler_cache
from workers.neff_cache.compiler_cache import LOG, NEFF
from workers.neff_cache.entries import State, read_entries
from workers.neff_cache.file_states import Part, about, part_of
from workers.neff_cache.record import Record, place_of, record_of, write_record

log = logging.getLogger(__name__)

LONG_AGO = 86400 * 10**9  # ns since the epoch
CLOCK = 10**9  # ns: by so much the times of files may lag behind the clock


class GraphUses:
    """Of one cache, from before a model is compiled. Two that load the same graphs at once see each other's reads."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._failed = {
            path: found.st_mtime_ns
            for path in cache.glob(f"{compiler_cache.GRAPHS}/{LOG}")
            if (found := about(path)) is not None
        }
        self._began = time.time_ns() - CLOCK
        # when each was read last, before it was marked; None: it cannot be marked
        self._before = {path: _marked(path) for path in cache.glob(f"{compiler_cache.GRAPHS}/{NEFF}")}

    def keep(self, manifest: Mapping[str, Any], source: str, saved: Path | None = None) -> Record | None:
        """It was compiled: write the record of ``manifest`` into the cache. ``saved``: the folder with the model's
        NEFFs, where the package has saved them. None where nothing is to be written down, or it cannot be."""
        graphs = self._new_or_read() if saved is None else self._same_as(saved)
        self._put_back()
        return None if not graphs else self._write(record_of(manifest, source, graphs=graphs))

    def keep_failure(self, manifest: Mapping[str, Any], source: str, error: BaseException) -> Record | None:
        """It could not be compiled: write down which graphs that was due to."""
        told = set(re.findall(r"MODULE_[^\s/]+", str(error)))
        found = []
        for path in sorted(self._cache.glob(f"{compiler_cache.GRAPHS}/{LOG}")):
            if (now := about(path)) is None:
                continue
            is_new = self._failed.get(path) != now.st_mtime_ns
            if (is_new or path.parent.name in told) and not compiler_cache.was_killed(compiler_cache.tail_of(path)):
                found.append(f"{path.parent.parent.name}/{path.parent.name}")
        self._put_back()
        return None if not found else self._write(record_of(manifest, source, failed=tuple(found)))

    def _write(self, made: Record) -> Record | None:
        try:
            write_record(place_of(self._cache, made.name), made)
        except OSError as error:
            log.warning("what was compiled is not written down, so that `cache verify` will not know it: %s", error)
            return None
        return made

    def _same_as(self, saved: Path) -> dict[str, Part]:
        """The finished entries whose NEFF has the very bytes of a saved file."""
        wished = [part_of(path) for path in saved.glob("*.neff")]
        sizes = {part.size for part in wished}
        found = {}
        for entry in read_entries(self._cache):
            if entry.state is not State.SUCCESS:
                continue
            file = self._cache / entry.name / NEFF
            with contextlib.suppress(FileNotFoundError):  # it went meanwhile
                if file.stat().st_size in sizes and (part := part_of(file)) in wished:
                    found[entry.name] = part
        return found if {part.digest for part in found.values()} == {part.digest for part in wished} else {}

    def _new_or_read(self) -> dict[str, Part]:
        """Where files do not tell when they were read, all that is there: then one that goes later makes a compile
        probable that is none."""
        tells = not os.statvfs(self._cache).f_flag & os.ST_NOATIME
        found = {}
        for entry in read_entries(self._cache):
            if entry.state is not State.SUCCESS:
                continue
            file = self._cache / entry.name / NEFF
            with contextlib.suppress(FileNotFoundError):  # it went meanwhile
                if not tells or self._before.get(file) is None or file.stat().st_atime_ns >= self._began:
                    found[entry.name] = part_of(file)
        return found

    def _put_back(self) -> None:
        """The times of what nobody has read since: ``cache prune`` goes by them."""
        for path, before in self._before.items():
            now = about(path)
            if before is not None and before > LONG_AGO and now is not None and now.st_atime_ns == LONG_AGO:
                with contextlib.suppress(OSError):
                    os.utime(path, ns=(before, now.st_mtime_ns))


def _marked(path: Path) -> int | None:
    """Have the next read of the file be seen in its times. When it was read last, in ns since the epoch; None: it went
    meanwhile, or it cannot be marked, for it is another user's.

    By its manual, a mount with ``relatime`` (Linux's default) notes the first read after the time was set back.
    """
    try:
        before = path.stat()
        os.utime(path, ns=(LONG_AGO, before.st_mtime_ns))
    except OSError:
        return None
    return before.st_atime_ns
