"""Removes leftovers of killed compilers from the Neuron compiler's cache, so that models can load.

Two leftovers would block every later load of a model. AWS's page on the cache describes its folders; users report both.

1. The lock of a graph (``*.lock``), if the whole compile was killed: the next compile waits forever and logs "Another
   process must be compiling" every minute.
2. The failure of a graph (``model.log`` and no NEFF), if only the compiler was killed: neither transformers-neuronx nor
   NxD Inference (``ModelBuilder.trace`` of neuronx-distributed) retries it, as if the compiler could not compile the
   graph.

Both are removed from a folder of this host; nothing else is, and nothing in ``s3://``.
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
GRAPH = "MODULE_"  # prefix of graph folders, MODULE_<key>+<flags>, and of the compiler's input files
GRAPHS = f"neuronxcc-*/{GRAPH}*"
LOG, NEFF = "model.log", "model.neff"
WRAPPER_FLAGS = frozenset(
    {"--cache_dir", "--no_cache", "--log_level", "--retry_failed_compilation"}
)  # not passed to the compiler
SETTLE_S = 2.0  # a graph is idle if unchanged for so long; a compiler starts sooner after its lock
LOG_TAIL = 64 * 1024
# Shared file systems: compilers of other hosts use them and are not visible here.
SHARED = frozenset(
    {"afs", "beegfs", "ceph", "cifs", "glusterfs", "lustre", "mountpoint-s3", "nfs", "nfs4", "s3fs", "smb3", "sshfs"}
)


def location(environment: Mapping[str, str]) -> Path | None:
    """Returns the folder of the cache; None: no cache, or a remote one."""
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
    """Removes leftovers of killed compilers from ``root`` and logs each; skips those that cannot be removed."""
    remove_stale_locks(root)
    _remove_killed(root)


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
    commands = compilers() if locks else []
    if any(GRAPH not in command for command in commands):
        return {}  # a compiler without its graph in its command line
    return {lock: _content(lock.parent) for lock in locks if not any(lock.parent.name in text for text in commands)}


def _content(folder: Path) -> list[tuple[str, int, int]]:
    content = []
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(folder.iterdir()):
            about = path.stat()
            content.append((path.name, about.st_size, about.st_mtime_ns))
    return content


def compilers() -> list[str]:
    """Returns the command lines of running compilers of all users. Those in other containers are not visible."""
    commands = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()  # a Python script: the interpreter comes first
            if any(Path(word).name == COMPILER for word in words[:3]):
                commands.append(" ".join(words))
    return commands


def file_system(path: Path) -> str:
    """Returns the file system type of a path, as shown by ``mount``."""
    real, best, kind = path.resolve(), -1, ""
    for mount in psutil.disk_partitions(all=True):
        point = Path(mount.mountpoint)
        if real.is_relative_to(point) and len(point.parts) >= best:  # a later mount on the same point wins
            best, kind = len(point.parts), mount.fstype
    return kind.removeprefix("fuse.")


def _remove_killed(root: Path) -> None:
    """Removes failures of compilers that were killed by a signal, such as by the OOM killer."""
    for log_file in root.glob(f"{GRAPHS}/{LOG}"):
        folder = log_file.parent
        if (folder / NEFF).exists() or any(folder.glob("*.lock")):
            continue
        if was_killed(tail_of(log_file)) and remove(folder):
            log.warning("removed %s: its %s was killed; the graph will be compiled again", folder, COMPILER)


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
