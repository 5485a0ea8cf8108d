"""Compiled artifacts of transformers-neuronx: its NEFF files, kept between starts.

``model.load(folder)`` only remembers the folder: a missing NEFF is reported in ``to_neuron``, when cores are claimed
and weights are read. The files are named by the graph alone, so one of another compiler or other flags would be used
silently. Both are checked here beforehand, by the entry's manifest and by the record of its files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from hashlib import blake2s
from pathlib import Path
from typing import Any

from workers.compiled.compile_session import CompileSession
from workers.compiled.host_sets import LockedEntry, compiling, entry, peek
from workers.compiled.places import shipped_graphs
from workers.compiled.prediction import predict
from workers.engines.manifest_parts import neuron_build, version_of
from workers.host import foreign_files
from workers.messages.engine_protocol import EngineLoadError

COMPILER = "neuronx-cc"
WHERE = "the compilers write to this log"
AT_ONCE = "compilation_worker_count"  # of NeuronConfig
MAX_REASONS = 5  # fields listed in an error
NO_MATCH = "Could not find a matching NEFF"  # the package's error text
PACKAGES = ("transformers-neuronx", "torch-neuronx", "libneuronxla", "torch", "transformers")


def manifest(path: Path, options: Mapping[str, Any], speculation: list[int]) -> dict[str, Any]:
    """Returns everything that the graphs of the model in ``path``, and their NEFFs, depend on: neither its weights nor
    the number of graphs compiled at once."""
    neuron = {name: value for name, value in (options.get("neuron") or {}).items() if name != AT_ONCE}
    return {
        "engine": "transformers-neuronx",
        "versions": {name: version_of(name) for name in (*PACKAGES, COMPILER)},
        **neuron_build(),
        "model": blake2s(foreign_files.read_bytes(path / "config.json")).hexdigest(),
        "options": {**options, "neuron": neuron} if "neuron" in options else options,
        "speculation": speculation,
    }


def start_from(root: Path, expected: Mapping[str, Any], source: Path, model: Any) -> bool:
    """Bring ``model``, that of ``source``, to the device with the NEFFs of ``expected`` under ``root``, or with those
    that came with the model. Returns whether none had to be compiled.

    Several processes may load existing NEFFs at once; where one is missing, one process compiles and the others wait.
    Raises EngineLoadError ``neff-unproven`` for NEFFs beside the model that are not proven to match ``expected``.
    """
    if not peek(root, expected, is_whole).complete and (shipped := proven_neffs(source, expected)) is not None:
        model.load(str(shipped))
        model.to_neuron()
        return True
    with entry(root, expected, is_whole) as artifacts:
        if artifacts.complete:
            model.load(str(artifacts.path))
            try:
                model.to_neuron()
            except FileNotFoundError as error:
                if NO_MATCH not in str(error):
                    raise
                raise _stale(artifacts) from error
            return True
        session = _compile(source, expected, root, model.to_neuron)
        _keep(artifacts, source, model)
        session.record_compiled(artifacts.path)
        return False


def compile_ahead(artifacts: LockedEntry, source: Path, model: Any) -> None:
    """Compile into ``artifacts``, which is locked exclusively, without using a device."""
    session = _compile(source, artifacts.manifest, artifacts.path.parent, model.cpu_compile)
    _keep(artifacts, source, model)
    session.record_compiled(artifacts.path, wait=True)


def compile_now(source: Path, model: Any, expected: Mapping[str, Any], root: Path | None) -> None:
    """Bring ``model`` to the device without an entry: the package uses its own cache, or compiles."""
    _compile(source, expected, root, model.to_neuron).record_compiled()


def _compile(
    source: Path, expected: Mapping[str, Any], root: Path | None, compile: Callable[[], object]
) -> CompileSession:
    session = CompileSession(expected, source, root)
    with session.compiling(), compiling(f"{source} with transformers-neuronx, except graphs in its cache", WHERE):
        compile()
    return session


def _keep(artifacts: LockedEntry, source: Path, model: Any) -> None:
    model.save(str(artifacts.path))
    artifacts.finish(str(source))


def proven_neffs(source: Path, expected: Mapping[str, Any]) -> Path | None:
    """Returns the folder of NEFFs that came with the model, proven by their record to match ``expected``, or None.

    The package would use them by the graph alone, whatever their compiler and flags. Raises EngineLoadError.
    """
    shipped = shipped_graphs(source, os.environ)
    if shipped is None:
        return None
    prediction = predict(expected, list(shipped.candidates(expected)))
    if prediction.hit:
        return shipped.folder
    reasons = "; ".join(
        [prediction.reason, *map(str, prediction.why[:MAX_REASONS]), *(f"bad: {name}" for name in prediction.missing)]
    )
    hint = "run `corewright compile SPEC`; or remove the folder, and the start compiles"
    raise EngineLoadError("neff-unproven", f"{shipped.folder} is not used: {reasons}", hint)


def _stale(artifacts: LockedEntry) -> EngineLoadError:
    """Discard NEFFs that do not match the model's graphs, though their manifest is the same. The device is in use by
    now, so only the next start compiles."""
    artifacts.forget()
    message = (
        f"the compiled artifacts in {artifacts.path} do not match the model's graphs, though the manifest is the same"
    )
    return EngineLoadError("artifacts-stale", message, "they are discarded: the next start compiles again")


def is_whole(folder: Path) -> bool:
    """Returns whether there are any NEFFs; the entry's record verifies their content."""
    return any(folder.glob("*.neff"))
