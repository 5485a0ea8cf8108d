"""Prepares the NEFF cache before a model is compiled, and records its graphs afterwards."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from workers.artifacts.sources.listing import SourceError
from workers.compiled import neuron_cache
from workers.compiled.graph_records import GraphUses, record_in, remove_damaged
from workers.compiled.graph_sync import Localized, cache_of, pull_for, push
from workers.compiled.neuron_cache import URL, is_finished
from workers.compiled.storage import log_unavailable, storage_at
from workers.messages.engine_protocol import EngineLoadError

log = logging.getLogger(__name__)


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
        neuron_cache.make_ready(self._cache)  # 1
        remove_damaged(self._cache, self._manifest)
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
    record = record_in(cache, manifest)
    return record is not None and bool(record.graphs) and all(is_finished(cache, name) for name in record.graphs)


def _bring(place: Localized, manifest: Mapping[str, Any]) -> None:
    """Pulls the graphs of the manifest. Raises EngineLoadError."""
    try:
        got = pull_for(place, manifest)
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
        sent = push(place.path, storage_at(place.location))
    except (SourceError, OSError) as error:
        log.warning("cannot push compiled graphs to the NEFF cache %s: %s", place.location, error)
        return
    log.info("pushed %d graphs (%.1f GB) to the NEFF cache %s", len(sent.entries), sent.bytes / 1e9, place.location)
