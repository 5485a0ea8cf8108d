"""A prefix of S3 as a source: its objects come in parallel ranges, are verified as they come, and go on after a kill.

1. A HeadObject of each file tells its checksum.
2. Ranges are asked for by many connections at once, small files first, then some files at a time in the order of names,
   so that a load may begin with what is there. Each is written at its place as it comes, its CRC and the digest of the
   content computed from the same bytes.
3. A range that is whole is noted in the file's ledger. Where a fetch begins anew, ranges that are noted, and whose CRC
   the disk still has, are not asked for again.
4. When all ranges of a file are there, their CRCs combine to that of the object. If it is S3's, the file gets its name;
   else all of it is fetched again.
5. What fails for a moment (5xx, resets, timeouts) is tried again, from the byte that was reached, with growing pauses;
   as long as anything arrives from S3 at all, nobody gives up.
"""

from __future__ import annotations

import heapq
import logging
import os
import shutil
import threading
from collections.abc import Callable
from hashlib import blake2s
from itertools import count
from pathlib import Path
from typing import Any

from workers.artifacts.fetch.assembly import Assembly, Summing, disk_error
from workers.artifacts.fetch.progress import Progress
from workers.artifacts.fetch.retry_policy import Retry, RetryPolicy
from workers.artifacts.sources.checksums import Checksum, told
from workers.artifacts.sources.listing import Listing, RemoteFile, SourceError, Stopped
from workers.artifacts.sources.s3 import WORK, Bucket
from workers.artifacts.sources.s3_errors import changed, is_short, of_obstore, unreachable
from workers.artifacts.store.content_digest import PIECE_BYTES
from workers.artifacts.store.range_ledger import Span

log = logging.getLogger(__name__)

SPAN_BYTES = PIECE_BYTES  # of one request; 8 to 16 MB is what AWS recommends
CHUNK_BYTES = 2**18  # that are handed on at once: they are still in the CPU's cache when they are written
SMALL_BYTES = 2**24  # files up to this size come first
FILES_AT_ONCE = 4  # those who write to one and the same file wait for each other: a tenth of the CPU time
ATTEMPTS = 3  # to get an object whose checksum is right
SHORT_ATTEMPTS = 4  # to get a byte that S3 says is there
STOP_S = 0.1  # between two looks whether somebody has asked for the end
LEAVE_S = 1.0  # for threads to end; those that wait for a dead connection end later by themselves


def usual_connections() -> int:
    """85 to 90 MB/s each: 128 fill 100 Gb/s, which hosts with many CPUs have, 20 the 15 Gb/s of the smallest."""
    return min(128, max(20, 4 * (os.cpu_count() or 1)))


