"""Where a secret is to be seen: in texts, in files, in command lines and titles of processes."""

from __future__ import annotations

import base64
import contextlib
import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

import psutil

from tests import hub, s3

PASSWORD = "password-marked-4711"  # of an address: http://user:password@host
USER = "user-marked"
LOOK_S = 0.1  # between two looks at the processes
LARGEST = 64 * 2**20  # bytes of a file that is looked through
_CREDENTIALS = (s3.ACCESS_KEY, s3.SECRET_KEY, s3.SESSION_TOKEN, hub.TOKEN, PASSWORD, "AKIAHUBMARKED", "hubmarked")
_WRITTEN = (  # as they stand in an address, and in a header of basic authorization
    *(quote(credential, safe="") for credential in _CREDENTIALS),
    base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode(),
)
_SIGNED = ("X-Amz-Signature", "X-Amz-Credential", "X-Amz-Security-Token", "Signature=")
MARKS = tuple(dict.fromkeys((*_CREDENTIALS, *_WRITTEN, *_SIGNED)))
_LOWERED = tuple((mark, mark.lower().encode()) for mark in MARKS)


def in_text(text: str | bytes) -> list[str]:
    """The marks that it has, in whatever case."""
    data = (text.encode(errors="replace") if isinstance(text, str) else text).lower()
    return [mark for mark, lowered in _LOWERED if lowered in data]


def in_files(*roots: Path) -> list[str]:
    """``path: mark`` for each file below the roots, but weights; its name counts as well."""
    leaked = []
    for path in (path for root in roots for path in [root, *root.rglob("*")]):
        leaked += [f"the name {path}: {mark}" for mark in in_text(str(path))]
        with contextlib.suppress(FileNotFoundError):  # it goes meanwhile
            if path.is_file() and path.suffix != ".safetensors" and path.stat().st_size < LARGEST:
                leaked += [f"{path}: {mark}" for mark in in_text(path.read_bytes())]
    return leaked


def in_processes(pids: Iterable[int]) -> list[str]:
    """What their command lines and names show to every user of the machine. What has ended meanwhile shows nothing."""
    leaked = []
    for pid in pids:
        for what in ("cmdline", "comm"):
            with contextlib.suppress(OSError):
                shown = Path(f"/proc/{pid}/{what}").read_bytes()
                leaked += [f"{what} of {pid}, {shown!r}: {mark}" for mark in in_text(shown)]
    return leaked


class Watch:
    """Looks, as long as it is entered, at all processes that this one starts, and those at theirs."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self.seen: set[int] = set()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(LOOK_S):
            pids = [child.pid for child in psutil.Process().children(recursive=True)]
            self.seen.update(pids)
            self.found.update(in_processes(pids))
