"""The NEFF files of transformers-neuronx, kept between starts.

``model.load(folder)`` only remembers the folder: a missing NEFF is reported in ``to_neuron``, when cores are claimed
and weights are read. And the files are named by the graph alone, so one of another compiler or other flags would be
taken silently. Both are settled here beforehand: by the entry's manifest, and by the record of its files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import blake2s
from importlib import metadata
from pathlib import Path
from typing import Any

from workers.host import foreign_files
from workers.messages.engine_protocol import EngineLoadError
from workers.neff_cache import neuron_target
from workers.neff_cache.candidates import beside, given
from workers.neff_cache.compile_session import CompileSession
from workers.neff_cache.compiled_artifacts import Entry, compiling, entry, peek
from workers.neff_cache.predict import predict

COMPILER = "neuronx-cc"
WITH, WHERE = "with transformers-neuronx, what its cache does not have", "the compilers write to this log"
AT_ONCE = "compilation_worker_count"  # of NeuronConfig
MOST_TOLD = 5  # fields that an error names
NO_MATCH = "Could not find a matching NEFF"  # the package's own words
PACKAGES = ("transformers-neuronx", "torch-neuronx", "libneuronxla", "torch", "transformers")
# Of the environment, what the compiler and torch-xla read.
READ = ("NEURON_CC_FLAGS", "XLA_HANDLE_SPECIAL_SCALAR", "UNSAFE_FP8FNCAST")


def manifest(path: Path, options: Mapping[str, Any], speculation: list[int]) -> dict[str, Any]:
    """Everything that the graphs of the model in ``path``, and their NEFFs, depend on. Weights do not, and neither does
    how many are compiled at once."""
    target = neuron_target.current()
    neuron = {name: value for name, value in (options.get("neuron") or {}).items() if name != AT_ONCE}
    return {
        "engine": "transformers-neuronx",
        "versions": {name: version_of(name) for name in (*PACKAGES, COMPILER)},
        "environment": {name: os.environ[name] for name in READ if os.environ.get(name)},
        "target": target.name,
        "lnc": target.lnc,
        "model": blake2s(foreign_files.read_bytes(path / "config.json")).hexdigest(),
        "options": {**options, "neuron": neuron} if "neuron" in options else options,
        "speculation": speculation,
    }


def version_of(distribution: str) -> str:
    """Of the installed distribution; empty where there is none by that name."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def start_from(root: Path, wanted: Mapping[str, Any], source: Path, model: Any) -> bool:
    """Bring ``model``, that of ``source``, to the device with the NEFFs of ``wanted`` under ``root``, or with those
    that came with the model. True: none had to be compiled.

    Several load at once what is there. Who finds nothing, or not all of it, compiles, and the others wait. Raises
    EngineLoadError ``neff-unproven`` for NEFFs beside the model that nothing proves to be of ``wanted``.
    """
    if not peek(root, wanted, is_whole).complete and (given := proven_beside(source, wanted)) is not None:
        model.load(str(given))
        model.to_neuron()
        return True
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
        visit = CompileSession(wanted, source, root)
        with visit.compiling(), compiling(f"{source} {WITH}", WHERE):
            model.to_neuron()
        _keep(found, source, model)
        visit.record_compiled(found.path)
        return False


def compile_ahead(found: Entry, source: Path, model: Any) -> None:
    """Compile into ``found``, which is held alone, without touching a device."""
    visit = CompileSession(found.manifest, source, found.path.parent)
    with visit.compiling(), compiling(f"{source} {WITH}", WHERE):
        model.cpu_compile()
    _keep(found, source, model)
    visit.record_compiled(found.path, wait=True)


def compile_now(source: Path, model: Any, wanted: Mapping[str, Any], root: Path | None) -> None:
    """Bring ``model`` to the device without NEFFs of its own: the package takes them from its cache, or compiles."""
    visit = CompileSession(wanted, source, root)
    with visit.compiling(), compiling(f"{source} {WITH}", WHERE):
        model.to_neuron()
    visit.record_compiled()


def _keep(found: Entry, source: Path, model: Any) -> None:
    model.save(str(found.path))
    found.finish(str(source))


def proven_beside(source: Path, wanted: Mapping[str, Any]) -> Path | None:
    """The folder of NEFFs that came with the model, proven by their record to be those of ``wanted``; None: none came.

    The package would take them by the graph alone, whatever compiler and flags they are of. Raises EngineLoadError.
    """
    folder = given(source, os.environ)
    if folder is None:
        return None
    told = predict(wanted, [beside(folder)])
    if told.hit:
        return folder
    why = "; ".join([told.reason, *map(str, told.why[:MOST_TOLD]), *(f"bad: {name}" for name in told.missing)])
    hint = "`corewright compile SPEC` compiles its own; or take the folder away, and the start compiles"
    raise EngineLoadError("neff-unproven", f"{folder} is not used: {why}", hint)


def _stale(found: Entry) -> EngineLoadError:
    """The graphs are others than those of the NEFFs, though all that the manifest names is the same. The device is in
    use by now, so it is the next start that compiles."""
    found.forget()
    what = f"the compiled artifacts in {found.path} are not those of the model's graphs, whose manifest is the same"
    return EngineLoadError("artifacts-stale", what, "they are given up: the next start compiles anew")


def is_whole(folder: Path) -> bool:
    """Whether there are NEFFs at all; the entry's record tells whether they are as they were."""
    return any(folder.glob("*.neff"))
