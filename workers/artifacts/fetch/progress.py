"""The progress of a fetch, updated by worker threads and read by others."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from workers.artifacts.fetch import retry_policy
from workers.messages.actor_message import actor_message

SPAN_S = 10.0  # window of the rate
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def size_text(count: float) -> str:
    """Returns a byte count for display, such as 13.5 GB."""
    for unit, name in _UNITS:
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} bytes"


def _silence_text(seconds: float, why: str) -> str:
    return f"no answer for {seconds:.0f} s" + (f" ({why})" if why else "")


@actor_message
class FetchStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a fetch, or of another job of a host (single_flight.py)."""

    source: str
    phase: str  # waiting (for another fetch of the same), listing, fetching, verifying, done, failed
    done: int = 0  # bytes on this host, those of earlier attempts included
    total: int = 0  # bytes; 0: not known yet
    moved: int = 0  # bytes transferred over the network, discarded ones included
    rate: float = 0.0  # bytes per second over the last ten seconds
    seconds: float = 0.0  # since the start
    trouble: str = ""  # how long the source has not answered, and why; empty: the source answers
    folder: str = ""  # from which it can be loaded meanwhile (arrival.py), named by the key of its content; empty: none

    @property
    def left_s(self) -> float | None:
        """Estimated remaining seconds; None: unknown."""
        return (self.total - self.done) / self.rate if self.total and self.rate > 0.0 else None


class Progress:
    """The progress of one fetch. Thread-safe."""

    def __init__(self, source: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._clock = clock
        self._began = clock()
        self._lock = threading.Lock()
        self._phase = "listing"
        self._silence: tuple[float, str] | None = None  # start of the silence and its reason
        self._moved_at = self._began
        self._done = 0
        self._total = 0
        self._samples: deque[tuple[float, int]] = deque([(self._began, 0)])
        self.digests: dict[str, str] = {}  # by file name: content digests computed during the transfer
        self.moved = 0  # as `FetchStatus.moved`
        self.folder = ""  # as `FetchStatus.folder`, in the phase `fetching`

    def enter(self, phase: str) -> None:
        with self._lock:
            self._phase, self._silence = phase, None
            if phase != "fetching":
                self.folder = ""

    def report_silence(self, silent_s: float, why: str) -> None:
        """Records that one attempt has had no answer for ``silent_s`` seconds; 0: it has one again.

        Ignored while other attempts receive bytes.
        """
        with self._lock:
            now = self._clock()
            alone = now - self._moved_at >= retry_policy.SILENT_S
            self._silence = (now - silent_s, why) if silent_s > 0.0 and alone else None

    def expect(self, total: int, present: int = 0) -> None:
        """Sets the total; ``present`` bytes of it are on this host already."""
        with self._lock:
            self._total, self._done = total, present
            self._samples = deque([(self._clock(), present)])

    def add(self, count: int) -> None:
        """Counts bytes that have arrived and are kept; negative: bytes that were discarded."""
        with self._lock:
            self._done += count
            now = self._clock()
            self._samples.append((now, self._done))
            while len(self._samples) > 2 and self._samples[1][0] <= now - SPAN_S:
                self._samples.popleft()

    def transferred(self, count: int) -> None:
        """Counts bytes that came over the network."""
        with self._lock:
            self.moved += count
            self._silence, self._moved_at = None, self._clock()

    def status(self) -> FetchStatus:
        with self._lock:
            now = self._clock()
            at, done = self._samples[0]
            rate = max(0.0, (self._done - done) / (now - at)) if now > at else 0.0
            return FetchStatus(
                source=self._source,
                phase=self._phase,
                done=self._done,
                total=self._total,
                moved=self.moved,
                rate=rate if self._phase == "fetching" else 0.0,
                seconds=now - self._began,
                trouble="" if self._silence is None else _silence_text(now - self._silence[0], self._silence[1]),
                folder=self.folder if self._total else "",
            )
