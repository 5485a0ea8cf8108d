"""Waits for a file to be readable, with any number of open files: `select` takes none beyond 1,023."""

from __future__ import annotations

import select
from typing import IO, Any


def is_readable(file: IO[Any] | int, deadline_s: float) -> bool:
    """Returns whether there is something to read, or the end of the file, before the deadline."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(deadline_s * 1000))
