"""A model of the Hugging Face hub, or of another server that speaks its API (HF_ENDPOINT).

huggingface_hub asks and fetches: with the token that it finds (HF_TOKEN, or the file that ``hf auth login`` wrote), and
by Xet where the server has it. Its exceptions hold addresses that are signed, so no text of theirs is repeated here.
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
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlsplit

from workers.artifacts.fetch.progress import Progress
from workers.artifacts.fetch.retry_policy import RetryPolicy
from workers.artifacts.sources.layout import INDEX, PICKLES, checked
from workers.artifacts.sources.listing import Listing, RemoteFile, SourceError, Stopped
from workers.host import foreign_files

ASK_S = 10.0  # for one answer about a model
TRIES = 3  # of a file that arrives damaged
AT_ONCE = 8  # files
SMALL_BYTES = 16 * 2**20  # files up to it come first
_WEIGHTS = PICKLES | {".safetensors"}
STAGING = ".fetching"  # in the folder: what is not verified yet

_T = TypeVar("_T")


class HubRemote:
    """See ``Remote``. ``revision`` None is the branch main."""

    def __init__(
        self,
        source: str,
        revision: str | None = None,
        *,
        offline: bool | None = None,
        patience: RetryPolicy | None = None,
    ) -> None:
        self._source = source
        self._revision = revision
        self._offline = is_offline() if offline is None else offline
        self._patience = patience or RetryPolicy()

    def listing(self) -> Listing:
        """What the revision holds now, with the commit that it stands at. Offline: what this machine's cache has."""
        if self._offline:
            return _cached(self._source, self._revision)
        info = self._asked(lambda: _api().model_info(self._source, **self._wanted))
        files = [_file(sibling) for sibling in info.siblings or ()]
        found = tuple(sorted(files, key=lambda file: file.name))
        return checked(Listing(source=self._source, revision=info.sha or "", files=found))

    @property
    def _wanted(self) -> dict[str, Any]:
        return {"revision": self._revision, "files_metadata": True, "timeout": ASK_S}

    def fetch(self, listing: Listing, folder: Path, progress: Progress, stop: threading.Event) -> None:
        """See ``Remote.fetch``. A file that was whole stays, and one that was cut off begins anew. Small files come
        first, then the others by name."""
        here = [file for file in listing.files if _is_whole(folder / file.name, file)]
        progress.expect(listing.bytes, sum(file.size for file in here))
        progress.enter("fetching")
        missing = sorted(set(listing.files) - set(here), key=lambda file: (file.size > SMALL_BYTES, file.name))
        shutil.rmtree(folder / STAGING, ignore_errors=True)
        failed = threading.Event()

        def bring(file: RemoteFile) -> None:
            if failed.is_set():
                return
            try:
                self._bring(listing, file, folder, progress, stop)
            except BaseException:
                failed.set()
                raise

        try:
            with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="hub") as pool:
                for done in [pool.submit(bring, file) for file in missing]:
                    done.result()
        finally:
            shutil.rmtree(folder / STAGING, ignore_errors=True)

    def _bring(
        self, listing: Listing, file: RemoteFile, folder: Path, progress: Progress, stop: threading.Event
    ) -> None:
        """One file, verified, under its name. Raises SourceError, Stopped, and OSError of the disk."""
        target, staged = folder / file.name, folder / STAGING / hashlib.sha1(file.name.encode()).hexdigest()
        arriving = _Arriving(progress, stop)
        for _ in range(TRIES):
            arriving.check()
            if self._offline:
                fetched = self._copied(listing, file, staged)
            else:
                fetched = self._asked(lambda: self._download(listing, file, staged, arriving), arriving)
            if _is_genuine(fetched, file):
                arriving.finish(file.size)
                target.parent.mkdir(parents=True, exist_ok=True)
                fetched.replace(target)
                return
            arriving.forget()
            shutil.rmtree(staged, ignore_errors=True)
        what = f"{file.name} of {listing.source} arrived {TRIES} times with another content than the hub tells"
        raise SourceError("hub-damaged", what, "is there a proxy in between? try again later")

    def _copied(self, listing: Listing, file: RemoteFile, staged: Path) -> Path:
        """From the hub's cache on this machine."""
        source = _snapshot(self._source, listing.revision) / file.name
        copy = staged / file.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(source, copy)
        except FileNotFoundError:
            raise _away_offline(self._source, f"has no {file.name} any more") from None
        return copy

    def _download(self, listing: Listing, file: RemoteFile, staged: Path, arriving: _Arriving) -> Path:
        from huggingface_hub import hf_hub_download

        be_silent()
        download: Callable[..., str] = hf_hub_download
        told = {"tqdm_class": arriving.bar()} if "tqdm_class" in inspect.signature(download).parameters else {}
        arriving.forget()
        place = {"local_dir": staged, "cache_dir": _cache(), "endpoint": _endpoint(), "etag_timeout": ASK_S}
        try:
            return Path(download(self._source, file.name, revision=listing.revision, **place, **told))
        except RuntimeError as error:  # Xet's is a plain one, whatever has happened
            if full := _OF_THE_DISK.search(str(error)):
                raise OSError(int(full[1]), os.strerror(int(full[1])), str(staged)) from None
            raise

    def _asked(self, work: Callable[[], _T], arriving: _Arriving | None = None) -> _T:
        """The result of ``work``, tried again while the hub is away for no longer than the patience."""
        waiting, attempt = self._patience.begin(), 0
        while True:
            before = arriving.last if arriving else 0
            try:
                found = work()
                waiting.arrived()
                return found
            except Stopped:
                raise
            except Exception as error:  # of huggingface_hub's HTTP library, which is another one in each major version
                told = _told(error, self._source, self._revision)
                if told is None:
                    raise
                if arriving and arriving.last != before:
                    waiting.arrived()
                    attempt = 0
                stop = arriving.stop if arriving else threading.Event()
                if told.id != "hub-unreachable" or not waiting.again(attempt, stop, told.what):
                    raise told from None
                if arriving:
                    arriving.check()
                attempt += 1


