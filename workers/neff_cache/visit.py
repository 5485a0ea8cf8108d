"""One model's way through the NEFF cache: made ready before its graphs are compiled or taken, written down after."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from workers import neuron_cache
from workers.artifacts.listing import SourceError
from workers.engine import EngineLoadError
from workers.neff_cache.candidates import keep_of
from workers.neff_cache.record import looks_finished, missing_graphs, name_of, place_of, read_record, record_of
from workers.neff_cache.sync import URL, Localized, localized, place_at, pull, push
from workers.neff_cache.uses import Uses

log = logging.getLogger(__name__)


class Visit:
    """Of one manifest. The environment of this process names the cache; the package reads it when it compiles."""

    def __init__(self, manifest: Mapping[str, Any], source: Path, root: Path | None) -> None:
        """``root``: where compiled artifacts are kept, beside which local folders lie; None: there are none, and a
        cache in S3 is left to the package."""
        self._manifest = manifest
        self._source = str(source)
        self._place = None if root is None else localized(os.environ, keep_of(root))
        self._cache = neuron_cache.location(os.environ) if self._place is None else self._place.path
        self._uses: Uses | None = None

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Within it the package compiles what the cache does not have.

        1. What killed compilers have left is removed, and what is not as it was when it was compiled.
        2. What is elsewhere is brought here, and the package told so; raises EngineLoadError where that fails: to
           compile for hours what has been compiled is no way out.
        3. Failures of graphs are written down, for ``cache verify``.
        """
        if self._cache is None:
            yield
            return
        neuron_cache.make_ready(self._cache)  # 1
        _remove_damaged(self._cache, self._manifest)
        if self._place is not None:  # 2
            if not _has_all(self._cache, self._manifest):
                _bring(self._place, self._manifest)
            os.environ[URL] = str(self._place.path)
        self._uses = Uses(self._cache)
        try:
            yield
        except Exception as error:
            self._uses.keep_failure(self._manifest, self._source, error)  # 3
            raise

    def written_down(self, saved: Path | None = None, *, wait: bool = False) -> None:
        """It was compiled: keep its record, and bring back what is new. ``saved``: where the package saved its NEFFs.

        That goes on in the background, and is begun anew by the next model that is compiled; with ``wait``, here.
        Nothing of it fails a start.
        """
        if self._uses is not None:
            self._uses.keep(self._manifest, self._source, saved)
        if self._place is None or self._place.why == "read-only":
            return
        sender = threading.Thread(target=_send, args=(self._place,), name="neff-push", daemon=True)
        sender.start()
        if wait:
            sender.join()


def _has_all(cache: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether every graph of the manifest is here by its record: then nobody elsewhere is asked."""
    told = read_record(place_of(cache, name_of(manifest)))
    return told is not None and bool(told.graphs) and not missing_graphs(cache, told)


def _bring(place: Localized, manifest: Mapping[str, Any]) -> None:
    """Raises EngineLoadError."""
    told = record_of(manifest)
    try:
        got = pull(place_at(place.location), place.path, record=told.name, compiler=told.compiler)
    except SourceError as error:
        raise EngineLoadError(error.id, error.what, error.hint) from error
    except OSError as error:
        what = f"the NEFF cache {place.location} cannot be kept in {place.path}: {error}"
        raise EngineLoadError("compiled-unwritable", what, "is the disk full?") from error
    log.info(
        "%d graphs (%.1f GB) came from the NEFF cache %s to %s",
        len(got.entries),
        got.bytes / 1e9,
        place.location,
        place.path,
    )


def _send(place: Localized) -> None:
    try:
        sent = push(place.path, place_at(place.location))
    except (SourceError, OSError) as error:
        log.warning("what was compiled is not in the NEFF cache %s: %s", place.location, error)
        return
    log.info("%d graphs (%.1f GB) went to the NEFF cache %s", len(sent.entries), sent.bytes / 1e9, place.location)


def _remove_damaged(cache: Path, manifest: Mapping[str, Any]) -> None:
    """Of the graphs that the manifest needs, those that the compiler's wrapper would take though they have changed."""
    told = read_record(place_of(cache, name_of(manifest)))
    if told is None:
        return
    for name in missing_graphs(cache, told):
        if looks_finished(cache, name) and neuron_cache.remove(cache / name):
            log.warning("removed %s: it is not what was compiled; it is compiled anew", cache / name)
