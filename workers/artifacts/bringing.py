"""Bringing what a replica loads to this host: from its store, or from where it comes."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from placements.spec import source_kind
from workers.artifacts import manifest
from workers.artifacts.heads import AWAY
from workers.artifacts.listing import Listing, Remote, SourceError
from workers.artifacts.progress import Progress
from workers.artifacts.sources import open_remote
from workers.artifacts.store import Store
from workers.config import Origin, ReplicaConfig


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be brought to a host."""

    source: str  # as the spec names it
    revision: str | None = None  # of the hub
    artifact: str = ""  # the key of the very content that is meant; empty: what there is now
    allow_pickle: bool = False
    trust_remote_code: bool = False


class Landed(msgspec.Struct, frozen=True, kw_only=True):
    """It is here, whole and verified."""

    folder: str
    artifact: str  # the key of its content
    bytes: int
    moved: int = 0  # bytes that came over the network for it
    seconds: float = 0.0
    warning: str = ""  # it may not be what the source has now
    flight: str = ""  # a name of the fetch, which several may have waited for


def wanted_by(config: ReplicaConfig) -> tuple[Wanted | None, Wanted | None]:
    """What must be brought for the model and for its draft; None: it is a folder, or there is none."""
    return (
        _wanted(config, config.source, config.revision, config.origin),
        _wanted(config, config.draft_source, config.draft_revision, config.draft_origin),
    )


def _wanted(config: ReplicaConfig, source: str | None, revision: str | None, origin: Origin | None) -> Wanted | None:
    if origin is None and (source is None or source_kind(source) == "path"):
        return None
    origin = origin or Origin(source=source or "", revision=revision)
    return Wanted(
        source=origin.source,
        revision=origin.revision,
        artifact=origin.artifact,
        allow_pickle=config.allow_pickle,
        trust_remote_code=config.trust_remote_code,
    )


def with_folders(
    config: ReplicaConfig, wanted: tuple[Wanted | None, Wanted | None], landed: tuple[Landed | None, Landed | None]
) -> ReplicaConfig:
    """The configuration as its replica is told: it loads what has landed for ``wanted``, which is `wanted_by` it."""
    (model, draft), (model_here, draft_here) = wanted, landed
    if model is not None and model_here is not None:
        config = msgspec.structs.replace(config, source=model_here.folder, origin=_origin(model, model_here))
    if draft is not None and draft_here is not None:
        config = msgspec.structs.replace(
            config, draft_source=draft_here.folder, draft_origin=_origin(draft, draft_here)
        )
    return config


def _origin(wanted: Wanted, landed: Landed) -> Origin:
    return Origin(source=wanted.source, revision=wanted.revision, artifact=landed.artifact)


class Bringing:
    """Brings what is wanted into the store of a host. Used by any number of threads."""

    def __init__(self, store: Store, opened: Callable[[Wanted], Remote] | None = None) -> None:
        """``opened`` makes the source of what is wanted; None: by its name, as `open_remote`."""
        self._store = store
        self._opened = opened or _opened

    def __call__(self, wanted: Wanted, progress: Progress, stop: threading.Event) -> Landed:
        """It is in the store. Raises SourceError and Stopped.

        1. The very content that is meant, where it is here, without a question to anybody.
        2. What the source has now.
        3. Where the source is away: the newest of it that is here, with a warning.
        """
        began, warning = time.monotonic(), ""
        remote = self._opened(wanted)
        same = self._here(wanted.artifact, remote)
        try:
            found = self._store.get(same or remote, progress, stop)  # 1, 2
        except SourceError as error:
            held = self._store.held(wanted.source, wanted.revision or "") if error.id in AWAY and not same else None
            newest = None if held is None else self._here(held.key, remote)
            if newest is None:
                raise
            found, warning = self._store.get(newest, progress, stop), str(error)  # 3
        return Landed(
            folder=found.folder,
            artifact=found.key,
            bytes=found.bytes,
            moved=progress.moved,
            seconds=time.monotonic() - began,
            warning=warning,
            flight=secrets.token_hex(8),
        )

    def _here(self, key: str, remote: Remote) -> _Here | None:
        kept = manifest.published(self._store.root / "artifacts" / key) if key else None
        return None if kept is None else _Here(kept.listing(), remote)


def _opened(wanted: Wanted) -> Remote:
    return open_remote(
        wanted.source,
        wanted.revision,
        allow_pickle=wanted.allow_pickle,
        trust_remote_code=wanted.trust_remote_code,
    )


class _Here:
    """A source of which is listed what is here already; only what turns out to be damaged is fetched."""

    def __init__(self, listing: Listing, remote: Remote) -> None:
        self._listing = listing
        self._remote = remote

    def listing(self) -> Listing:
        return self._listing

    def fetch(self, listing: Listing, folder: Path, progress: Progress, stop: threading.Event) -> None:
        self._remote.fetch(listing, folder, progress, stop)
