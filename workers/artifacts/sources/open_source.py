"""Opens a source by the form of its name, the hub or S3, and selects the files that are fetched."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec.structs

from placements.spec.schema import source_kind
from workers.artifacts.fetch.progress import Progress
from workers.artifacts.fetch.retry_policy import RetryPolicy
from workers.artifacts.sources.layout import selected
from workers.artifacts.sources.listing import Listing, Remote, SourceError


class Selected:
    """A source restricted to the files of the model."""

    def __init__(self, source: str, remote: Remote, *, allow_pickle: bool, trust_remote_code: bool) -> None:
        self._source = source.rstrip("/")  # normalized, so that the same source has one name
        self._remote = remote
        self._allow_pickle = allow_pickle
        self._trust_remote_code = trust_remote_code

    def listing(self) -> Listing:
        """See ``Remote.listing``. Also raises SourceError ``pickle-refused`` and ``name-unsafe``."""
        listing = msgspec.structs.replace(self._remote.listing(), source=self._source)
        return selected(listing, allow_pickle=self._allow_pickle, trust_remote_code=self._trust_remote_code)

    def fetch(self, listing: Listing, folder: Path, progress: Progress, stop: threading.Event) -> None:
        """See ``Remote.fetch``."""
        self._remote.fetch(listing, folder, progress, stop)


def open_remote(
    source: str,
    revision: str | None = None,
    *,
    offline: bool | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    retry_policy: RetryPolicy | None = None,
) -> Remote:
    """Opens ``source``, s3://bucket/prefix or a hub id, without a request.

    ``revision``: a branch, tag or commit of the hub. ``offline`` None: as set by HF_HUB_OFFLINE; an offline hub id is
    read from the hub's own cache on this machine. Credentials come from the environment of this process, as boto3 and
    huggingface_hub find them. ``retry_policy``: retries when the source does not answer.

    Raises SourceError, and ValueError for a path, which needs no fetch.
    """
    kind = source_kind(source)
    if kind == "path":
        raise ValueError(f"{source} is a path")
    remote: Remote
    if kind == "hub":
        from workers.artifacts.sources.hub import HubRemote

        remote = HubRemote(source, revision, offline=offline, retry_policy=retry_policy)
    else:
        if revision is not None:
            message = f"{source} has no revision {revision!r}: only the hub has branches, tags and commits"
            raise SourceError("revision-without-hub", message, "use another prefix instead")
        from workers.artifacts.fetch.transfer import S3Remote

        remote = S3Remote(source, retry_policy=retry_policy)
    return Selected(source, remote, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
