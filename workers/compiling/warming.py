"""Bringing to a host what the start of a replica needs, before anybody starts it."""

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
from workers.compiling.start_forecast import needed
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure
from workers.neff_cache import compiled_cache
from workers.neff_cache.candidates import CACHED, keep_of
from workers.neff_cache.compiled_artifacts import entry
from workers.neff_cache.record import name_of, record_of
from workers.neff_cache.sync import localized, place_at, pull


class Warmed(msgspec.Struct, frozen=True, kw_only=True):
    """What came for one replica."""

    bytes: int = 0  # over the network
    brought: tuple[str, ...] = ()  # in words
    problem: str = ""  # why not all of it came


def warm(
    config: ReplicaConfig, store: Store, stop: threading.Event, began: Callable[[str], Progress] = Progress
) -> Warmed:
    """Fetch the model and its draft, then what was compiled of them elsewhere. Compiles nothing, and blocks.

    ``began`` makes the progress of a fetch, of its source.
    """
    size, brought = 0, []
    try:
        for what, count in _bring(config, store, stop, began):
            size += count
            brought.append(what)
    except (SourceError, EngineLoadError, OSError) as error:
        return Warmed(bytes=size, brought=tuple(brought), problem=str(error))
    return Warmed(bytes=size, brought=tuple(brought))


def _bring(
    config: ReplicaConfig, store: Store, stop: threading.Event, began: Callable[[str], Progress]
) -> Iterator[tuple[str, int]]:
    """What came, and its bytes."""
    wanted = wanted_by(config)
    landed = [None if one is None else ArtifactFetcher(store)(one, began(one.source), stop) for one in wanted]
    for one, here in zip(wanted, landed, strict=True):
        if one is not None and here is not None and here.moved:
            yield one.source, here.moved
    config = with_folders(config, wanted, (landed[0], landed[1]))
    told = needed(config, read=True)
    if isinstance(told, Failure):
        raise EngineLoadError(told.id, told.what, told.hint)
    yield from _compiled(config, told, stop)
    if config.engine == CACHED and config.compiled is not None:
        yield from _graphs(config, told, stop)


def _compiled(config: ReplicaConfig, told: Predicted, stop: threading.Event) -> Iterator[tuple[str, int]]:
    """Whole artifacts that another host has pushed."""
    for one in told.wanted:
        if not one.folder or one.complete or not config.neff_cache:
            continue
        with entry(Path(one.folder).parent, one.manifest) as found:
            if found.complete:
                continue
            try:
                is_here = compiled_cache.pull(found, config.neff_cache, stop)
            finally:
                with contextlib.suppress(OSError):
                    found.path.rmdir()  # where nothing came, nothing is left: it is empty only then
            if is_here:
                size = sum(path.stat().st_size for path in found.path.rglob("*") if path.is_file())
                yield f"compiled {one.role}", size


def _graphs(config: ReplicaConfig, told: Predicted, stop: threading.Event) -> Iterator[tuple[str, int]]:
    """Entries of Neuron's cache, where the process would not use it where it is."""
    place = localized({**os.environ, **config.env}, keep_of(Path(config.compiled or "")))
    for one in told.wanted if place is not None else ():
        assert place is not None
        compiler = record_of(one.manifest).compiler
        got = pull(place_at(place.location), place.path, record=name_of(one.manifest), compiler=compiler, stop=stop)
        if got.entries:
            yield f"{len(got.entries)} graphs of the {one.role}", got.bytes
