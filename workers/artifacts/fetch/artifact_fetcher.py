"""Provides the artifacts that a replica loads on this host, from its store or from their source."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from workers.artifacts.fetch.progress import FetchStatus, Progress
from workers.artifacts.fetch.retry_policy import RetryPolicy
from workers.artifacts.sources.hub import is_offline
from workers.artifacts.sources.listing import Remote, SourceError
from workers.artifacts.sources.open_source import Relisted, SourceQuery
from workers.artifacts.sources.source_metadata import AWAY
from workers.artifacts.store import manifest
from workers.artifacts.store.store import Store
from workers.messages.actor_message import actor_message
from workers.messages.replica_config import ADAPTERS, Keys, ReplicaConfig, key_of


@actor_message
class WantedArtifact(SourceQuery, frozen=True, kw_only=True):
    """An artifact that a host must have."""

    artifact: str = ""  # the key of the exact content; empty: the source's current content


@actor_message
class FetchedArtifact(msgspec.Struct, frozen=True, kw_only=True):
    """An artifact that is on this host, complete and verified."""

    folder: str
    artifact: str  # the key of its content
    bytes: int
    moved: int = 0  # bytes transferred over the network
    seconds: float = 0.0
    warning: str = ""  # why it may differ from the source's current content
    flight: str = ""  # the id of the fetch, which several callers may share


def wanted_by(config: ReplicaConfig) -> dict[Keys, WantedArtifact]:
    """Returns the artifacts to fetch, in order; those of local folders are already there."""
    return {
        keys: WantedArtifact(
            source=origin.source,
            revision=origin.revision,
            artifact=origin.artifact,
            allow_pickle=config.model.allow_pickle,
            trust_remote_code=config.model.trust_remote_code,
            adapter=keys[0] == ADAPTERS,
        )
        for keys, _ in config.sources()
        if (origin := config.origins.get(key_of(keys))) is not None
    }


def with_folders(config: ReplicaConfig, landed: Mapping[Keys, FetchedArtifact]) -> ReplicaConfig:
    """Returns the config with the folders that hold what `wanted_by` has returned for it."""
    origins = dict(config.origins)
    for keys, artifact in landed.items():
        origin = origins[key_of(keys)]
        origins[key_of(keys)] = msgspec.structs.replace(origin, artifact=artifact.artifact, folder=artifact.folder)
    return msgspec.structs.replace(config, origins=origins)


def early_start_config(
    config: ReplicaConfig, landed: Mapping[Keys, FetchedArtifact], status: FetchStatus
) -> ReplicaConfig | None:
    """Returns the config of an early start: as ``with_folders``, while one artifact is still being fetched.

    ``status`` is of the first artifact that is wanted and has not ``landed``. None: it cannot be loaded yet, another
    one must be fetched after it, or it is not the exact content that is wanted.
    """
    wanted = wanted_by(config)
    keys, *later = [keys for keys in wanted if keys not in landed]
    arriving = FetchedArtifact(folder=status.folder, artifact=Path(status.folder).name, bytes=status.total)
    if later or not status.folder or wanted[keys].artifact not in ("", arriving.artifact):
        return None
    return with_folders(config, {**landed, keys: arriving})


class ArtifactFetcher:
    """Fetches wanted artifacts into the store of a host. Thread-safe."""

    def __init__(
        self, store: Store, opener: Callable[[WantedArtifact, RetryPolicy], Remote] = WantedArtifact.open
    ) -> None:
        self._store = store
        self._open = opener

    def __call__(self, wanted: WantedArtifact, progress: Progress, stop: threading.Event) -> FetchedArtifact:
        """Returns the artifact from the store, after fetching it if needed. Raises SourceError and Stopped.

        1. The exact content that is wanted, if the store has it, without a request; for hub sources in offline mode,
           the store's newest version, since the hub's own cache may hold less.
        2. The source's current content.
        3. If the source is unavailable: the store's newest version, with a warning.
        """
        began, warning = time.monotonic(), ""
        remote = self._open(wanted, RetryPolicy(on_silence=progress.report_silence))
        stored = self._stored(wanted.artifact or self._offline_key(wanted), remote)
        try:
            artifact = self._store.get(stored or remote, progress, stop)  # 1, 2
        except SourceError as error:
            held = self._store.newest(wanted.source, wanted.revision or "") if error.id in AWAY and not stored else None
            newest = None if held is None else self._stored(held.key, remote)
            if newest is None:
                raise
            artifact, warning = self._store.get(newest, progress, stop), str(error)  # 3
        return FetchedArtifact(
            folder=artifact.folder,
            artifact=artifact.key,
            bytes=artifact.bytes,
            moved=progress.moved,
            seconds=time.monotonic() - began,
            warning=warning,
            flight=secrets.token_hex(8),
        )

    def _offline_key(self, wanted: WantedArtifact) -> str:
        """Returns the key to use in the hub's offline mode; empty: the hub is online, or the store has nothing."""
        if not is_offline() or wanted.source.startswith("s3://") or wanted.trust_remote_code:
            return ""  # the store does not record whether remote code was fetched as well
        held = self._store.newest(wanted.source, wanted.revision or "")
        return "" if held is None else held.key

    def _stored(self, key: str, remote: Remote) -> Remote | None:
        """Returns a remote that lists what the store has already, so that only damaged files are fetched."""
        published = manifest.published(self._store.root / "artifacts" / key) if key else None
        return None if published is None else Relisted(published.listing, remote.fetch)
