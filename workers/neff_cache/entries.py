"""Reads the entries of Neuron's persistent cache: one folder per graph, compiler and set of flags.

``<root>/neuronxcc-<version>/MODULE_<key>+<flags>/``, where ``key`` comes from the graph (20 hex digits from
transformers-neuronx, a longer decimal from torch-xla) and ``flags`` is a prefix of the MD5 of the flags. Sources of the
file names: AWS's page on the cache and the package's own code.
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
OWN = "corewright"  # corewright's own folder, beside those of the compilers
WORDS = 200  # characters of a log shown in tables


class EntryState(str, Enum):
    """The state of an entry, for a start that needs the graph."""

    SUCCESS = "SUCCESS"  # model.neff and model.done: a hit
    FAILED = "FAILED"  # model.log and no NEFF: the start fails, since the compiler does not retry
    LOCKED = "LOCKED"  # being compiled: the start waits
    STALE = "STALE"  # locked, but no compiler of this host is running: the start removes the lock and compiles
    EMPTY = "EMPTY"  # the start compiles it


class CacheEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of one entry."""

    name: str  # "neuronxcc-2.16.372.0+4a9b2326/MODULE_cd73c69136bf675613f6+2c2d707e"
    state: EntryState
    bytes: int
    changed_at: float  # the last change of a file; seconds since the epoch; 0: unknown
    flags: tuple[str, ...] | None = None  # compiler flags; None: unknown
    words: str = ""  # the last line of a failure's log

    @property
    def compiler(self) -> str:
        """The compiler's version."""
        return self.name.partition("/")[0].removeprefix(COMPILERS)

    @property
    def module(self) -> str:
        return self.name.partition("/")[2]

    @property
    def key(self) -> str:
        """The key of the graph."""
        return self.module.removeprefix(compiler_cache.GRAPH).partition("+")[0]

    @property
    def flags_key(self) -> str:
        """The key of the flags; ``d41d8cd9``: no flags."""
        return self.module.partition("+")[2]


def state_of(names: Collection[str], at_work: bool = True) -> EntryState:
    """Returns the state by the names of an entry's files. ``at_work``: whether a compiler may be running for it."""
    if NEFF in names and DONE in names:
        return EntryState.SUCCESS
    if any(name.endswith(".lock") for name in names):
        return EntryState.LOCKED if at_work else EntryState.STALE
    return EntryState.FAILED if LOG in names and NEFF not in names else EntryState.EMPTY


def read_entries(root: Path, now: float | None = None) -> tuple[CacheEntry, ...]:
    """Returns the entries of a local folder, by name; none if the folder does not exist.

    A lock is stale if no compiler of this host is running for the graph, its folder has not changed for two seconds,
    and the file system is not shared with other hosts.
    """
    folders = sorted(path for path in root.glob(compiler_cache.GRAPHS) if path.is_dir())
    locked = any(path.name.endswith(".lock") for folder in folders for path in _files(folder))
    commands = compiler_cache.compilers() if locked else []
    shared = locked and compiler_cache.file_system(root) in compiler_cache.SHARED
    unnamed = any(compiler_cache.GRAPH not in command for command in commands)  # its graph is unknown
    at = time.time() if now is None else now
    entries = []
    for folder in folders:
        busy = shared or unnamed or any(folder.name in command for command in commands)
        entries.append(_read(folder, busy, at))
    return tuple(entries)


def read_entry(root: Path, name: str) -> CacheEntry:
    """Returns one entry by name; EMPTY if it does not exist. A lock counts as a running compiler."""
    return _read(root / name, True, time.time())


def listed_entries(files: Iterable[RemoteFile]) -> tuple[CacheEntry, ...]:
    """Returns the entries of a remote cache by the names and sizes of its files. Remote compilers are not visible."""
    folders: dict[str, list[RemoteFile]] = {}
    for file in files:
        name, _, leaf_name = file.name.rpartition("/")
        if name.startswith(COMPILERS) and name.count("/") == 1 and leaf_name:
            folders.setdefault(name, []).append(file)
    return tuple(
        CacheEntry(
            name=name,
            # an empty NEFF may have been pushed by a host after a power failure
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
        if (status := about(path)) is None:
            continue  # removed meanwhile
        sizes[path.name] = status.st_size
        changed = max(changed, status.st_mtime)
    if not sizes and (status := about(folder)) is not None:
        changed = status.st_mtime  # a starting compile creates the folder first
    state = state_of(sizes, busy or now - changed < compiler_cache.SETTLE_S)
    if state is EntryState.SUCCESS and not sizes[NEFF]:
        state = EntryState.EMPTY  # after a power failure: the file was never synced to disk
    lines = compiler_cache.tail_of(folder / LOG).split("\n") if state is EntryState.FAILED else []
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
        flags = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return tuple(map(str, flags)) if isinstance(flags, list) else None
