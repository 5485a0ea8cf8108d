"""Fetches models from the Hugging Face Hub, or from another server with its API (HF_ENDPOINT).

huggingface_hub makes the requests, with the token that it finds (HF_TOKEN, or the file that ``hf auth login`` wrote),
and with Xet if the server supports it. Its exceptions may hold signed URLs, so their texts are never repeated here.
"""

from __future__ import annotations

import errno
import hashlib
import inspect
import logging
import os
import re
import shutil
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlsplit

from workers.artifacts.fetch.progress import Progress
from workers.artifacts.fetch.retry_policy import RetryPolicy
from workers.artifacts.sources.layout import INDEX, PICKLES
from workers.artifacts.sources.listing import SMALL_BYTES, Listing, RemoteFile, SourceError, Stopped
from workers.artifacts.store.contents import digest_of
from workers.host import foreign_files

ASK_S = 10.0  # timeout of a metadata request
TRIES = 3  # of a file that fails verification
AT_ONCE = 8  # files
_WEIGHTS = PICKLES | {".safetensors"}
STAGING = ".fetching"  # subfolder of unverified files

_T = TypeVar("_T")


class HubRemote:
    """A model of the hub as a ``Remote``. ``revision`` None: the branch main."""

    def __init__(
        self,
        source: str,
        revision: str | None = None,
        *,
        retry_policy: RetryPolicy | None = None,
    ) -> None:
        self._source = source
        self._revision = revision
        self._offline = is_offline()
        self._retry_policy = retry_policy or RetryPolicy()

    def listing(self) -> Listing:
        """Returns the files of the revision and its commit. Offline: from the hub's cache on this machine."""
        if self._offline:
            return _cached(self._source, self._revision)
        about: dict[str, Any] = {"revision": self._revision, "files_metadata": True, "timeout": ASK_S}
        info = self._retried(lambda: _api().model_info(self._source, **about))
        files = [_file(sibling) for sibling in info.siblings or ()]
        files_by_name = tuple(sorted(files, key=lambda file: file.name))
        return Listing(source=self._source, revision=info.sha or "", files=files_by_name)

    def fetch(self, listing: Listing, folder: Path, progress: Progress, stop: threading.Event) -> None:
        """See ``Remote.fetch``. Keeps complete files and restarts partial ones. Small files are fetched first, then
        the others by name."""
        complete = [file for file in listing.files if file.is_in(folder)]
        progress.expect(listing.bytes, sum(file.size for file in complete))
        progress.enter("fetching")
        missing = sorted(set(listing.files) - set(complete), key=lambda file: (file.size > SMALL_BYTES, file.name))
        shutil.rmtree(folder / STAGING, ignore_errors=True)
        try:
            with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="hub") as pool:
                fetches = [pool.submit(self._fetch_file, listing, file, folder, progress, stop) for file in missing]
                wait(fetches, return_when=FIRST_EXCEPTION)
                pool.shutdown(wait=False, cancel_futures=True)  # those after a failed one
                for fetch in fetches:
                    fetch.result()
        finally:
            shutil.rmtree(folder / STAGING, ignore_errors=True)

    def _fetch_file(
        self, listing: Listing, file: RemoteFile, folder: Path, progress: Progress, stop: threading.Event
    ) -> None:
        """Fetches and verifies one file. Raises SourceError, Stopped, and OSError of the disk."""
        target, staged = folder / file.name, folder / STAGING / hashlib.sha1(file.name.encode()).hexdigest()
        transfer = _FileTransfer(progress, stop)
        for _ in range(TRIES):
            transfer.check()
            if self._offline:
                fetched = self._copied(listing, file, staged)
            else:
                fetched = self._retried(lambda: self._download(listing, file, staged, transfer), transfer)
            if _matches(fetched, file):
                progress.digests[file.name] = digest_of(fetched, stop.is_set)  # from the page cache
                transfer.finish(file.size)
                target.parent.mkdir(parents=True, exist_ok=True)
                fetched.replace(target)
                return
            transfer.forget()
            shutil.rmtree(staged, ignore_errors=True)
        message = f"{file.name} of {listing.source} failed verification {TRIES} times: its content is not the hub's"
        raise SourceError("hub-damaged", message, "check for a proxy that changes content; try again later")

    def _copied(self, listing: Listing, file: RemoteFile, staged: Path) -> Path:
        """Copies a file from the hub's cache on this machine."""
        source = _snapshot(self._source, listing.revision) / file.name
        copy = staged / file.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(source, copy)
        except FileNotFoundError:
            raise _offline_error(self._source, f"no longer has {file.name}") from None
        return copy

    def _download(self, listing: Listing, file: RemoteFile, staged: Path, transfer: _FileTransfer) -> Path:
        from huggingface_hub import hf_hub_download

        silence_loggers()
        download: Callable[..., str] = hf_hub_download
        progress_bar = {"tqdm_class": transfer.bar()} if "tqdm_class" in inspect.signature(download).parameters else {}
        transfer.forget()
        place = {"local_dir": staged, "cache_dir": _cache(), "endpoint": _endpoint(), "etag_timeout": ASK_S}
        try:
            return Path(download(self._source, file.name, revision=listing.revision, **place, **progress_bar))
        except RuntimeError as error:  # Xet raises a plain RuntimeError for every failure
            if full := _DISK_FULL.search(str(error)):
                raise OSError(int(full[1]), os.strerror(int(full[1])), str(staged)) from None
            raise

    def _retried(self, work: Callable[[], _T], transfer: _FileTransfer | None = None) -> _T:
        """Returns the result of ``work``, retried while the hub is unreachable, up to the retry deadline."""
        retry, attempt = self._retry_policy.begin(), 0
        while True:
            before = transfer.last if transfer else 0
            try:
                result = work()
                retry.arrived()
                return result
            except Stopped:
                raise
            except Exception as error:  # each major version of huggingface_hub has another HTTP library
                source_error = _source_error(error, self._source, self._revision)
                if source_error is None:
                    raise
                if transfer and transfer.last != before:
                    retry.arrived()
                    attempt = 0
                stop = transfer.stop if transfer else threading.Event()
                if source_error.id != "hub-unreachable" or not retry.again(attempt, stop, source_error.what):
                    raise source_error from None
                if transfer:
                    transfer.check()
                attempt += 1


