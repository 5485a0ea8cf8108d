"""The NEFF files of transformers-neuronx, kept between starts.

``model.load(folder)`` only remembers the folder: a missing NEFF is reported in ``to_neuron``, when cores are claimed
and weights are read. And the files are named by the graph alone, so one of another compiler or other flags would be
taken silently. Both are settled here beforehand: by the entry's manifest, and by a list of the files.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from hashlib import blake2s
from importlib import metadata
from pathlib import Path
from typing import Any

from workers.compiled import MANIFEST, Entry, entry

FILES = "corewright-files.json"  # name -> bytes
COMPILER = "neuronx-cc"


def manifest(path: Path, options: Mapping[str, Any], speculation: list[int]) -> dict[str, Any]:
    """Everything that the graphs of the model in ``path`` depend on."""
    return {
        "engine": "transformers-neuronx",
        "version": version_of("transformers-neuronx"),
        "compiler": version_of(COMPILER),
        "flags": os.environ.get("NEURON_CC_FLAGS", ""),
        "lnc": os.environ.get("NEURON_LOGICAL_NC_CONFIG", ""),
        "target": os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", ""),
        "model": blake2s((path / "config.json").read_bytes()).hexdigest(),
        "options": options,
        "speculation": speculation,
    }


def version_of(distribution: str) -> str:
    """Of the installed distribution; empty where there is none by that name."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def start_from(root: Path, wanted: Mapping[str, Any], model: Any, to_neuron: Callable[[], None]) -> bool:
    """Bring ``model`` to the device with the NEFFs of ``wanted`` under ``root``; True: none had to be compiled.

    Whoever comes second waits for the first. What is there and not whole is compiled anew.
    """
    with entry(root, wanted) as found:
        if found.complete and is_whole(found.path):
            model.load(str(found.path))
            to_neuron()
            return True
        _empty(found)
        to_neuron()
        model.save(str(found.path))
        sizes = {file.name: file.stat().st_size for file in sorted(found.path.iterdir())}
        (found.path / FILES).write_text(json.dumps(sizes))
        found.finish()
        return False


def is_whole(folder: Path) -> bool:
    """Whether every file is there with the size that it had."""
    try:
        sizes = json.loads((folder / FILES).read_text())
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _empty(found: Entry) -> None:
    (found.path / MANIFEST).unlink(missing_ok=True)  # first, so that a death in between leaves nothing complete
    shutil.rmtree(found.path)
    found.path.mkdir()