class _Arriving:
    """One file on its way."""

    def __init__(self, progress: Progress, stop: threading.Event) -> None:
        self._progress = progress
        self.stop = stop
        self._count = 0  # bytes that count as arrived
        self.last = 0  # bytes that came, those of earlier tries as well

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
        """What arrived is of no use."""
        self._progress.add(-self._count)
        self._count = 0

    def finish(self, size: int) -> None:
        self._progress.add(size - self._count)
        self._count = size

    def bar(self) -> type:
        """A progress bar as huggingface_hub wants one, which shows nothing, and counts."""
        arriving, base = self, import_module("huggingface_hub.utils.tqdm").tqdm

        class Counted(base):  # type: ignore[misc, valid-type]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                kwargs["disable"] = True
                kwargs.pop("name", None)
                super().__init__(*args, **kwargs)

            def update(self, n: float | None = 1) -> bool | None:
                arriving.add(int(n or 0))
                return None

            def update_transfer(self, n: float) -> None:
                arriving.moved(int(n))

        return Counted


def is_offline() -> bool:
    """Whether huggingface_hub may not use the network: HF_HUB_OFFLINE, or TRANSFORMERS_OFFLINE."""
    told = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return told.upper() in ("1", "ON", "YES", "TRUE")


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _api() -> Any:
    from huggingface_hub import HfApi

    be_silent()
    return HfApi(endpoint=_endpoint())


def be_silent() -> None:
    """What these libraries log are addresses and headers, with signatures and the token."""
    for name in ("huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2", "urllib3", "filelock"):
        logger = logging.getLogger(name)
        logger.setLevel(max(logging.ERROR, logger.level))


def _file(sibling: Any) -> RemoteFile:
    lfs = sibling.lfs or {}
    digest = lfs.get("sha256") if isinstance(lfs, dict) else lfs.sha256
    tag = digest or sibling.blob_id or ""
    checksum = f"sha256:{digest}" if digest else f"git-sha1:{tag}" if tag else ""
    return RemoteFile(name=sibling.rfilename, size=int(sibling.size or 0), tag=tag, checksum=checksum)


def _is_whole(path: Path, file: RemoteFile) -> bool:
    """Under its name a file stands only verified."""
    try:
        return path.stat().st_size == file.size
    except OSError:
        return False


def _is_genuine(path: Path, file: RemoteFile) -> bool:
    algorithm, _, wanted = file.checksum.partition(":")
    size = path.stat().st_size
    if size != file.size:
        return False
    digest = hashlib.sha256() if algorithm == "sha256" else hashlib.sha1(f"blob {size}\0".encode())
    if not wanted:
        return True
    with path.open("rb") as stream:
        while block := stream.read(2**20):
            digest.update(block)
    return digest.hexdigest() == wanted


