"""Bringing what a replica loads to this host: from its store, or from where it comes."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from placements.spec.schema import source_kind
from workers.artifacts.fetch.progress import Progress
from workers.artifacts.fetch.retry_policy import RetryPolicy
from workers.artifacts.sources.hub import is_offline
from workers.artifacts.sources.listing import Listing, Remote, SourceError
from workers.artifacts.sources.open_source import open_remote
from workers.artifacts.sources.source_metadata import AWAY
from workers.artifacts.store import manifest
from workers.artifacts.store.store import Store
from workers.messages.replica_config import Origin, ReplicaConfig


class WantedArtifact(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be brought to a host."""

    source: str  # as the spec names it
    revision: str | None = None  # of the hub
    artifact: str = ""  # the key of the very content that is meant; empty: what there is now
    allow_pickle: bool = False
    trust_remote_code: bool = False


class FetchedArtifact(msgspec.Struct, frozen=True, kw_only=True):
    """It is here, whole and verified."""

    folder: str
    artifact: str  # the key of its content
    bytes: int
    moved: int = 0  # bytes that came over the network for it
    seconds: float = 0.0
    warning: str = ""  # it may not be what the source has now
    flight: str = ""  # a name of the fetch, which several may have waited for


class ArrivingArtifact(msgspec.Struct, frozen=True, kw_only=True):
    """It is being fetched, into a folder that can be loaded from meanwhile: see arriving.py."""

    folder: str
    artifact: str  # the key of the content that is listed
    bytes: int
    left: int  # bytes that are still to come
    moved: int  # bytes that came over the network so far

    @property
    def landed(self) -> FetchedArtifact:
        """As it will be."""
        return FetchedArtifact(folder=self.folder, artifact=self.artifact, bytes=self.bytes)


def wanted_by(config: ReplicaConfig) -> tuple[WantedArtifact | None, WantedArtifact | None]:
    """What must be brought for the model and for its draft; None: it is a folder, or there is none."""
    return (
        _wanted(config, config.source, config.revision, config.origin),
        _wanted(config, config.draft_source, config.draft_revision, config.draft_origin),
    )


def _wanted(
    config: ReplicaConfig, source: str | None, revision: str | None, origin: Origin | None
) -> WantedArtifact | None:
    if origin is None and (source is None or source_kind(source) == "path"):
        return None
    origin = origin or Origin(source=source or "", revision=revision)
    return WantedArtifact(
        source=origin.source,
        revision=origin.revision,
        artifact=origin.artifact,
        allow_pickle=config.allow_pickle,
        trust_remote_code=config.trust_remote_code,
    )


