"""Opens a source by the form of its name, the hub or S3, and selects the files that are fetched."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2s
from pathlib import Path

import msgspec

from placements.spec.notation import source_kind
from workers.artifacts.fetch.progress import Progress
from workers.artifacts.fetch.retry_policy import RetryPolicy
from workers.artifacts.sources.layout import selected, selected_of_adapter
from workers.artifacts.sources.listing import Listing, Remote, SourceError
from workers.messages.actor_message import actor_message


@dataclass(frozen=True)
class Relisted:
    """A remote with another listing."""

    listing: Callable[[], Listing]
    fetch: Callable[[Listing, Path, Progress, threading.Event], None]


@actor_message
class SourceQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A source and the kinds of files that may be fetched from it."""

    source: str  # s3://bucket/prefix, or a hub id
    revision: str | None = None  # a branch, tag or commit; hub sources only
    allow_pickle: bool = False
    trust_remote_code: bool = False
    adapter: bool = False  # a LoRA adapter

    @property
    def digest(self) -> str:
        fields = msgspec.structs.asdict(self)
        if not self.adapter:  # as before there were adapters
            del fields["adapter"]
        return blake2s(msgspec.json.encode(fields), digest_size=16).hexdigest()

    def open(self, retry_policy: RetryPolicy | None = None) -> Remote:
        """Opens the files of the model or adapter, as ``open_all``."""
        return self.select(self.open_all(retry_policy))

    def open_all(self, retry_policy: RetryPolicy | None = None) -> Remote:
        """Opens the source without a request. ``retry_policy``: retries when it does not answer.

        With HF_HUB_OFFLINE, a hub id is read from the hub's own cache on this machine. Credentials come from the
        environment of this process, as boto3 and huggingface_hub find them.

        Raises SourceError, and ValueError for a path, which needs no fetch.
        """
        kind = source_kind(self.source)
        if kind == "path":
            raise ValueError(f"{self.source} is a path")
        if kind == "hub":
            from workers.artifacts.sources.hub import HubRemote

            return HubRemote(self.source, self.revision, retry_policy=retry_policy)
        if self.revision is not None:
            message = f"{self.source} has no revision {self.revision!r}: only the hub has branches, tags and commits"
            raise SourceError("revision-without-hub", message, "use another prefix instead")
        from workers.artifacts.fetch.transfer import S3Remote

        return S3Remote(self.source, retry_policy=retry_policy)

    def select(self, remote: Remote) -> Remote:
        """Returns the remote restricted to the files of the model or adapter. Its ``listing`` also raises SourceError
        ``pickle-refused``, ``layout-unknown`` and ``name-unsafe``."""

        def listing() -> Listing:
            source = self.source.rstrip("/")  # normalized, so that the same source has one name
            every = msgspec.structs.replace(remote.listing(), source=source)
            if self.adapter:
                return selected_of_adapter(every)
            return selected(every, allow_pickle=self.allow_pickle, trust_remote_code=self.trust_remote_code)

        return Relisted(listing, remote.fetch)
