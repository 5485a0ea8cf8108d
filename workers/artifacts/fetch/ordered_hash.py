"""Computes an order-dependent hash of data whose ranges arrive in any order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Sequence

from workers.artifacts.sources.checksums import Hash
from workers.artifacts.store.range_ledger import Span


class OrderedHash:
    """Hashes ranges in order as soon as all earlier ones have arrived. Thread-safe."""

    def __init__(self, spans: Sequence[Span], new: Callable[[], Hash], read: Callable[[Span], Iterable[bytes]]) -> None:
        """``spans``: in order. ``read`` yields the bytes of a span that has arrived."""
        self._spans = spans
        self._new = new
        self._read = read
        self._lock = threading.Lock()  # guards the attributes below
        self._hash = new()
        self._done = 0

    def go_on(self, arrived: Container[Span], wait: bool = False) -> None:
        """Hashes up to the first missing span; without ``wait``, returns at once if another thread is hashing."""
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
        """Returns the hash, once all spans have arrived."""
        self.go_on(arrived, wait=True)
        return self._hash.digest()

    def forget(self) -> None:
        """Starts over: all spans are to arrive again."""
        with self._lock:
            self._hash, self._done = self._new(), 0