def _cached(source: str, revision: str | None) -> Listing:
    """What the hub's cache on this machine holds of it. Raises SourceError ``hub-offline``."""
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
        raise _away_offline(source, "holds no weights of it")  # tokenizers are kept there without a model
    if INDEX in names:
        try:
            shards = set(dict(foreign_files.read_json(folder / INDEX)["weight_map"]).values())
        except (OSError, ValueError, LookupError, TypeError):
            raise _away_offline(source, f"has no {INDEX} that can be read") from None
        if shards - names:
            raise _away_offline(source, f"lacks {min(shards - names)}")
    return checked(Listing(source=source, revision=folder.name, files=tuple(files)))


def _snapshot(source: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    be_silent()
    try:
        found = snapshot_download(source, revision=revision, cache_dir=_cache(), local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        raise _away_offline(source, "does not hold it" + (f" at {revision}" if revision else "")) from None
    return Path(found)


def _cache() -> str | None:
    if folder := os.environ.get("HF_HUB_CACHE"):
        return folder
    return str(Path(home) / "hub") if (home := os.environ.get("HF_HOME")) else None


def _away_offline(source: str, what: str) -> SourceError:
    hint = "unset HF_HUB_OFFLINE, or fill the cache with `hf download`"
    return SourceError("hub-offline", f"{source}: HF_HUB_OFFLINE is set, and this machine's cache {what}", hint)


_OF_THE_DISK = re.compile(rf"os error ({errno.ENOSPC}|{errno.EDQUOT})\b")
_OF_THE_WAY = (ConnectionError, TimeoutError, socket.gaierror, ssl.SSLError)


def _told(error: Exception, source: str, revision: str | None) -> SourceError | None:
    """``error`` in our words; None for what is not the hub's, nor of the way there."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # why the hub was not asked, or did not answer
    host = urlsplit(_endpoint() or "https://huggingface.co").hostname
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return _away_offline(source, "was not asked")
    if isinstance(error, errors.GatedRepoError):
        hint = "accept its terms on its page, with the account that HF_TOKEN belongs to"
        return SourceError("hub-denied", f"{host} gives {source} only to who has accepted its terms", hint)
    if isinstance(error, errors.RevisionNotFoundError):
        what = f"{source} has no revision {revision!r} on {host}"
        return SourceError("hub-not-found", what, "a revision is a branch, a tag or a whole commit")
    if isinstance(error, errors.RepositoryNotFoundError):
        hint = "is the id right? a private model needs HF_TOKEN, or `hf auth login`; a path begins with ./ or /"
        return SourceError("hub-not-found", f"{host} has no model {source}, or does not show it to you", hint)
    if isinstance(error, errors.EntryNotFoundError) and status is not None:
        return SourceError("hub-not-found", f"a file of {source} is not on {host} any more", "start again")
    if status in (401, 403):
        return SourceError("hub-denied", f"{host} refuses {source} with {status}", "is HF_TOKEN right?")
    if status is not None and status not in (408, 429) and status < 500:
        return SourceError("hub-refused", f"{host} answers {status} for {source}", "is HF_ENDPOINT right?")
    if isinstance(error, errors.FileMetadataError):
        return SourceError("hub-refused", f"{host} does not speak as a hub does", "is HF_ENDPOINT right?")
    if isinstance(error, errors.HFValidationError):
        return SourceError("hub-not-found", f"{source} is no id of the hub", "write org/model")
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, _OF_THE_WAY):
        return None  # of the disk
    # A RuntimeError tells that the client was closed, which all threads share, or it is Xet's, with a signed address.
    library = type(error).__module__.partition(".")[0]
    if (
        status is not None
        or isinstance(error, OSError | RuntimeError)
        or library in ("httpx", "httpx2", "httpcore", "requests")
    ):
        why = f"answers {status}" if status is not None else f"is not reached ({type(error).__name__})"
        hint = "is the network there? is HF_ENDPOINT right? HF_HUB_OFFLINE=1 takes what this machine has"
        return SourceError("hub-unreachable", f"{host} {why} for {source}", hint)
    return None
