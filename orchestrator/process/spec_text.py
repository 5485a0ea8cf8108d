"""Reads the text of a spec file, of a bounded size."""

from __future__ import annotations

import os
import stat

from orchestrator.process.failure import Failed

MAX_SPEC_BYTES = 4 * 2**20


def read_text(path: str, *, regular: bool = False) -> str:
    """Returns the text of a spec file. ``regular``: of a file only, since opening a pipe may block. Raises Failed
    `spec-unreadable`."""
    flags = os.O_NONBLOCK if regular else 0
    try:
        with open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags)) as stream:
            if regular and not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise Failed("spec-unreadable", f"{path} is not a regular file", "check the path")
            data = stream.read(MAX_SPEC_BYTES + 1)
    except OSError as error:
        raise Failed("spec-unreadable", f"{path} cannot be read: {error.strerror}", "check the path") from None
    return decoded(data, path)


def decoded(data: bytes, name: str) -> str:
    """Returns the text of the bytes that were read from ``name``. Raises Failed `spec-unreadable`."""
    if len(data) > MAX_SPEC_BYTES:
        fact = f"{name} is larger than {MAX_SPEC_BYTES} bytes"
        raise Failed("spec-unreadable", fact, "check that the file is a spec")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        fact = f"{name} is not UTF-8: byte {error.start} is {data[error.start]:#04x}"
        raise Failed("spec-unreadable", fact, "save it as UTF-8") from None
