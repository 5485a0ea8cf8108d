"""Records arrival times and lengths of one gateway's requests for `corewright trace export`, but no texts."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from orchestrator.messages.request_traces import parts
from workers.host import private_file

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 4 * 2**20  # of one file; about 80,000 requests
MAX_FILES = 32  # of all gateways together; the oldest is deleted
BUFFERED = 1024  # requests that start a write
MAX_BUFFERED_REQUESTS = 64 * 1024  # while the disk blocks; later requests are not recorded


def open_file(path: Path) -> io.FileIO:
    """Opens a file of records, unbuffered, so that a write returns what the disk has accepted."""
    return io.FileIO(private_file.open_to_append(path), "wb")


Record = tuple[float, str, int, int, str, float, float]


class RequestRecorder:
    """Writes a CSV line for each request: time, model, prompt and output tokens, key, first_ms, decode_ms.

    The files are ``folder/<gateway>.<bytes that this gateway had written before>.csv``, so that an offset stays valid
    when the oldest file is deleted (`request_traces.read_page`). A full disk or a read-only folder loses lines, never a
    request.
    """

    def __init__(
        self,
        folder: Path,
        gateway: str,
        *,
        file_bytes: int = MAX_FILE_BYTES,
        files: int = MAX_FILES,
        open_file: Callable[[Path], io.FileIO] = open_file,
    ) -> None:
        """``gateway`` is part of the file names. A later gateway of the same name appends to the files."""
        self.dropped = 0  # requests that could not be written
        self._folder = folder
        self._gateway = gateway
        self._file_bytes = file_bytes
        self._files = files
        self._open_file = open_file
        self._notes: list[Record] = []
        self._writer = ThreadPoolExecutor(1, "recorder")
        self._writing: Future[None] | None = None
        self._file: io.FileIO | None = None
        self._written = 0  # bytes in this file
        self._dropped_before: int | None = None  # ``dropped`` when writing began to fail; None: it works

    def note(
        self,
        wall_time: float,
        model: str,
        prompt_tokens: int,
        output_tokens: int,
        key_id: str = "",
        first_s: float = 0.0,
        decode_s: float = 0.0,
    ) -> None:
        """Records an ended request that arrived at ``wall_time``, in seconds since the epoch.

        ``first_s`` is the time from sending it to its replica to the first token, ``decode_s`` from there to the last;
        0.0 when unknown.
        """
        if len(self._notes) >= MAX_BUFFERED_REQUESTS:
            self.dropped += 1
            return
        self._notes.append((wall_time, model, prompt_tokens, output_tokens, key_id, first_s, decode_s))
        if len(self._notes) >= BUFFERED:
            self.write_soon()

    def write_soon(self) -> None:
        """Starts to write the records in a thread, since the disk may be slow; does nothing while a write runs."""
        if not self._notes or (self._writing is not None and not self._writing.done()):
            return
        notes, self._notes = self._notes, []
        self._writing = self._writer.submit(self._write_down, notes)

    def flush(self) -> None:
        """Writes all records. Blocks until the disk is done."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None
        notes, self._notes = self._notes, []
        if notes:
            self._write_down(notes)

    def close(self) -> None:
        """Writes the remaining records and closes the file."""
        self.flush()
        self._writer.shutdown()
        if self._file is not None:
            self._file.close()

    # Inside

    def _write_down(self, notes: Sequence[Record]) -> None:
        """Writes the records; called by one thread at a time."""
        lines = "".join(
            f"{at:.3f},{model},{prompt},{output},{key},{first * 1000:.1f},{decode * 1000:.1f}\n"
            for at, model, prompt, output, key, first, decode in notes
        )
        try:
            self._write(lines.encode())
            if self._dropped_before is not None:
                log.warning("requests are recorded again; %d were lost", self.dropped - self._dropped_before)
                self._dropped_before = None
        except OSError as error:
            if self._dropped_before is None:
                log.warning("cannot record requests in %s: %s", self._folder, error)
                self._dropped_before = self.dropped
            self.dropped += len(notes)
            self._truncate()

    def _write(self, data: bytes) -> None:
        if self._file is None:
            self._file = self._open()
        if self._file.write(data) != len(data):  # the disk is full
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._written += len(data)
        if self._written >= self._file_bytes:
            self._file.close()
            self._file = None

    def _open(self) -> io.FileIO:
        """Opens the next file, which begins at the offset where the last one ends."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        files = parts(self._folder).get(self._gateway, [])
        start = 0
        if files:
            start, last = files[-1]
            size = last.stat().st_size
            if size < self._file_bytes:
                file = self._open_file(last)
                if private_file.ends_whole(file.fileno()):
                    self._written = size
                    return file
                file.close()
            start += size
        self._make_room()
        self._written = 0
        return self._open_file(self._folder / f"{self._gateway}.{start}.csv")

    def _make_room(self) -> None:
        """Deletes the oldest files until one more is allowed. Other gateways may do the same at the same time."""
        ages: list[tuple[float, Path]] = []
        for path in (path for files in parts(self._folder).values() for _, path in files):
            with contextlib.suppress(FileNotFoundError):
                ages.append((path.stat().st_mtime, path))
        for _, path in sorted(ages)[: max(0, len(ages) - self._files + 1)]:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def _truncate(self) -> None:
        """Cuts the file back to whole lines after an error, and closes it."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(file.fileno(), self._written)
            with contextlib.suppress(OSError):
                file.close()
