"""Reads untrusted files safely: a checkpoint may contain pipes, devices, or JSON that crashes a parser."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

MAX_CONFIG_BYTES = 16 * 2**20  # of a config or an index; the largest known index has 9 MB
MAX_TOKENIZER_BYTES = 64 * 2**20  # the largest known tokenizer.json has 35 MB
MAX_DEPTH = 64  # levels of JSON, far below Python's recursion limit


def read_bytes(path: Path, most: int = MAX_CONFIG_BYTES) -> bytes:
    """Returns the content of a regular file. Raises OSError, also for other file types, which are not opened, and for
    more than ``most`` bytes."""
    check_regular(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # does not block if it has become a pipe
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(most + 1) or b""
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return data


def read_json(path: Path, most: int = MAX_CONFIG_BYTES) -> Any:
    """Returns the decoded JSON. Raises OSError as ``read_bytes``, and ValueError for invalid or too deeply nested
    JSON."""
    data = read_bytes(path, most)
    try:
        value = json.loads(data.decode())
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            part
            for parent in level
            if isinstance(parent, (dict, list))
            for part in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return value
    raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")


def check_regular(path: Path) -> None:
    """Raises OSError for anything but a regular file."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def check_folder(folder: Path) -> None:
    """Raises OSError for a folder with anything but regular files and folders: libraries would open a pipe and block
    forever. Ignores broken links."""
    for entry in os.scandir(folder):
        try:
            mode = entry.stat().st_mode
        except OSError:
            continue
        if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file", entry.path)
