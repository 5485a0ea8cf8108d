"""Opening a source: the hub, or S3, by the form of its name; what is fetched of it is chosen here for both."""

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
    """A source, of which only the files of the model are seen."""

    def __init__(self, source: str, remote: Remote, *, allow_pickle: bool, trust_remote_code: bool) -> None:
        self._source = source.rstrip("/")  # which means nothing: by one name it is found again
        self._remote = remote
        self._allow_pickle = allow_pickle
        self._trust_remote_code = trust_remote_code

    def listing(self) -> Listing:
        """See ``Remote.listing``. Raises SourceError ``pickle-refused`` and ``name-unsafe`` too."""
        found = msgspec.structs.replace(self._remote.listing(), source=self._source)
        return selected(found, allow_pickle=self._allow_pickle, trust_remote_code=self._trust_remote_code)

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
    patience: RetryPolicy | None = None,
) -> Remote:
    """What is at ``source``: s3://bucket/prefix, or a hub id. Asks nobody yet.

    ``revision`` is of the hub: a branch, tag or commit. ``offline`` None: as HF_HUB_OFFLINE says; a hub id is then
    looked for in the hub's own cache on this machine. Credentials come from the environment of this process, as boto3
    and huggingface_hub find them. ``patience``: with a source that does not answer.

    Raises SourceError, and ValueError for a path, which nobody has to fetch.
    """
    kind = source_kind(source)
    if kind == "path":
        raise ValueError(f"{source} is a path")
    remote: Remote
    if kind == "hub":
        from workers.artifacts.sources.hub import HubRemote

        remote = HubRemote(source, revision, offline=offline, patience=patience)
    else:
        if revision is not None:
            what = f"{source} has no revision {revision!r}: only the hub has branches, tags and commits"
            raise SourceError("revision-without-hub", what, "name another prefix instead")
        from workers.artifacts.fetch.transfer import S3Remote

        remote = S3Remote(source, patience=patience)
    return Selected(source, remote, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
