"""How far a fetch is, told by the threads that work to those that ask."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from workers.artifacts.fetch import retry_policy

SPAN_S = 10.0  # over which the rate is measured
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def size_text(count: float) -> str:
    """Bytes, such as 13.5 GB."""
    for unit, name in _UNITS:
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} bytes"


def _silence(seconds: float, why: str) -> str:
    return f"no answer for {seconds:.0f} s" + (f" ({why})" if why else "")


class FetchStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A fetch at one moment."""

    source: str
    phase: str  # waiting (for another that fetches the same), listing, fetching, verifying, copying, done, failed
    done: int = 0  # bytes that are here, those of earlier attempts as well
    total: int = 0  # bytes; 0 while it is not known
    rate: float = 0.0  # bytes a second, over the last ten seconds
    seconds: float = 0.0  # since it began
    trouble: str = ""  # for how long its source has not answered, and why; empty: no attempt has failed since it did

    @property
    def left_s(self) -> float | None:
        """Seconds until it is done, at this rate; None: nobody knows."""
        return (self.total - self.done) / self.rate if self.total and self.rate > 0.0 else None


class Progress:
    """Of one fetch. Every method may be called from any thread."""

    def __init__(self, source: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._clock = clock
        self._began = clock()
        self._lock = threading.Lock()
        self._phase = "listing"
        self._silent: tuple[float, str] | None = None  # since when its source does not answer, and why
        self._moved_at = self._began
        self._done = 0
        self._total = 0
        self._seen: deque[tuple[float, int]] = deque([(self._began, 0)])
        self.digests: dict[str, str] = {}  # of contents (content.py) that were hashed while they came, by name
        self.moved = 0  # bytes that came over the network, those that were thrown away as well

    def enter(self, phase: str) -> None:
        with self._lock:
            self._phase, self._silent = phase, None

    def tell(self, silent_s: float, why: str) -> None:
        """Its source, or what one of several attempts at it asks, has not answered for so long; 0: it does again.

        As long as bytes come to another attempt, the source is there.
        """
        with self._lock:
            now = self._clock()
            alone = now - self._moved_at >= retry_policy.SILENT_S
            self._silent = (now - silent_s, why) if silent_s > 0.0 and alone else None

    def expect(self, total: int, here: int = 0) -> None:
        """``total`` bytes are to be fetched, of which ``here`` are there already."""
        with self._lock:
            self._total, self._done = total, here
            self._seen = deque([(self._clock(), here)])

    def add(self, count: int) -> None:
        """So many bytes more have arrived and are kept; negative: they are of no use after all."""
        with self._lock:
            self._done += count
            now = self._clock()
            self._seen.append((now, self._done))
            while len(self._seen) > 2 and self._seen[1][0] <= now - SPAN_S:
                self._seen.popleft()

    def transferred(self, count: int) -> None:
        """So many bytes came over the network."""
        with self._lock:
            self.moved += count
            self._silent, self._moved_at = None, self._clock()

    def status(self) -> FetchStatus:
        with self._lock:
            now = self._clock()
            at, done = self._seen[0]
            rate = max(0.0, (self._done - done) / (now - at)) if now > at else 0.0
            return FetchStatus(
                source=self._source,
                phase=self._phase,
                done=self._done,
                total=self._total,
                rate=rate if self._phase == "fetching" else 0.0,
                seconds=now - self._began,
                trouble="" if self._silent is None else _silence(now - self._silent[0], self._silent[1]),
            )
