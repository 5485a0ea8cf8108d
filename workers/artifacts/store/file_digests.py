"""Computes the digest of each file of an artifact as soon as it is complete, while others still arrive."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from workers.artifacts.store.blobs import DAMAGE, digest_of

LOOK_S = 0.1
AT_ONCE = 4  # files

Stamp = tuple[int, int, int]  # inode, size, time of the last change in ns


class Digests:
    """Digests of the named files of ``folder``. Reads them in the background inside the context."""

    def __init__(self, folder: Path, names: Iterable[str], computed: Mapping[str, str], stop: threading.Event) -> None:
        """``computed``: digests that the fetch computed from the written bytes, each set before its file appears."""
        self._folder = folder
        self._computed = computed
        self._names = frozenset(names)
        self._stop = stop
        self._left = threading.Event()
        self._lock = threading.Lock()  # guards the next one
        self._reading: dict[str, Future[tuple[Stamp, str]]] = {}
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="digests")
        self._watcher = threading.Thread(target=self._watch, name="arrivals", daemon=True)

    def __enter__(self) -> Digests:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._watcher.join()
        self._pool.shutdown(cancel_futures=True)

    def all(self) -> dict[str, str]:
        """Returns the digests of all present files; empty for an unreadable one. Raises Stopped and OSError."""
        present = [name for name in sorted(self._names) if (self._folder / name).exists()]
        for name in present:
            self._read(name)
        return {name: self._of(name) for name in present}

    def _of(self, name: str) -> str:
        if name not in self._reading:
            return self._computed[name]
        stamp, digest = self._reading[name].result()
        path = self._folder / name
        return digest if stamp == _stamp(path) else digest_of(path, self._ended)  # replaced meanwhile

    def _watch(self) -> None:
        while not self._left.wait(LOOK_S):
            for name in sorted(self._names):
                if (self._folder / name).exists():
                    self._read(name)

    def _read(self, name: str) -> None:
        with self._lock:
            if name not in self._reading and name not in self._computed:
                self._reading[name] = self._pool.submit(self._digest, self._folder / name)

    def _digest(self, path: Path) -> tuple[Stamp, str]:
        stamp = _stamp(path)
        try:
            return stamp, digest_of(path, self._ended)
        except OSError as error:
            if error.errno not in DAMAGE:
                raise
            return stamp, ""

    def _ended(self) -> bool:
        return self._left.is_set() or self._stop.is_set()


def _stamp(path: Path) -> Stamp:
    about = path.stat()
    return about.st_ino, about.st_size, about.st_mtime_ns
