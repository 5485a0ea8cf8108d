"""Parts of the manifests of several engines: versions, what the Neuron compiler depends on, and digests of checkpoints.

Digests are cached: reading hundreds of gigabytes again takes minutes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from workers.artifacts.store.manifest import OURS
from workers.compiled import file_states, neuron_target

log = logging.getLogger(__name__)

KEPT = "digests.json"  # path -> stamp and digest
# Environment variables that the compiler (NxD Inference: through ``with_flags``) and torch-xla read.
READ = ("NEURON_CC_FLAGS", "XLA_HANDLE_SPECIAL_SCALAR", "UNSAFE_FP8FNCAST")

# What graphs on NeuronX Distributed depend on, besides the package of the engine.
NXD_PACKAGES = ("neuronx-distributed", "neuronx-cc", "torch-neuronx", "libneuronxla", "torch", "transformers")

Stamp = tuple[int, int, int, int]  # device, inode, size, time of the last change in ns


def version_of(distribution: str) -> str:
    """Returns the version of an installed distribution; empty where there is none by that name."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def versions_of(distributions: Iterable[str]) -> dict[str, str | None]:
    """Returns the version of each; None where there is none by that name."""
    return {name: version_of(name) or None for name in distributions}


def neuron_build() -> dict[str, Any]:
    """Returns the environment and the target of the Neuron compiler on this machine."""
    target = neuron_target.current()
    return {
        "environment": {name: os.environ[name] for name in READ if os.environ.get(name)},
        "target": target.name,
        "lnc": target.lnc,
    }


def checkpoint_digests(sources: Iterable[Path], root: Path | None, *, read: bool) -> tuple[list[str], tuple[str, ...]]:
    """Returns the digests of checkpoints whose weights are in the artifacts, and the files that must be read for them.

    ``root`` is the folder of entries; None: no other start can use the artifacts, so that nothing is read. With
    ``read`` False, only digests stored in ``root`` are used, and that of a checkpoint with unknown ones is empty.
    """
    digests, unread = [], []
    for source in sources if root is not None else ():
        assert root is not None
        unknown = [] if read else [str(path) for path in unread_of(source, root)]
        digests.append("" if unknown else digest_of(source, root))
        unread += unknown
    return digests, tuple(unread)


def digest_of(source: Path, keep: Path) -> str:
    """Returns a digest of the names and contents of the files in ``source``, except those that a store adds.

    A file with a digest in the folder ``keep`` is not read again while its inode, size and modification time are the
    same.
    """
    files = _files(source)
    stamps = {path: _stamp(path) for path in files}
    stored = _known(keep / KEPT)
    entries = {path: stored[str(path)] for path in files if str(path) in stored}
    digests = {path: digest for path, (stamp, digest) in entries.items() if stamp == stamps[path]}
    missing = [path for path in files if path not in digests]
    if missing:
        began = time.monotonic()
        size = sum(stamps[path][2] for path in missing)
        with ThreadPoolExecutor(file_states.READERS) as pool:
            digests |= zip(missing, pool.map(file_states.digest, missing), strict=True)
        log.info(
            "hashed %.1f GB of %s in %.0f s: compiled artifacts contain weights",
            size / 1e9,
            source,
            time.monotonic() - began,
        )
        # A file that was written to meanwhile has another stamp by now, and its digest is useless.
        fresh = {str(path): (stamps[path], digests[path]) for path in missing if _stamp(path) == stamps[path]}
        _keep(keep / KEPT, fresh)
    combined = blake2b(digest_size=16)
    for path in files:
        combined.update(f"{path.name}\0{digests[path]}\0".encode())
    return combined.hexdigest()


def unread_of(source: Path, keep: Path) -> tuple[Path, ...]:
    """Returns the files that ``digest_of`` would have to read now."""
    stored = _known(keep / KEPT)
    files = _files(source)
    return tuple(path for path in files if stored.get(str(path), (None,))[0] != _stamp(path))


def _files(source: Path) -> list[Path]:
    return sorted(path for path in source.resolve().iterdir() if path.is_file() and path.name not in OURS)


def _stamp(path: Path) -> Stamp:
    """Returns the stamp of a link's target: a download's folder is full of links."""
    about = path.stat()
    return (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns)


def _known(file: Path) -> dict[str, tuple[Stamp, str]]:
    """Returns the stored digests; empty where there are none, or they cannot be read."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, tuple[Stamp, str]])
    except (OSError, msgspec.DecodeError):
        return {}


def _keep(file: Path, fresh: dict[str, tuple[Stamp, str]]) -> None:
    """Store digests. Of two concurrent writers one is lost, and reads its files again."""
    written = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        written.write_bytes(msgspec.json.encode({**_known(file), **fresh}))
        written.replace(file)
    except OSError as error:
        log.info("cannot store digests, the next start reads the same files again: %s", error)
