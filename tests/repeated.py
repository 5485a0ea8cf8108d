"""Work that is repeated in a thread while a test goes on."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class Repeated:
    """Calls ``look`` every ``pause_s`` seconds while its block lasts. An error ends the calls, and is raised at the end
    of the block unless that has failed itself."""

    pause_s = 1.0

    def look(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._over = threading.Event()
        self._thread = ThreadPoolExecutor(1)
        self._ended = self._thread.submit(self._repeat)
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        self._thread.shutdown()
        if failed is None:
            self._ended.result()

    def _repeat(self) -> None:
        while not self._over.wait(self.pause_s):
            self.look()