class S3Remote:
    """``s3://bucket/prefix``: see `Remote`."""

    def __init__(
        self,
        url: str,
        *,
        connections: int | None = None,
        span_bytes: int = SPAN_BYTES,
        patience: RetryPolicy | None = None,
    ) -> None:
        """``connections``: at once, None: what fits the machine. ``patience``: with an S3 that does not answer. Raises
        SourceError s3-url-wrong."""
        self._patience = patience or RetryPolicy()
        self.bucket = Bucket.of(url, self._patience)
        self._connections = connections or usual_connections()
        self._span_bytes = span_bytes

    def listing(self) -> Listing:
        """Raises SourceError, s3-not-found where there is nothing below the prefix."""
        files = self.bucket.files()
        if not files:
            raise SourceError("s3-not-found", f"there is nothing below {self.bucket.url}/", "is the path right?")
        return Listing(source=self.bucket.url, files=tuple(files))

    def fetch(self, listing: Listing, folder: Path, progress: Progress, stop: threading.Event) -> None:
        """See `Remote`. Files of ``folder`` that are of no use are replaced."""
        workers = min(self._connections, sum(1 + file.size // self._span_bytes for file in listing.files))
        fetch = _Fetch(self.bucket, listing, folder, progress, self._patience.begin(), self._span_bytes)
        fetch.run(workers, stop)


class _Halted(Exception):
    """Somebody else has failed, or wants the end."""


class _Reading:
    """How far a range has come."""

    def __init__(self, start: int, summing: Summing) -> None:
        self.at = start
        self.summing = summing  # of what lies before


class _Fetch:
    """One run of ``S3Remote.fetch``: jobs in the order of their urgency, and the threads that do them."""

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
        self._naming = threading.Lock()  # held by who gives a file its name
        self._changed = threading.Condition()  # guards what follows
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
            needed = self._listing.bytes - _used(self._folder)
            if needed > (free := shutil.disk_usage(self._folder).free):
                raise SourceError(
                    "s3-disk-full",
                    f"{self._folder}: {needed} bytes are to come, {free} are free",
                    "free some of the disk, or move the store to a larger one",
                )
        except OSError as error:
            raise disk_error(error, self._folder, self._listing.bytes) from error
        whole = self._whole()
        ordered = sorted(self._listing.files, key=lambda file: (file.size > SMALL_BYTES, file.name))
        for number, file in enumerate(ordered):
            if _line(file) in whole and _size(self._folder / file.name) == file.size:
                self._progress.add(file.size)
                self._left -= 1
            else:
                self._push((0, number, 0), self._head_job(file, number))

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
            pass  # from now on nobody does: another fetch may work in the same folder

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

    def _head_job(self, file: RemoteFile, number: int, damaged: int = 0) -> Callable[[], None]:
        return lambda: self._head(file, number, damaged)

    def _head(self, file: RemoteFile, number: int, damaged: int) -> None:
        """``damaged``: so often it has arrived, and its checksum did not fit."""
        head = self._bucket.head(file.name, stop=self._halt)
        if head["ContentLength"] != file.size or head["ETag"].strip('"') != file.tag:
            raise changed(self._bucket.bucket, self._bucket.key(file.name))
        self._waiting.arrived()
        checksum, sizes = self._told(file, head, exact=damaged > 0)
        if checksum is None:
            log.info("%s/%s has no checksum that can be compared", self._bucket.url, file.name)
        work = self._work / blake2s(f"{file.name}\0{file.tag}".encode(), digest_size=16).hexdigest()
        target = self._folder / file.name
        assembly = Assembly(file, target, work, checksum, sizes, self._span_bytes, self._go_on)
        assembly.damaged = damaged
        if assembly.found():
            self._progress.add(file.size)
            return self._done(assembly)
        with self._changed:
            self._open[file.name] = assembly
        noted = assembly.noted()
        for span in assembly.spans:
            job = self._span_job(assembly, number, span, noted.get(span))
            self._push((1, number // FILES_AT_ONCE, span.start), job)
        if not assembly.spans:
            self._finish(assembly, number)
        return None

    def _told(self, file: RemoteFile, head: dict[str, Any], exact: bool) -> tuple[Checksum | None, list[int]]:
        """The checksum, and the sizes of the parts that it is made of. Not ``exact``: two requests at most."""
        checksum, parts = told(head)
        if checksum is None or checksum.composite is False or parts == 1:
            return checksum, [file.size]
        sizes = self._part_sizes(file, parts, exact)
        if sizes is not None:
            return checksum, sizes
        return (None if checksum.composite else checksum), [file.size]

    def _part_sizes(self, file: RemoteFile, parts: int, exact: bool) -> list[int] | None:
        """Of a multipart upload; None: the server does not tell.

        All but the last are equal in almost every upload. Where the first and the last look so, the others are not
        asked for, unless that has turned out wrong (``exact``).
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

    def _span_job(self, assembly: Assembly, number: int, span: Span, noted: int | None = None) -> Callable[[], None]:
        if noted is None:
            return lambda: self._fetch(assembly, number, span)
        return lambda: self._check(assembly, number, span, noted)

    def _check(self, assembly: Assembly, number: int, span: Span, crc: int) -> None:
        """A range that an earlier attempt has left."""
        found = assembly.read(span)
        if found.crc != crc:
            return self._fetch(assembly, number, span)
        self._progress.add(span.size)
        self._waiting.arrived()  # nobody was asked meanwhile
        if assembly.accept(span, found, noted=True):
            self._finish(assembly, number)
        return None

    def _fetch(self, assembly: Assembly, number: int, span: Span) -> None:
        from obstore.exceptions import BaseError

        key = self._bucket.key(assembly.file.name)
        reading = _Reading(span.start, assembly.summing())
        attempt = short = 0
        while reading.at < span.end:
            before, last = reading.at, None
            try:
                self._read(assembly, key, reading, span.end)
            except (BaseError, OSError, ValueError) as error:
                if known := of_obstore(error, self._bucket.bucket, key):
                    raise known from None  # obstore's text may hold what must not be told
                last = error
            if reading.at > before:
                attempt = short = 0
            else:
                attempt, short = attempt + 1, short + (last is None or is_short(last))
            if short >= SHORT_ATTEMPTS:
                raise self._damaged(assembly, f"ends after {reading.at} bytes")
            if (last or attempt) and not self._waiting.again(attempt, self._halt, type(last).__name__ if last else ""):
                raise unreachable("s3:GetObject", self._bucket.bucket, key, self._waiting.silent_s, last) from None
            self._go_on()
        if assembly.accept(span, reading.summing):
            self._finish(assembly, number)

    def _read(self, assembly: Assembly, key: str, reading: _Reading, end: int) -> None:
        """As far as the answer goes."""
        import obstore

        options: Any = {"range": (reading.at, end), "if_match": f'"{assembly.file.tag}"'}
        for chunk in obstore.get(self._bulk(), key, options=options).stream(min_chunk_size=CHUNK_BYTES):
            self._go_on()
            size = len(chunk)
            self._progress.transferred(size)
            self._waiting.arrived()
            assembly.write(chunk, reading.at)
            reading.summing.add(chunk)
            reading.at += size
            self._progress.add(size)

    def _finish(self, assembly: Assembly, number: int) -> None:
        right, content = assembly.right(), assembly.content()
        if right:
            with self._naming:
                self._go_on()
                self._progress.digests[assembly.file.name] = content
                assembly.publish()
            return self._done(assembly)
        self._go_on()
        log.warning("%s/%s has arrived damaged", self._bucket.url, assembly.file.name)
        assembly.forget()
        if assembly.damaged >= ATTEMPTS:
            raise self._damaged(assembly, f"has arrived {ATTEMPTS} times with another checksum than S3 says")
        self._progress.add(-assembly.file.size)
        assembly.close()
        return self._push((0, number, 0), self._head_job(assembly.file, number, assembly.damaged))

    def _done(self, assembly: Assembly) -> None:
        self._note(assembly.file)
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

    # Files that have got their name

    def _whole(self) -> set[str]:
        try:
            return set((self._work / "whole").read_text().splitlines())
        except (OSError, UnicodeDecodeError):
            return set()

    def _note(self, file: RemoteFile) -> None:
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
    """Bytes of disk that the files below a folder take."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