def with_folders(
    config: ReplicaConfig,
    wanted: tuple[WantedArtifact | None, WantedArtifact | None],
    landed: tuple[FetchedArtifact | None, FetchedArtifact | None],
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


def meanwhile(
    config: ReplicaConfig,
    wanted: tuple[WantedArtifact | None, WantedArtifact | None],
    landed: Sequence[FetchedArtifact | None],
    going: ArrivingArtifact,
) -> ReplicaConfig | None:
    """As ``with_folders``, while ``going`` arrives: the one of ``wanted`` that comes after those that have ``landed``.

    None: another one is still to be fetched after it, or it is not the very content that is meant.
    """
    now, *later = wanted[len(landed) :]
    if now is None or any(later) or now.artifact not in ("", going.artifact):
        return None
    model, draft = (*landed, going.landed, None)[:2]
    return with_folders(config, wanted, (model, draft))


def _origin(wanted: WantedArtifact, landed: FetchedArtifact) -> Origin:
    return Origin(source=wanted.source, revision=wanted.revision, artifact=landed.artifact)


class ArtifactFetcher:
    """Brings what is wanted into the store of a host. Used by any number of threads."""

    def __init__(self, store: Store, opened: Callable[[WantedArtifact, RetryPolicy], Remote] | None = None) -> None:
        """``opened`` makes the source of what is wanted, with this patience; None: by its name, as `open_remote`."""
        self._store = store
        self._opened = opened or _opened
        self._going: dict[WantedArtifact, Path] = {}  # what is fetched from its source now, and to where

    def __call__(self, wanted: WantedArtifact, progress: Progress, stop: threading.Event) -> FetchedArtifact:
        """It is in the store. Raises SourceError and Stopped.

        1. The very content that is meant, where it is here, without a question to anybody; offline what is here of the
           hub's, since the hub's own cache may hold less of it.
        2. What the source has now.
        3. Where the source is away: the newest of it that is here, with a warning.
        """
        began, warning = time.monotonic(), ""
        remote: Remote = _Told(self._opened(wanted, RetryPolicy(told=progress.tell)), self._going, wanted)
        same = self._here(wanted.artifact or self._offline(wanted), remote)
        try:
            found = self._store.get(same or remote, progress, stop)  # 1, 2
        except SourceError as error:
            held = self._store.held(wanted.source, wanted.revision or "") if error.id in AWAY and not same else None
            newest = None if held is None else self._here(held.key, remote)
            if newest is None:
                raise
            found, warning = self._store.get(newest, progress, stop), str(error)  # 3
        return FetchedArtifact(
            folder=found.folder,
            artifact=found.key,
            bytes=found.bytes,
            moved=progress.moved,
            seconds=time.monotonic() - began,
            warning=warning,
            flight=secrets.token_hex(8),
        )

    def arriving(self, wanted: WantedArtifact, progress: Progress) -> ArrivingArtifact | None:
        """What can be loaded from already, where somebody calls this object with that ``progress``; None: nothing.

        Another one that fetches the same does not count, since nobody knows how fast that is.
        """
        folder, status = self._going.get(wanted), progress.status()
        if folder is None or status.phase != "fetching" or not status.total:
            return None
        left = max(0, status.total - status.done)
        return ArrivingArtifact(
            folder=str(folder), artifact=folder.name, bytes=status.total, left=left, moved=progress.moved
        )

    def _offline(self, wanted: WantedArtifact) -> str:
        """The key of what counts for the hub while nobody may ask it; empty: it may be asked, or nothing is here."""
        if not is_offline() or wanted.source.startswith("s3://") or wanted.trust_remote_code:
            return ""  # the last: nobody knows whether what is here was fetched with its code
        held = self._store.held(wanted.source, wanted.revision or "")
        return "" if held is None else held.key

    def _here(self, key: str, remote: Remote) -> _Here | None:
        kept = manifest.published(self._store.root / "artifacts" / key) if key else None
        return None if kept is None else _Here(kept.listing(), remote)


def _opened(wanted: WantedArtifact, patience: RetryPolicy) -> Remote:
    return open_remote(
        wanted.source,
        wanted.revision,
        allow_pickle=wanted.allow_pickle,
        trust_remote_code=wanted.trust_remote_code,
        patience=patience,
    )


class _Told:
    """A source that tells to where it is being fetched."""

    def __init__(self, remote: Remote, going: dict[WantedArtifact, Path], wanted: WantedArtifact) -> None:
        self._remote = remote
        self._going = going
        self._wanted = wanted

    def listing(self) -> Listing:
        return self._remote.listing()

    def fetch(self, listing: Listing, folder: Path, progress: Progress, stop: threading.Event) -> None:
        self._going[self._wanted] = folder
        try:
            self._remote.fetch(listing, folder, progress, stop)
        finally:
            if self._going.get(self._wanted) == folder:  # a later one of the same name may fetch other content
                del self._going[self._wanted]


class _Here:
    """A source of which is listed what is here already; only what turns out to be damaged is fetched."""

    def __init__(self, listing: Listing, remote: Remote) -> None:
        self._listing = listing
        self._remote = remote

    def listing(self) -> Listing:
        return self._listing

    def fetch(self, listing: Listing, folder: Path, progress: Progress, stop: threading.Event) -> None:
        self._remote.fetch(listing, folder, progress, stop)
