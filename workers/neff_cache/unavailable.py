"""A cache that gives no answer: whoever would have asked it goes on without it, and says so.

What it holds can be compiled, or lies on this host already: that it is away costs time, and no start.
"""

from __future__ import annotations

import logging
import threading

from workers.artifacts.sources.listing import SourceError

log = logging.getLogger(__name__)

AWAY = frozenset({"s3-unreachable", "neff-cache-unreadable"})  # passes by itself; anything else somebody has to mend
PATIENCE_S = 60.0  # with a cache that does not answer: shorter than with a model, which nothing takes the place of

_said: set[tuple[str, str]] = set()  # location and id, of what this process has logged
_saying = threading.Lock()


def in_words(location: str, error: SourceError) -> str:
    """Why nobody knows what the cache at ``location`` holds."""
    shown = location if "@" not in location else f"s3://{location.rpartition('@')[2]}"  # no user and no password
    how = "does not answer" if error.id in AWAY else "cannot be used"
    return f"the cache at {shown.partition('?')[0]} {how}: {error}"


def say(location: str, error: SourceError) -> str:
    """The same, for the log too: once in a process, and as an error where it does not pass by itself."""
    words = in_words(location, error)
    with _saying:
        is_new = (location, error.id) not in _said
        _said.add((location, error.id))
    if is_new:
        log.log(logging.WARNING if error.id in AWAY else logging.ERROR, "%s; it goes on without it", words)
    return words
