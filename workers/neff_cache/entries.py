"""The entries of Neuron's persistent cache: one folder for each graph, compiler and set of flags.

``<root>/neuronxcc-<version>/MODULE_<key>+<flags>/``, where ``key`` comes from the graph (20 hex digits from
transformers-neuronx, a longer decimal from torch-xla) and ``flags`` is the beginning of the MD5 of the flags. AWS's
page on the cache and the package's own code tell the files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Iterator
from enum import Enum
from pathlib import Path

import msgspec

from workers.artifacts.sources.listing import RemoteFile
from workers.neff_cache import compiler_cache
from workers.neff_cache.compiler_cache import LOG, NEFF
from workers.neff_cache.file_states import about

DONE = "model.done"
FLAGS = "compile_flags.json"
COMPILERS = "neuronxcc-"
OWN = "corewright"  # the folder beside those of the compilers, where corewright keeps its own
WORDS = 200  # characters of a log that a table shows


class State(str, Enum):
    """What a start that needs the graph meets."""

    SUCCESS = "SUCCESS"  # model.neff and model.done: it is taken
    FAILED = "FAILED"  # model.log and no NEFF: the start fails, for the compiler does not try again
    LOCKED = "LOCKED"  # somebody compiles it: the start waits
    STALE = "STALE"  # locked, and no compiler of this host works at it: the start removes the lock and compiles
    EMPTY = "EMPTY"  # it is compiled


class CacheEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One of them, as it was found."""

    name: str  # "neuronxcc-2.16.372.0+4a9b2326/MODULE_cd73c69136bf675613f6+2c2d707e"
    state: State
    bytes: int
    changed_at: float  # the last change of a file; seconds since the epoch; 0: nobody tells
    flags: tuple[str, ...] | None = None  # that the compiler was given; None: not told
    words: str = ""  # the last line of a failure's log

    @property
    def compiler(self) -> str:
        """Its version."""
        return self.name.partition("/")[0].removeprefix(COMPILERS)

    @property
    def module(self) -> str:
        return self.name.partition("/")[2]

    @property
    def key(self) -> str:
        """Of the graph."""
        return self.module.removeprefix(compiler_cache.GRAPH).partition("+")[0]

    @property
    def flags_key(self) -> str:
        """Of the flags; ``d41d8cd9`` where there were none."""
        return self.module.partition("+")[2]


def state_of(names: Collection[str], at_work: bool = True) -> State:
    """By the names of an entry's files. ``at_work``: whether a compiler may be at it, as far as this host can see."""
    if NEFF in names and DONE in names:
        return State.SUCCESS
    if any(name.endswith(".lock") for name in names):
        return State.LOCKED if at_work else State.STALE
    return State.FAILED if LOG in names and NEFF not in names else State.EMPTY


def read_entries(root: Path, now: float | None = None) -> tuple[CacheEntry, ...]:
    """Those of a folder of this host, by name; none where there is no folder.

    A lock is called stale when no compiler of this host works at the graph, its folder has not changed for two seconds
    and lies on a file system of this host alone.
    """
    folders = sorted(path for path in root.glob(compiler_cache.GRAPHS) if path.is_dir())
    locked = any(path.name.endswith(".lock") for folder in folders for path in _files(folder))
    commands = compiler_cache.compilers() if locked else []
    shared = locked and compiler_cache.file_system(root) in compiler_cache.SHARED
    unnamed = any(compiler_cache.GRAPH not in command for command in commands)  # it does not say what it compiles
    at = time.time() if now is None else now
    found = []
    for folder in folders:
        busy = shared or unnamed or any(folder.name in command for command in commands)
        found.append(_read(folder, busy, at))
    return tuple(found)


def read_entry(root: Path, name: str) -> CacheEntry:
    """One of them by its name. A lock of it counts as somebody's at work. EMPTY where it is not there."""
    return _read(root / name, True, time.time())


def listed_entries(files: Iterable[RemoteFile]) -> tuple[CacheEntry, ...]:
    """Those of a cache elsewhere, by the names and sizes of its files. Who is at work there is not seen."""
    folders: dict[str, list[RemoteFile]] = {}
    for file in files:
        name, _, rest = file.name.rpartition("/")
        if name.startswith(COMPILERS) and name.count("/") == 1 and rest:
            folders.setdefault(name, []).append(file)
    return tuple(
        CacheEntry(
            name=name,
            # a NEFF without a byte is what a host that lost its power may have pushed
            state=state_of({leaf for file in held if (leaf := file.name.rpartition("/")[2]) != NEFF or file.size}),
            bytes=sum(file.size for file in held),
            changed_at=0.0,
        )
        for name, held in sorted(folders.items())
        if name.partition("/")[2].startswith(compiler_cache.GRAPH)
    )


def _read(folder: Path, busy: bool, now: float) -> CacheEntry:
    sizes, changed = {}, 0.0
    for path in _files(folder):
        if (found := about(path)) is None:
            continue  # it went meanwhile
        sizes[path.name] = found.st_size
        changed = max(changed, found.st_mtime)
    if not sizes and (found := about(folder)) is not None:
        changed = found.st_mtime  # a compile that just begins makes the folder first
    state = state_of(sizes, busy or now - changed < compiler_cache.SETTLE_S)
    if state is State.SUCCESS and not sizes[NEFF]:
        state = State.EMPTY  # what a power failure leaves of a file that was never written to the disk
    lines = compiler_cache.tail_of(folder / LOG).split("\n") if state is State.FAILED else []
    words = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return CacheEntry(
        name=f"{folder.parent.name}/{folder.name}",
        state=state,
        bytes=sum(sizes.values()),
        changed_at=changed,
        flags=_flags(folder / FLAGS),
        words=words[:WORDS],
    )


def _files(folder: Path) -> Iterator[Path]:
    try:
        yield from (path for path in folder.iterdir() if path.is_file())
    except OSError:
        return


def _flags(file: Path) -> tuple[str, ...] | None:
    try:
        told = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return tuple(map(str, told)) if isinstance(told, list) else None
