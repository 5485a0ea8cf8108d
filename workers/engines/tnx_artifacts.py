"""The NEFF files of transformers-neuronx, kept between starts.

``model.load(folder)`` only remembers the folder: a missing NEFF is reported in ``to_neuron``, when cores are claimed
and weights are read. And the files are named by the graph alone, so one of another compiler or other flags would be
taken silently. Both are settled here beforehand: by the entry's manifest, and by a list of the files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from hashlib import blake2s
from importlib import metadata
from pathlib import Path
from typing import Any

from workers import neuron_cache, neuron_target
from workers.compiled import Entry, compiling, entry
from workers.engine import EngineLoadError

FILES = "corewright-files.json"  # name -> bytes
COMPILER = "neuronx-cc"
NO_MATCH = "Could not find a matching NEFF"  # the package's own words
PACKAGES = ("transformers-neuronx", "torch-neuronx", "libneuronxla", "torch", "transformers")
# Of the environment, what the compiler and torch-xla read.
READ = ("NEURON_CC_FLAGS", "XLA_HANDLE_SPECIAL_SCALAR", "UNSAFE_FP8FNCAST")


def manifest(path: Path, options: Mapping[str, Any], speculation: list[int]) -> dict[str, Any]:
    """Everything that the graphs of the model in ``path``, and their NEFFs, depend on. Weights do not."""
    target = neuron_target.here()
    return {
        "engine": "transformers-neuronx",
        "versions": {name: version_of(name) for name in (*PACKAGES, COMPILER)},
        "environment": {name: os.environ[name] for name in READ if os.environ.get(name)},
        "target": target.name,
        "lnc": target.lnc,
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


def start_from(root: Path, wanted: Mapping[str, Any], source: Path, model: Any) -> bool:
    """Bring ``model``, that of ``source``, to the device with the NEFFs of ``wanted`` under ``root``.

       True: none had to be compiled.
    Several load at once what is there. Who finds nothing, or not all of it, compiles, and the others wait.
    """
    with entry(root, wanted, is_whole) as found:
        if found.complete:
            model.load(str(found.path))
            try:
                model.to_neuron()
            except FileNotFoundError as error:
                if NO_MATCH not in str(error):
                    raise
                raise _stale(found) from error
            return True
        compile_now(source, model)
        model.save(str(found.path))
        sizes = {file.name: file.stat().st_size for file in sorted(found.path.iterdir())}
        (found.path / FILES).write_text(json.dumps(sizes))
        found.finish()
        return False


def compile_now(source: Path, model: Any) -> None:
    """Bring ``model`` to the device without NEFFs: the package takes them from its own cache, or compiles them."""
    what = f"{source} with transformers-neuronx, what its cache does not have"
    if (cache := neuron_cache.location(os.environ)) is not None:
        neuron_cache.make_ready(cache)
    with compiling(what, "the compilers write to this log"):
        model.to_neuron()


def _stale(found: Entry) -> EngineLoadError:
    """The graphs are others than those of the NEFFs, though all that the manifest names is the same. The device is in
    use by now, so it is the next start that compiles."""
    found.forget()
    what = f"the compiled artifacts in {found.path} are not those of the model's graphs, whose manifest is the same"
    return EngineLoadError("artifacts-stale", what, "they are given up: the next start compiles anew")


def is_whole(folder: Path) -> bool:
    """Whether every file is there with the size that it had."""
    try:
        sizes = json.loads((folder / FILES).read_text())
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False
