"""Reading files that others made: a checkpoint may hold a pipe, a device, or JSON that no reader survives."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

MAX_CONFIG_BYTES = 16 * 2**20  # of a config or an index; the largest index known has 9 MB
MAX_TOKENIZER_BYTES = 64 * 2**20  # the largest tokenizer.json known has 35 MB
MAX_DEPTH = 64  # levels of JSON, far below where Python's own recursion ends


def read_bytes(path: Path, most: int = MAX_CONFIG_BYTES) -> bytes:
    """Returns the content of a regular file. Raises OSError, also for any other kind, which is not opened, and for more
    than ``most`` bytes."""
    check_regular(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # without a wait, should it be a pipe by now
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(most + 1) or b""
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return data


def read_json(path: Path, most: int = MAX_CONFIG_BYTES) -> Any:
    """Returns the decoded content. Raises OSError as ``read_bytes``, and ValueError for anything but JSON of a usual
    depth."""
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
    """Raises OSError for a folder that holds anything but regular files and folders: libraries would open it, and wait
    for ever. A link that leads nowhere is passed over."""
    for entry in os.scandir(folder):
        try:
            mode = entry.stat().st_mode
        except OSError:
            continue
        if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file", entry.path)
