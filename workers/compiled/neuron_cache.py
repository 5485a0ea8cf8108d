"""Neuron's persistent cache of compiled graphs (NEFFs) on this host: its place, its entries, leftovers of compilers.

One folder per graph, compiler and set of flags, ``<root>/neuronxcc-<version>/MODULE_<key>+<flags>/``, where ``key``
comes from the graph (20 hex digits from transformers-neuronx, a longer decimal from torch-xla) and ``flags`` is a
prefix of the MD5 of the flags. Sources of the file names: AWS's page on the cache and the package's own code.

Two leftovers of killed compilers would block every later load of a model; users report both.

1. The lock of a graph (``*.lock``), if the whole compile was killed: the next compile waits forever and logs "Another
   process must be compiling" every minute.
2. The failure of a graph (``model.log`` and no NEFF), if only the compiler was killed: neither transformers-neuronx nor
   NxD Inference (``ModelBuilder.trace`` of neuronx-distributed) retries it, as if the compiler could not compile the
   graph.

Both are removed from a folder of this host; nothing else is, and nothing in ``s3://``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from pathlib import Path

import msgspec
import psutil

from workers.artifacts.sources.listing import RemoteFile
from workers.compiled.file_states import about, files_below
from workers.host.neuron_faults import fault_of

log = logging.getLogger(__name__)

URL = "NEURON_COMPILE_CACHE_URL"
DEFAULT = "/var/tmp/neuron-compile-cache"
COMPILER = "neuronx-cc"
COMPILERS = "neuronxcc-"
GRAPH = "MODULE_"  # prefix of graph folders, MODULE_<key>+<flags>, and of the compiler's input files
GRAPHS = f"{COMPILERS}*/{GRAPH}*"
LOG, NEFF, DONE, FLAGS = "model.log", "model.neff", "model.done", "compile_flags.json"
OWN = "corewright"  # corewright's own folder, beside those of the compilers
RETRIED = "--retry_failed_compilation"
WRAPPER_FLAGS = frozenset({"--cache_dir", "--no_cache", "--log_level", RETRIED})  # not passed to the compiler
SETTLE_S = 2.0  # a graph is idle if unchanged for so long; a compiler starts sooner after its lock
LOG_TAIL = 64 * 1024
WORDS = 200  # characters of a log shown in tables
# Shared file systems: compilers of other hosts use them and are not visible here.
SHARED = frozenset(
    {"afs", "beegfs", "ceph", "cifs", "glusterfs", "lustre", "mountpoint-s3", "nfs", "nfs4", "s3fs", "smb3", "sshfs"}
)


def flags_of(environment: Mapping[str, str]) -> list[str]:
    """Returns the flags of the compiler and of its wrapper."""
    return environment.get("NEURON_CC_FLAGS", "").split()


def location(environment: Mapping[str, str]) -> Path | None:
    """Returns the folder of the cache; None: no cache, or a remote one."""
    named = ""
    for flag in flags_of(environment):
        if flag == "--no_cache":
            return None
        if flag.startswith("--cache_dir="):
            named = flag.partition("=")[2]
    url = (named or environment.get(URL) or DEFAULT).removeprefix("file://")
    return None if "://" in url else Path(url)


# Entries


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
        return self.module.removeprefix(GRAPH).partition("+")[0]

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
    is_busy = _compiler_check() if any(root.glob(f"{GRAPHS}/*.lock")) and file_system(root) not in SHARED else None
    at = time.time() if now is None else now
    folders = sorted(path for path in root.glob(GRAPHS) if path.is_dir())
    return tuple(_read(folder, is_busy is None or is_busy(folder), at) for folder in folders)


def read_entry(root: Path, name: str) -> CacheEntry:
    """Returns one entry by name; EMPTY if it does not exist. A lock counts as a running compiler."""
    return _read(root / name, True, time.time())


def is_finished(cache: Path, name: str) -> bool:
    """Returns whether the entry is finished."""
    return read_entry(cache, name).state is EntryState.SUCCESS


def is_stuck(cache: Path, entry: CacheEntry) -> bool:
    """Returns whether an entry has a failure that neither the compiler nor the start retries."""
    return entry.state is EntryState.FAILED and not was_killed(tail_of(cache / entry.name / LOG))


def listed_entries(files: Iterable[RemoteFile]) -> tuple[CacheEntry, ...]:
    """Returns the entries of a remote cache by the names and sizes of its files. Remote compilers are not visible."""
    folders: dict[str, list[RemoteFile]] = {}
    for file in files:
        name, _, leaf = file.name.rpartition("/")
        compiler, _, module = name.partition("/")
        if compiler.startswith(COMPILERS) and module.startswith(GRAPH) and "/" not in module and leaf:
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
    )


def _read(folder: Path, busy: bool, now: float) -> CacheEntry:
    files = {path.name: status for path, status in files_below(folder)}
    changed = max((status.st_mtime for status in files.values()), default=0.0)
    if not files and (status := about(folder)) is not None:
        changed = status.st_mtime  # a starting compile creates the folder first
    state = state_of(files, busy or now - changed < SETTLE_S)
    if state is EntryState.SUCCESS and not files[NEFF].st_size:
        state = EntryState.EMPTY  # after a power failure: the file was never synced to disk
    lines = tail_of(folder / LOG).split("\n") if state is EntryState.FAILED else []
    words = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return CacheEntry(
        name=f"{folder.parent.name}/{folder.name}",
        state=state,
        bytes=sum(status.st_size for status in files.values()),
        changed_at=changed,
        flags=_flags(folder / FLAGS),
        words=words[:WORDS],
    )


def _flags(file: Path) -> tuple[str, ...] | None:
    try:
        flags = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return tuple(map(str, flags)) if isinstance(flags, list) else None


# Compilers and what they leave


def compilers() -> list[str]:
    """Returns the command lines of running compilers of all users. Those in other containers are not visible."""
    commands = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()  # a Python script: the interpreter comes first
            if any(Path(word).name == COMPILER for word in words[:3]):
                commands.append(" ".join(words))
    return commands


def _compiler_check() -> Callable[[Path], bool]:
    """Returns a function that says whether a compiler of this host may be running for the graph of a folder."""
    commands = compilers()
    unnamed = any(GRAPH not in command for command in commands)  # a compiler without its graph in its command line
    return lambda folder: unnamed or any(folder.name in command for command in commands)


def file_system(path: Path) -> str:
    """Returns the file system type of a path, as shown by ``mount``."""
    real, best, kind = path.resolve(), -1, ""
    for mount in psutil.disk_partitions(all=True):
        point = Path(mount.mountpoint)
        if real.is_relative_to(point) and len(point.parts) >= best:  # a later mount on the same point wins
            best, kind = len(point.parts), mount.fstype
    return kind.removeprefix("fuse.")


def make_ready(root: Path) -> None:
    """Removes leftovers of killed compilers from ``root`` and logs each; skips those that cannot be removed."""
    remove_stale_locks(root)
    for log_file in root.glob(f"{GRAPHS}/{LOG}"):
        folder = log_file.parent
        if (folder / NEFF).exists() or any(folder.glob("*.lock")):
            continue
        if was_killed(tail_of(log_file)) and remove(folder):
            log.warning("removed %s: its %s was killed; the graph will be compiled again", folder, COMPILER)


def remove_stale_locks(root: Path) -> None:
    """Removes the locks of graphs without a compiler on this host whose folders do not change."""
    first = _uncompiled(root)
    if not first:
        return
    if (kind := file_system(root)) in SHARED:
        log.warning("keeping the locks in %s: on %s, compilers of other hosts may be running", root, kind)
        return
    time.sleep(SETTLE_S)
    second = _uncompiled(root)
    for lock, content in first.items():
        if second.get(lock) == content and remove(lock):
            log.warning(
                "removed %s: no %s is running for that graph, and loads would wait for it forever", lock, COMPILER
            )


def _uncompiled(root: Path) -> dict[Path, list[tuple[str, int, int]]]:
    """Returns the locks of graphs without a compiler, with the names, sizes and times of the files in their folder."""
    locks = list(root.glob(f"{GRAPHS}/*.lock"))
    if not locks:
        return {}
    is_busy = _compiler_check()
    return {
        lock: [(path.name, status.st_size, status.st_mtime_ns) for path, status in files_below(lock.parent)]
        for lock in locks
        if not is_busy(lock.parent)
    }


def was_killed(words: str) -> bool:
    """Returns whether a failure's log shows that the compiler was killed by a signal, so that a retry makes sense."""
    fault = fault_of(RuntimeError(words))
    return fault is not None and fault.id == "compiler-killed"


def tail_of(path: Path) -> str:
    """Returns the end of a log; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def remove(path: Path) -> bool:
    """Removes a file or a folder. False: it was gone already, or could not be removed, which is logged."""
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        return False  # another process was faster
    except OSError as error:
        log.warning("cannot remove %s, left by a killed compile: %s", path, error)
        return False
    return True
