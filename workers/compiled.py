"""Compiled artifacts on this host: a folder for each manifest, complete or not there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2s
from pathlib import Path
from typing import Any

MANIFEST = "corewright.json"  # written last: a folder without it is what a compile that died has left


@dataclass(frozen=True)
class Entry:
    """One folder of artifacts, locked for whoever holds it."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def complete(self) -> bool:
        """Whether a compile of that very manifest has finished here."""
        try:
            return bool(json.loads((self.path / MANIFEST).read_text()) == self.manifest)
        except (OSError, ValueError):
            return False

    def finish(self) -> None:
        """Everything is in the folder."""
        written = self.path / f"{MANIFEST}.new"
        written.write_text(json.dumps(self.manifest, indent=1, sort_keys=True))
        written.replace(self.path / MANIFEST)


@contextlib.contextmanager
def entry(root: Path, manifest: Mapping[str, Any]) -> Iterator[Entry]:
    """The entry of ``manifest``, which names all that the artifacts depend on: engine, versions, shapes, flags.

    One process at a time: who comes second waits, and finds it complete. What is there and not complete is removed.
    ``manifest`` is JSON. Raises OSError where ``root`` cannot be written.
    """
    root.mkdir(parents=True, exist_ok=True)
    plain = json.loads(json.dumps(manifest))
    name = blake2s(json.dumps(plain, sort_keys=True).encode(), digest_size=10).hexdigest()
    found = Entry(root / name, plain)
    lock = os.open(root / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it with the process
        if not found.complete:
            shutil.rmtree(found.path, ignore_errors=True)
            found.path.mkdir()
        yield found
    finally:
        os.close(lock)
