"""Fetches to a host what the start of a replica needs, ahead of the start."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from workers.artifacts.fetch.artifact_fetcher import ArtifactFetcher, wanted_by, with_folders
from workers.artifacts.fetch.progress import Progress
from workers.artifacts.sources.listing import SourceError
from workers.artifacts.store.store import Store
from workers.compiling.build import Predicted
from workers.compiling.prefetch import needed
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure
from workers.neff_cache import shared_artifacts
from workers.neff_cache.candidates import CACHED, keep_of
from workers.neff_cache.compiled_artifacts import entry
from workers.neff_cache.record import name_of, record_of
from workers.neff_cache.sync import localized, place_at, pull


class Warmed(msgspec.Struct, frozen=True, kw_only=True):
    """What was fetched for one replica."""

    bytes: int = 0  # over the network
    brought: tuple[str, ...] = ()  # for display
    problem: str = ""  # why the rest could not be fetched


def warm(
    config: ReplicaConfig, store: Store, stop: threading.Event, began: Callable[[str], Progress] = Progress
) -> Warmed:
    """Fetches the model, its draft and adapters, then compiled artifacts from remote caches. Compiles nothing; blocks.

    ``began`` creates the progress of a fetch from its source.
    """
    size, brought = 0, []
    try:
        for name, count in _bring(config, store, stop, began):
            size += count
            brought.append(name)
    except (SourceError, EngineLoadError, OSError) as error:
        return Warmed(bytes=size, brought=tuple(brought), problem=str(error))
    return Warmed(bytes=size, brought=tuple(brought))


def _bring(
    config: ReplicaConfig, store: Store, stop: threading.Event, began: Callable[[str], Progress]
) -> Iterator[tuple[str, int]]:
    """Fetches each item, and yields its name and size in bytes."""
    landed = {}
    for keys, want in wanted_by(config).items():
        landed[keys] = ArtifactFetcher(store)(want, began(want.source), stop)
        if landed[keys].moved:
            yield want.source, landed[keys].moved
    config = with_folders(config, landed)
    predicted = needed(config, read=True)
    if isinstance(predicted, Failure):
        raise EngineLoadError(predicted.id, predicted.what, predicted.hint)
    yield from _compiled(config, predicted, stop)
    if config.model.engine == CACHED and config.run.compiled is not None:
        yield from _graphs(config, predicted, stop)


def _compiled(config: ReplicaConfig, predicted: Predicted, stop: threading.Event) -> Iterator[tuple[str, int]]:
    """Fetches complete artifacts that another host has pushed."""
    for artifacts in predicted.wanted:
        if not artifacts.folder or artifacts.complete or not config.model.neff_cache:
            continue
        with entry(Path(artifacts.folder).parent, artifacts.manifest) as held:
            if held.complete:
                continue
            try:
                is_here = shared_artifacts.pull(held, config.model.neff_cache, stop)
            finally:
                with contextlib.suppress(OSError):
                    held.path.rmdir()  # only if nothing was fetched, and it is empty
            if is_here:
                size = sum(path.stat().st_size for path in held.path.rglob("*") if path.is_file())
                yield f"compiled {artifacts.role}", size


def _graphs(config: ReplicaConfig, predicted: Predicted, stop: threading.Event) -> Iterator[tuple[str, int]]:
    """Fetches entries of a remote Neuron cache that is replaced by a local folder."""
    place = localized({**os.environ, **config.place.env}, keep_of(Path(config.run.compiled or "")))
    for artifacts in predicted.wanted if place is not None else ():
        assert place is not None
        compiler = record_of(artifacts.manifest).compiler
        got = pull(
            place_at(place.location), place.path, record=name_of(artifacts.manifest), compiler=compiler, stop=stop
        )
        if got.entries:
            yield f"{len(got.entries)} graphs of the {artifacts.role}", got.bytes