class _FileTransfer:
    """A file that is being fetched."""

    def __init__(self, progress: Progress, stop: threading.Event) -> None:
        self._progress = progress
        self.stop = stop
        self._count = 0  # bytes counted as arrived
        self.last = 0  # bytes transferred, earlier attempts included

    def check(self) -> None:
        if self.stop.is_set():
            raise Stopped

    def add(self, count: int) -> None:
        self.check()
        self._count += count
        self._progress.add(count)

    def moved(self, count: int) -> None:
        self.last += max(0, count)
        self._progress.transferred(max(0, count))

    def forget(self) -> None:
        """Discards what has arrived."""
        self._progress.add(-self._count)
        self._count = 0

    def finish(self, size: int) -> None:
        self._progress.add(size - self._count)
        self._count = size

    def bar(self) -> type:
        """Returns a tqdm class for huggingface_hub that displays nothing and counts bytes."""
        transfer, base = self, import_module("huggingface_hub.utils.tqdm").tqdm

        class Counted(base):  # type: ignore[misc, valid-type]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                kwargs["disable"] = True
                kwargs.pop("name", None)
                super().__init__(*args, **kwargs)

            def update(self, n: float | None = 1) -> bool | None:
                transfer.add(int(n or 0))
                return None

            def update_transfer(self, n: float) -> None:
                transfer.moved(int(n))

        return Counted


def is_offline() -> bool:
    """Returns whether HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids huggingface_hub the network."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in ("1", "ON", "YES", "TRUE")


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _api() -> Any:
    from huggingface_hub import HfApi

    silence_loggers()
    return HfApi(endpoint=_endpoint())


def silence_loggers() -> None:
    """Silences libraries that log URLs and headers with signatures and tokens."""
    for name in ("huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2", "urllib3", "filelock"):
        logger = logging.getLogger(name)
        logger.setLevel(max(logging.ERROR, logger.level))


def _file(sibling: Any) -> RemoteFile:
    lfs = sibling.lfs or {}
    digest = lfs.get("sha256") if isinstance(lfs, dict) else lfs.sha256
    tag = digest or sibling.blob_id or ""
    checksum = f"sha256:{digest}" if digest else f"git-sha1:{tag}" if tag else ""
    return RemoteFile(name=sibling.rfilename, size=int(sibling.size or 0), tag=tag, checksum=checksum)


def _matches(path: Path, file: RemoteFile) -> bool:
    algorithm, _, expected = file.checksum.partition(":")
    size = path.stat().st_size
    if size != file.size:
        return False
    digest = hashlib.sha256() if algorithm == "sha256" else hashlib.sha1(f"blob {size}\0".encode())
    if not expected:
        return True
    with path.open("rb") as stream:
        while block := stream.read(2**20):
            digest.update(block)
    return digest.hexdigest() == expected


def _cached(source: str, revision: str | None) -> Listing:
    """Returns the listing of the hub's cache on this machine. Raises SourceError ``hub-offline``."""
    folder = _snapshot(source, revision)
    files = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            tag = path.resolve().name if path.is_symlink() else f"{path.stat().st_size}-{path.stat().st_mtime_ns}"
            kind = {64: "sha256:", 40: "git-sha1:"}.get(len(tag) if path.is_symlink() else 0)
            name, size = path.relative_to(folder).as_posix(), path.stat().st_size
            files.append(RemoteFile(name=name, size=size, tag=tag, checksum=kind + tag if kind else ""))
    names = {file.name for file in files}
    if not any(PurePosixPath(name).suffix in _WEIGHTS for name in names):
        raise _offline_error(source, "has no weights for it")  # the cache may hold a tokenizer without its model
    if INDEX in names:
        try:
            shards = set(dict(foreign_files.read_json(folder / INDEX)["weight_map"]).values())
        except (OSError, ValueError, LookupError, TypeError):
            raise _offline_error(source, f"has no readable {INDEX}") from None
        if shards - names:
            raise _offline_error(source, f"lacks {min(shards - names)}")
    return Listing(source=source, revision=folder.name, files=tuple(files))


