"""Reports a remote cache that does not answer; its users continue without it.

Its entries can be compiled or may be on this host already, so an unavailable cache costs time but no start.
"""

from __future__ import annotations

import logging
import threading

from workers.artifacts.sources.listing import SourceError

log = logging.getLogger(__name__)

AWAY = frozenset({"s3-unreachable", "neff-cache-unreadable"})  # transient; other errors need a fix
PATIENCE_S = 60.0  # retry deadline; shorter than for a model, which has no substitute

_logged: set[tuple[str, str]] = set()  # locations and error ids that this process has logged
_lock = threading.Lock()


def describe(location: str, error: SourceError) -> str:
    """Describes why the content of the cache at ``location`` is unknown."""
    shown = location if "@" not in location else f"s3://{location.rpartition('@')[2]}"  # without user and password
    how = "does not answer" if error.id in AWAY else "cannot be used"
    return f"the cache at {shown.partition('?')[0]} {how}: {error}"


def log_unavailable(location: str, error: SourceError) -> str:
    """Describes the error and logs it once per process; as an error unless it is transient."""
    text = describe(location, error)
    with _lock:
        is_new = (location, error.id) not in _logged
        _logged.add((location, error.id))
    if is_new:
        log.log(logging.WARNING if error.id in AWAY else logging.ERROR, "%s; continuing without it", text)
    return text
