"""Records on disk which ranges of an object have arrived, so that a fetch can resume after a kill."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import msgspec

from workers.artifacts.sources.listing import RemoteFile


class Span(msgspec.Struct, frozen=True, order=True):
    """The byte range of one request."""

    start: int
    end: int  # exclusive

    @property
    def size(self) -> int:
        return self.end - self.start


class RangeLedger:
    """A file of lines ``START END CRC``, each written after its data.

    Data of a recorded range was written to the kernel before, however the process ends. The CRC detects what a crash
    of the machine loses.
    """

    def __init__(self, path: Path, file: RemoteFile, algorithm: str) -> None:
        """A ledger at ``path`` is used if it is of the same object and the same CRC algorithm."""
        self._path = path
        self._title = f"{file.tag} {file.size} {algorithm}\n"
        self._lock = threading.Lock()
        self._file = -1

    def read(self) -> dict[Span, int]:
        """Returns the complete ranges and their CRCs."""
        try:
            lines = self._path.read_text().splitlines(keepends=True)
        except (OSError, UnicodeDecodeError):
            return {}
        if not lines or lines[0] != self._title:
            return {}
        ranges = {}
        for line in lines[1:]:
            with contextlib.suppress(ValueError):  # a truncated line
                start, end, crc = line.split(" ")
                if line.endswith("\n"):
                    ranges[Span(int(start), int(end))] = int(crc, 16)
        return ranges

    def note(self, span: Span, crc: int) -> None:
        """Records a range whose data has been written."""
        with self._lock:
            if self._file < 0:
                self._file = self._open()
            os.write(self._file, f"{span.start} {span.end} {crc:x}\n".encode())

    def close(self) -> None:
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def remove(self) -> None:
        self.close()
        self._path.unlink(missing_ok=True)

    def _open(self) -> int:
        """Opens the ledger for appending; clears it if it is of another object."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        file = os.open(self._path, flags, 0o644)
        header = os.pread(file, len(self._title), 0)
        if header.decode(errors="replace") != self._title:
            os.ftruncate(file, 0)
            os.write(file, self._title.encode())
        else:
            os.write(file, b"\n")  # terminates a truncated line
        return file
