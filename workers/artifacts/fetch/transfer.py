"""Fetches an S3 prefix in parallel ranges, verifies them as they arrive, and resumes after a kill.

1. HeadObject returns the checksum of each file.
2. Many connections fetch ranges at once: small files first, then a few files at a time in the order of their names, so
   that a load can begin early. Each range is written in place as it arrives; its CRC and content digest are computed
   from the same bytes.
3. A complete range is recorded in the file's ledger. A resumed fetch skips recorded ranges whose CRC still matches the
   disk.
4. When all ranges of a file are complete, their CRCs are combined. If the result matches S3's checksum, the file gets
   its final name; else all of it is fetched again.
5. Transient failures (5xx, resets, timeouts) are retried from the last byte received, with growing pauses, for as long
   as anything arrives from S3.
"""

from __future__ import annotations

import errno
import heapq
import logging
import os
import shutil
import threading
from collections.abc import Callable
from functools import partial
from hashlib import blake2s
from itertools import count
from pathlib import Path
from typing import Any

from workers.artifacts.fetch.assembly import Assembly, RangeChecksum, Span, disk_error
from workers.artifacts.fetch.progress import Progress
from workers.artifacts.fetch.retry_policy import Retry, RetryPolicy
from workers.artifacts.sources.checksums import Checksum, checksum_of
from workers.artifacts.sources.listing import SMALL_BYTES, Listing, RemoteFile, SourceError, Stopped
from workers.artifacts.sources.s3 import WORK, Bucket, changed, from_obstore, is_short, unreachable
from workers.artifacts.store.contents import PIECE_BYTES

log = logging.getLogger(__name__)

SPAN_BYTES = PIECE_BYTES  # range of one request; AWS recommends 8 to 16 MB
CHUNK_BYTES = 2**18  # small enough to stay in the CPU's cache until it is written
FILES_AT_ONCE = 4  # writers of a single file wait for each other: a tenth of the CPU time
ATTEMPTS = 3  # per object, to get the right checksum
SHORT_ATTEMPTS = 4  # per range, to get a byte that the listing promises
STOP_S = 0.1  # interval of the check for a stop
LEAVE_S = 1.0  # for threads to end; those that wait for a dead connection end later


def usual_connections() -> int:
    """Returns the default for this machine. At 85 to 90 MB/s each, 128 fill the 100 Gb/s of hosts with many CPUs, and
    20 the 15 Gb/s of the smallest."""
    return min(128, max(20, 4 * (os.cpu_count() or 1)))


