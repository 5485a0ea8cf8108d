"""Prints progress lines while a command waits, after each silence."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

SILENCE_S = 3.0  # the documented limit is 5 s, and a busy interpreter may be late by 2 s


class WaitingNotice:
    """Forwards progress lines, and adds lines during silences. Thread-safe."""

    def __init__(
        self,
        say: Callable[[str], None],
        silence_s: float = SILENCE_S,
        shown: Callable[[], bool] = lambda: False,
    ) -> None:
        """No lines are added while ``shown``: something else shows the progress."""
        self._say = say
        self._silence_s = silence_s
        self._shown = shown
        self._said = time.monotonic()

    def __call__(self, line: str) -> None:
        self._said = time.monotonic()
        self._say(line)

    @contextlib.contextmanager
    def waiting(self, what: Callable[[], str]) -> Iterator[None]:
        """Print a line that names ``what`` after each silence, while the body runs."""
        over = threading.Event()
        self._said = time.monotonic()
        thread = threading.Thread(target=self._beat, args=(what, over), name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _beat(self, what: Callable[[], str], over: threading.Event) -> None:
        begun = time.monotonic()
        while not over.wait(max(0.0, self._said + self._silence_s - time.monotonic())):
            if (now := time.monotonic()) >= self._said + self._silence_s:
                if self._shown():
                    self._said = now
                    continue
                self(f"waiting for {what()} ({now - begun:.0f} s)")