def _snapshot(source: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    silence_loggers()
    try:
        folder = snapshot_download(source, revision=revision, cache_dir=_cache(), local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        raise _offline_error(source, "does not have it" + (f" at {revision}" if revision else "")) from None
    return Path(folder)


def _cache() -> str | None:
    if folder := os.environ.get("HF_HUB_CACHE"):
        return folder
    return str(Path(home) / "hub") if (home := os.environ.get("HF_HOME")) else None


def _offline_error(source: str, reason: str) -> SourceError:
    hint = "unset HF_HUB_OFFLINE, or fill the cache with `hf download`"
    return SourceError("hub-offline", f"{source}: HF_HUB_OFFLINE is set, and this machine's cache {reason}", hint)


_DISK_FULL = re.compile(rf"os error ({errno.ENOSPC}|{errno.EDQUOT})\b")
_NETWORK_ERRORS = (ConnectionError, TimeoutError, socket.gaierror, ssl.SSLError)


def _source_error(error: Exception, source: str, revision: str | None) -> SourceError | None:
    """Returns the SourceError of an error of the hub or of the network; None for any other."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # why the hub was not called, or did not answer
    host = urlsplit(_endpoint() or "https://huggingface.co").hostname
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return _offline_error(source, "was not read")
    if isinstance(error, errors.GatedRepoError):
        hint = "accept the terms on its page, with the account of HF_TOKEN"
        return SourceError("hub-denied", f"{source} on {host} requires acceptance of its terms", hint)
    if isinstance(error, errors.RevisionNotFoundError):
        message = f"{source} has no revision {revision!r} on {host}"
        return SourceError("hub-not-found", message, "a revision is a branch, a tag or a full commit hash")
    if isinstance(error, errors.RepositoryNotFoundError):
        hint = "check the id; a private model needs HF_TOKEN or `hf auth login`; a path begins with ./ or /"
        return SourceError("hub-not-found", f"{host} has no model {source}, or it is private", hint)
    if isinstance(error, errors.EntryNotFoundError) and status is not None:
        return SourceError("hub-not-found", f"a file of {source} is no longer on {host}", "start again")
    if status in (401, 403):
        return SourceError("hub-denied", f"{host} refuses {source} with {status}", "check HF_TOKEN")
    if status is not None and status not in (408, 429) and status < 500:
        return SourceError("hub-refused", f"{host} answers {status} for {source}", "check HF_ENDPOINT")
    if isinstance(error, errors.FileMetadataError):
        return SourceError("hub-refused", f"{host} does not answer with the hub's API", "check HF_ENDPOINT")
    if isinstance(error, errors.HFValidationError):
        return SourceError("hub-not-found", f"{source} is not a valid hub id", "write org/model")
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, _NETWORK_ERRORS):
        return None  # of the disk
    # A RuntimeError means that the shared client was closed, or comes from Xet, with a signed URL in its text.
    library = type(error).__module__.partition(".")[0]
    if (
        status is not None
        or isinstance(error, OSError | RuntimeError)
        or library in ("httpx", "httpx2", "httpcore", "requests")
    ):
        why = f"answers {status}" if status is not None else f"is unreachable ({type(error).__name__})"
        hint = "check the network and HF_ENDPOINT, or set HF_HUB_OFFLINE=1 to use this machine's cache"
        return SourceError("hub-unreachable", f"{host} {why} for {source}", hint)
    return None