class S3Remote:
    """``s3://bucket/prefix``: see `Remote`."""

    def __init__(
        self,
        url: str,
        *,
        connections: int | None = None,
        span_bytes: int = SPAN_BYTES,
        retry_policy: RetryPolicy | None = None,
    ) -> None:
        """``connections``: None: by the machine's size. ``retry_policy``: retries when S3 does not answer. Raises
        SourceError s3-url-wrong."""
        self._retry_policy = retry_policy or RetryPolicy()
        self.bucket = Bucket.of(url, self._retry_policy)
        self._connections = connections or usual_connections()
        self._span_bytes = span_bytes

    def listing(self) -> Listing:
        """Returns all objects below the prefix. Raises SourceError; s3-not-found if there are none."""
        files = self.bucket.files()
        if not files:
            raise SourceError("s3-not-found", f"no objects below {self.bucket.url}/", "check the path")
        return Listing(source=self.bucket.url, files=tuple(files))

    def fetch(self, listing: Listing, folder: Path, progress: Progress, stop: threading.Event) -> None:
        """See `Remote`. Replaces files of ``folder`` that do not match the listing."""
        workers = min(self._connections, sum(1 + file.size // self._span_bytes for file in listing.files))
        fetch = _Fetch(self.bucket, listing, folder, progress, self._retry_policy.begin(), self._span_bytes)
        fetch.run(workers, stop)


class _Halted(Exception):
    """Another thread has failed, or the fetch is to stop."""


class _Fetch:
    """One run of ``S3Remote.fetch``: a priority queue of jobs, and the threads that run them."""

    def __init__(
        self,
        bucket: Bucket,
        listing: Listing,
        folder: Path,
        progress: Progress,
        waiting: Retry,
        span_bytes: int,
    ) -> None:
        self._bucket = bucket
        self._listing = listing
        self._folder = folder
        self._work = folder / WORK
        self._progress = progress
        self._waiting = waiting
        self._span_bytes = span_bytes
        self._halt = threading.Event()
        self._naming = threading.Lock()  # held while a file gets its final name
        self._changed = threading.Condition()  # guards the attributes below
        self._jobs: list[tuple[tuple[int, int, int], int, Callable[[], None]]] = []
        self._serial = count()
        self._left = len(listing.files)
        self._error: BaseException | None = None
        self._running = 0
        self._open: dict[str, Assembly] = {}
        self._store: Any = None

    def run(self, workers: int, stop: threading.Event) -> None:
        try:
            self._begin()
            threads = [threading.Thread(target=self._do_jobs, name=f"s3-{n}") for n in range(workers)]
            self._running = len(threads)
            for thread in threads:
                thread.start()
            self._wait(stop)
        finally:
            self._end()
        if self._error is not None:
            raise self._error
        if self._left:
            raise Stopped
        shutil.rmtree(self._work, ignore_errors=True)

    # The calling thread

    def _begin(self) -> None:
        self._progress.enter("fetching")
        self._progress.expect(self._listing.bytes)
        try:
            self._work.mkdir(parents=True, exist_ok=True)
            if self._listing.bytes - _used(self._folder) > shutil.disk_usage(self._folder).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise disk_error(error, self._folder, self._listing.bytes) from error
        completed = self._completed()
        ordered = sorted(self._listing.files, key=lambda file: (file.size > SMALL_BYTES, file.name))
        for number, file in enumerate(ordered):
            if _line(file) in completed and _size(self._folder / file.name) == file.size:
                self._progress.add(file.size)
                self._left -= 1
            else:
                self._push((0, number, 0), partial(self._head, file, number))

    def _wait(self, stop: threading.Event) -> None:
        with self._changed:
            while self._running and not stop.is_set():
                self._changed.wait(STOP_S)

    def _end(self) -> None:
        self._halt.set()
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._running, LEAVE_S)
        with self._naming:
            pass  # no rename happens after this: another fetch may use the same folder

    # The threads

    def _do_jobs(self) -> None:
        try:
            while (job := self._next()) is not None:
                job()
        except (_Halted, Stopped):
            pass
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
            self._halt.set()
            if not isinstance(error, Exception):
                raise
        finally:
            with self._changed:
                self._running -= 1
                if not self._running:
                    for assembly in self._open.values():
                        assembly.close()
                self._changed.notify_all()

    def _push(self, urgency: tuple[int, int, int], job: Callable[[], None]) -> None:
        with self._changed:
            heapq.heappush(self._jobs, (urgency, next(self._serial), job))
            self._changed.notify()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._jobs and self._left and not self._halt.is_set():
                self._changed.wait()
            return heapq.heappop(self._jobs)[2] if self._jobs and not self._halt.is_set() else None

    # Jobs

    def _head(self, file: RemoteFile, number: int, damaged: int = 0) -> None:
        """Starts a file; ``damaged``: how many times it has arrived with a wrong checksum."""
        head = self._bucket.head(file.name, stop=self._halt)
        if head["ContentLength"] != file.size or head["ETag"].strip('"') != file.tag:
            raise changed(self._bucket.bucket, self._bucket.key(file.name))
        self._waiting.arrived()
        checksum, sizes = self._checksum(file, head, exact=damaged > 0)
        if checksum is None:
            log.info("%s/%s has no checksum to verify against", self._bucket.url, file.name)
        work = self._work / blake2s(f"{file.name}\0{file.tag}".encode(), digest_size=16).hexdigest()
        target = self._folder / file.name
        assembly = Assembly(file, target, work, checksum, sizes, self._span_bytes, self._go_on)
        assembly.damaged = damaged
        if assembly.is_already_complete():
            self._progress.add(file.size)
            return self._done(assembly)
        with self._changed:
            self._open[file.name] = assembly
        recorded = assembly.recorded_ranges()
        for span in assembly.spans:
            job = partial(self._fetch, assembly, number, span)
            if (crc := recorded.get(span)) is not None:
                job = partial(self._check, assembly, number, span, crc)
            self._push((1, number // FILES_AT_ONCE, span.start), job)
        if not assembly.spans:
            self._finish(assembly, number)
        return None

    def _checksum(self, file: RemoteFile, head: dict[str, Any], exact: bool) -> tuple[Checksum | None, list[int]]:
        """Returns the checksum and the sizes of the parts it covers. Without ``exact``: at most two requests."""
        checksum, parts = checksum_of(head)
        if checksum is None or checksum.composite is False or parts == 1:
            return checksum, [file.size]
        sizes = self._part_sizes(file, parts, exact)
        if sizes is not None:
            return checksum, sizes
        return (None if checksum.composite else checksum), [file.size]

    def _part_sizes(self, file: RemoteFile, parts: int, exact: bool) -> list[int] | None:
        """Returns the part sizes of a multipart upload; None: the server does not report them.

        In almost every upload all parts but the last have one size. If the first and the last part agree with that,
        the others are not requested, unless the assumption has failed before (``exact``).
        """

        def ask(part: int) -> int:
            size: int = self._bucket.head(file.name, part, stop=self._halt)["ContentLength"]
            return size

        first = ask(1)
        last = file.size - first * (parts - 1)
        if 0 < last <= first and not exact and ask(parts) == last:
            return [first] * (parts - 1) + [last]
        sizes = [first, *(ask(part) for part in range(2, parts + 1))] if first < file.size else []
        return sizes if sum(sizes) == file.size else None

    def _check(self, assembly: Assembly, number: int, span: Span, crc: int) -> None:
        """Verifies a range that an earlier attempt left, and fetches it if its CRC differs."""
        checksum = assembly.read(span)
        if checksum.crc != crc:
            return self._fetch(assembly, number, span)
        self._progress.add(span.size)
        self._waiting.arrived()  # S3 was not called meanwhile: its silence does not count
        if assembly.accept(span, checksum, recorded=True):
            self._finish(assembly, number)
        return None

    def _fetch(self, assembly: Assembly, number: int, span: Span) -> None:
        from obstore.exceptions import BaseError

        key = self._bucket.key(assembly.file.name)
        checksum = assembly.new_checksum()
        attempt = short = 0
        while checksum.size < span.size:
            before, last = checksum.size, None
            try:
                self._read(assembly, key, span, checksum)
            except (BaseError, OSError, ValueError) as error:
                if fatal := from_obstore(error, self._bucket.bucket, key):
                    raise fatal from None  # obstore's text may hold secrets
                last = error
            if checksum.size > before:
                attempt = short = 0
            else:
                attempt, short = attempt + 1, short + (last is None or is_short(last))
            if short >= SHORT_ATTEMPTS:
                raise self._damaged(assembly, f"ends after {span.start + checksum.size} bytes")
            if (last or attempt) and not self._waiting.again(attempt, self._halt, type(last).__name__ if last else ""):
                raise unreachable("s3:GetObject", self._bucket.bucket, key, self._waiting.silent_s, last) from None
            self._go_on()
        if assembly.accept(span, checksum):
            self._finish(assembly, number)

    def _read(self, assembly: Assembly, key: str, span: Span, checksum: RangeChecksum) -> None:
        """Reads the rest of the range until the response ends, which may be too early."""
        import obstore

        options: Any = {"range": (span.start + checksum.size, span.end), "if_match": f'"{assembly.file.tag}"'}
        for chunk in obstore.get(self._bulk(), key, options=options).stream(min_chunk_size=CHUNK_BYTES):
            self._go_on()
            self._progress.transferred(len(chunk))
            self._waiting.arrived()
            assembly.write(chunk, span.start + checksum.size)
            checksum.add(chunk)
            self._progress.add(len(chunk))

    def _finish(self, assembly: Assembly, number: int) -> None:
        valid, content = assembly.is_valid(), assembly.content()
        if valid:
            with self._naming:
                self._go_on()
                self._progress.digests[assembly.file.name] = content
                assembly.publish()
            return self._done(assembly)
        self._go_on()
        log.warning("checksum mismatch for %s/%s", self._bucket.url, assembly.file.name)
        assembly.discard()
        if assembly.damaged >= ATTEMPTS:
            raise self._damaged(assembly, f"failed its checksum {ATTEMPTS} times")
        self._progress.add(-assembly.file.size)
        assembly.close()
        return self._push((0, number, 0), partial(self._head, assembly.file, number, assembly.damaged))

    def _done(self, assembly: Assembly) -> None:
        self._record(assembly.file)
        with self._changed:
            self._open.pop(assembly.file.name, None)
            self._left -= 1
            if not self._left:
                self._changed.notify_all()

    def _go_on(self) -> None:
        if self._halt.is_set():
            raise _Halted

    def _bulk(self) -> Any:
        if self._store is None:
            with self._changed:
                self._store = self._store or self._bucket.bulk()
        return self._store

    def _damaged(self, assembly: Assembly, how: str) -> SourceError:
        where = f"{self._bucket.url}/{assembly.file.name}"
        return SourceError("s3-damaged", f"{where} {how}", "upload it again")

    # Complete files

    def _completed(self) -> set[str]:
        try:
            return set((self._work / "whole").read_text().splitlines())
        except (OSError, UnicodeDecodeError):
            return set()

    def _record(self, file: RemoteFile) -> None:
        try:
            with self._changed, (self._work / "whole").open("a") as record:
                record.write(f"{_line(file)}\n")
        except OSError as error:
            raise disk_error(error, self._folder, file.size) from error


def _line(file: RemoteFile) -> str:
    return f"{file.tag} {file.size} {file.name}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _used(folder: Path) -> int:
    """Returns the disk usage of the files below a folder, in bytes."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
