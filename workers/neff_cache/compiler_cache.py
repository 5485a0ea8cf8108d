"""The persistent cache of the Neuron compiler, made ready for a load.

Two things that stay in it when compilers are killed would keep a model from ever loading. AWS's page on the cache
describes its folders; users report both.

1. The lock of a graph (``*.lock``), when its compile was killed as a whole: the next one waits for it without end,
   and says "Another process must be compiling" every minute.
2. The failure of a graph (``model.log`` and no NEFF), when its compiler alone was killed: neither transformers-neuronx
   nor NxD Inference from 0.3 on (``ModelBuilder.trace`` of neuronx-distributed) tries it again, as they would not where
   the compiler cannot compile the graph.

Both are removed where the cache is a folder of this host. Nothing else is, and nothing ever in ``s3://``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from workers.host.neuron_faults import fault_of

log = logging.getLogger(__name__)

DEFAULT = "/var/tmp/neuron-compile-cache"
COMPILER = "neuronx-cc"
GRAPH = "MODULE_"  # folders of graphs, MODULE_<key>+<flags>, are called so, and the files that the compiler is given
GRAPHS = f"neuronxcc-*/{GRAPH}*"
LOG, NEFF = "model.log", "model.neff"
WRAPPER_FLAGS = frozenset(
    {"--cache_dir", "--no_cache", "--log_level", "--retry_failed_compilation"}
)  # not the compiler's
SETTLE_S = 2.0  # a graph that nobody compiles looks so for that long: between lock and compiler is less
LOG_TAIL = 64 * 1024
# Other hosts' compilers work in these as well, and are not seen from here.
SHARED = frozenset(
    {"afs", "beegfs", "ceph", "cifs", "glusterfs", "lustre", "mountpoint-s3", "nfs", "nfs4", "s3fs", "smb3", "sshfs"}
)


def location(environment: Mapping[str, str]) -> Path | None:
    """The folder of the cache; None: there is none, or it is elsewhere."""
    named = ""
    for flag in environment.get("NEURON_CC_FLAGS", "").split():
        if flag == "--no_cache":
            return None
        if flag.startswith("--cache_dir="):
            named = flag.partition("=")[2]
    url = named or environment.get("NEURON_COMPILE_CACHE_URL") or DEFAULT
    url = url.removeprefix("file://")
    return None if "://" in url else Path(url)


def make_ready(root: Path) -> None:
    """Remove what killed compilers have left in ``root``, and say so in the log. What cannot be removed is left."""
    remove_stale_locks(root)
    _forget_killed(root)


def remove_stale_locks(root: Path) -> None:
    """Those of graphs that no compiler of this host works at, and whose folders do not change either."""
    first = _uncompiled(root)
    if not first:
        return
    if (kind := file_system(root)) in SHARED:
        log.warning("%s is on %s and has locks: whether other hosts compile is not known, so they stay", root, kind)
        return
    time.sleep(SETTLE_S)
    second = _uncompiled(root)
    for lock, seen in first.items():
        if second.get(lock) == seen and remove(lock):
            log.warning(
                "removed %s: no %s works at that graph, and whoever wants it would wait for ever", lock, COMPILER
            )


def _uncompiled(root: Path) -> dict[Path, list[tuple[str, int, int]]]:
    """The locks whose graph no compiler works at, each with what is in its folder: names, sizes, times."""
    locks = list(root.glob(f"{GRAPHS}/*.lock"))
    commands = compilers() if locks else []
    if any(GRAPH not in command for command in commands):
        return {}  # it does not say what it compiles
    return {lock: _content(lock.parent) for lock in locks if not any(lock.parent.name in one for one in commands)}


def _content(folder: Path) -> list[tuple[str, int, int]]:
    found = []
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(folder.iterdir()):
            about = path.stat()
            found.append((path.name, about.st_size, about.st_mtime_ns))
    return found


def compilers() -> list[str]:
    """The command lines of the compilers that run, of all users. Those of another container are not seen."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()  # a script of Python: the interpreter comes first
            if any(Path(word).name == COMPILER for word in words[:3]):
                found.append(" ".join(words))
    return found


def file_system(path: Path) -> str:
    """Its type, as ``mount`` shows it."""
    real, best, kind = path.resolve(), -1, ""
    for mount in psutil.disk_partitions(all=True):
        point = Path(mount.mountpoint)
        if real.is_relative_to(point) and len(point.parts) >= best:  # of two on one point the later one counts
            best, kind = len(point.parts), mount.fstype
    return kind.removeprefix("fuse.")


def _forget_killed(root: Path) -> None:
    """Failures that are none of the graph: the compiler was ended by a signal, as for want of memory."""
    for told in root.glob(f"{GRAPHS}/{LOG}"):
        folder = told.parent
        if (folder / NEFF).exists() or any(folder.glob("*.lock")):
            continue
        if was_killed(tail_of(told)) and remove(folder):
            log.warning(
                "removed %s: its %s was killed when it compiled that graph, which is tried again", folder, COMPILER
            )


def was_killed(words: str) -> bool:
    """Whether a failure's log tells that its compiler was ended by a signal, so that the graph is tried again."""
    fault = fault_of(RuntimeError(words))
    return fault is not None and fault.id == "compiler-killed"


def tail_of(path: Path) -> str:
    """The end of a log; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def remove(path: Path) -> bool:
    """A file or a folder. False: it is gone already, or stays, which the log tells."""
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        return False  # another load was faster
    except OSError as error:
        log.warning("%s was left by a compile that was killed, and cannot be removed: %s", path, error)
        return False
    return True
