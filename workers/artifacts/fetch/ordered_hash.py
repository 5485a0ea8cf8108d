"""A hash that must see the bytes in order, while their ranges arrive in any."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Sequence

from workers.artifacts.sources.checksums import Hash
from workers.artifacts.store.range_ledger import Span


class OrderedHash:
    """Hashes what has no gap before it, as soon as somebody has a moment. May be used by any number of threads."""

    def __init__(self, spans: Sequence[Span], new: Callable[[], Hash], read: Callable[[Span], Iterable[bytes]]) -> None:
        """``spans`` in their order. ``read`` gives the bytes of one that has arrived."""
        self._spans = spans
        self._new = new
        self._read = read
        self._lock = threading.Lock()  # of what follows
        self._hash = new()
        self._done = 0

    def go_on(self, arrived: Container[Span], wait: bool = False) -> None:
        """As far as the spans have arrived; not ``wait``: unless somebody else does it just now."""
        if not self._lock.acquire(blocking=wait):
            return
        try:
            while self._done < len(self._spans) and self._spans[self._done] in arrived:
                for data in self._read(self._spans[self._done]):
                    self._hash.update(data)
                self._done += 1
        finally:
            self._lock.release()

    def digest(self, arrived: Container[Span]) -> bytes:
        """When all have arrived."""
        self.go_on(arrived, wait=True)
        return self._hash.digest()

    def forget(self) -> None:
        """They arrive again."""
        with self._lock:
            self._hash, self._done = self._new(), 0
