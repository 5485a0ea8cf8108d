"""One model's way through the NEFF cache: made ready before its graphs are compiled or taken, written down after."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from workers.artifacts.sources.listing import SourceError
from workers.messages.engine_protocol import EngineLoadError
from workers.neff_cache import compiler_cache
from workers.neff_cache.candidates import keep_of
from workers.neff_cache.graph_uses import GraphUses
from workers.neff_cache.record import (
    Proof,
    is_finished,
    name_of,
    of_one_model,
    place_of,
    read_record,
    record_of,
    records_in,
)
from workers.neff_cache.sync import URL, Localized, localized, place_at, pull, push
from workers.neff_cache.unavailable import say

log = logging.getLogger(__name__)


class CompileSession:
    """Of one manifest. The environment of this process names the cache; the package reads it when it compiles."""

    def __init__(self, manifest: Mapping[str, Any], source: Path, root: Path | None, shared: bool = True) -> None:
        """``root``: where compiled artifacts are kept, beside which local folders lie; None: there are none, and a
        cache in S3 is left to the package. ``shared`` False: no other compile finds its graphs, since their keys hold a
        path of this host, so that none are fetched (the ``--logfile`` of neuronx-distributed's ``ModelBuilder``)."""
        self._manifest = manifest
        self._source = str(source)
        self._place = None if root is None else localized(os.environ, keep_of(root))
        self._cache = compiler_cache.location(os.environ) if self._place is None else self._place.path
        self._shared = shared
        self._uses: GraphUses | None = None

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Within it the package compiles what the cache does not have.

        1. What killed compilers have left is removed, and what is not as it was when it was compiled.
        2. What is elsewhere is brought here, and the package told so. A cache that gives no answer is told in the log:
           then what is not here is compiled. Raises EngineLoadError where this host's disk does not take it.
        3. Failures of graphs are written down, for ``cache verify``.
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
            with _named(self._place):
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


@contextlib.contextmanager
def _named(place: Localized | None) -> Iterator[None]:
    """The folder that takes the place of a cache elsewhere is named to the package. Not for longer: the next model of
    this process, as a draft, finds by that variable what is elsewhere."""
    before = os.environ.get(URL)
    if place is not None:
        os.environ[URL] = str(place.path)
    try:
        yield
    finally:
        if place is not None and before is None:
            os.environ.pop(URL, None)
        elif place is not None and before is not None:
            os.environ[URL] = before


def _has_all(cache: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether every graph of the manifest is here by its record: then nobody elsewhere is asked. What is damaged is
    gone by then."""
    told = read_record(place_of(cache, name_of(manifest)))
    return told is not None and bool(told.graphs) and all(is_finished(cache, name) for name in told.graphs)


def _bring(place: Localized, manifest: Mapping[str, Any]) -> None:
    """Raises EngineLoadError."""
    told = record_of(manifest)
    try:
        got = pull(place_at(place.location), place.path, record=told.name, compiler=told.compiler)
    except SourceError as error:
        say(place.location, error)
        return
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
    """Of the graphs that the manifest may need, those that the compiler's wrapper would take though they have changed:
    all of its model, for with other buckets it shares some of them."""
    records = records_in(cache)
    for name in Proof(cache, records).damaged(of_one_model(records, manifest)):
        if compiler_cache.remove(cache / name):
            log.warning("removed %s: it is not what was compiled; it is compiled anew", cache / name)
