"""Which ranges of an object are on this disk: a small file beside the data, which survives the process."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import msgspec

from workers.artifacts.sources.listing import RemoteFile


class Span(msgspec.Struct, frozen=True, order=True):
    """Bytes of an object that are asked for at once."""

    start: int
    end: int  # exclusive

    @property
    def size(self) -> int:
        return self.end - self.start


class RangeLedger:
    """Lines of ``START END CRC``, each written after its data.

    Whatever ends the process, what stands here was handed to the kernel. What a crash of the whole machine then loses,
    the CRC tells.
    """

    def __init__(self, path: Path, file: RemoteFile, algorithm: str) -> None:
        """What stands at ``path`` counts if it is of the same object and the same algorithm of CRCs."""
        self._path = path
        self._title = f"{file.tag} {file.size} {algorithm}\n"
        self._lock = threading.Lock()
        self._file = -1

    def read(self) -> dict[Span, int]:
        """The ranges that were whole, and their CRCs."""
        try:
            lines = self._path.read_text().splitlines(keepends=True)
        except (OSError, UnicodeDecodeError):
            return {}
        if not lines or lines[0] != self._title:
            return {}
        found = {}
        for line in lines[1:]:
            with contextlib.suppress(ValueError):  # a line that was cut off, or whatever else is no entry
                start, end, crc = line.split(" ")
                if line.endswith("\n"):
                    found[Span(int(start), int(end))] = int(crc, 16)
        return found

    def note(self, span: Span, crc: int) -> None:
        """Its data has been written."""
        with self._lock:
            if self._file < 0:
                self._file = self._opened()
            os.write(self._file, f"{span.start} {span.end} {crc:x}\n".encode())

    def close(self) -> None:
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def remove(self) -> None:
        self.close()
        self._path.unlink(missing_ok=True)

    def _opened(self) -> int:
        """To go on with what is there, if it is of this object."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        file = os.open(self._path, flags, 0o644)
        there = os.pread(file, len(self._title), 0)
        if there.decode(errors="replace") != self._title:
            os.ftruncate(file, 0)
            os.write(file, self._title.encode())
        else:
            os.write(file, b"\n")  # ends a line that was cut off
        return file
