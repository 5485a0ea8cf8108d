"""Artifacts that Optimum Neuron 0.4 exports: what they depend on, and the process that compiles them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import msgspec

from workers.compiled.compile_session import CompileSession
from workers.compiled.host_sets import LockedEntry
from workers.engines.compiled_engine import compile_main, run_compile
from workers.engines.manifest_parts import checkpoint_digests, neuron_build, version_of
from workers.engines.optimum_neuron.package import DISTRIBUTION, OptimumPackage, export_config, find_package
from workers.engines.optimum_neuron.settings import OptimumSettings

MODULE = "workers.engines.optimum_neuron.engine"
MODEL, WORK = "model", "work"  # in an entry
PACKAGES = ("neuronx-distributed", "neuronx-cc", "torch-neuronx", "libneuronxla", "torch", "transformers")


def manifest(
    settings: OptimumSettings, package: OptimumPackage, root: Path | None, read: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns everything that the artifacts depend on, as JSON, and the files whose digests it lacks.

    The artifacts contain the weights of each core. ``root`` is the folder of entries; None: they are not kept. With
    ``read`` False, only digests stored in ``root`` are used, and the place of an unknown one is empty.
    """
    digests, unread = checkpoint_digests([Path(settings.source)], root, read=read)
    fields = msgspec.to_builtins(settings)
    record = {
        "engine": "optimum-neuron",
        "versions": {DISTRIBUTION: package.version, **{name: version_of(name) or None for name in PACKAGES}},
        **neuron_build(),
        "options": {name: fields[name] for name in fields if name not in ("source", "allow_pickle")},
        "checkpoints": digests,
    }
    return record, unread


def compile_in_subprocess(settings: OptimumSettings, entry: LockedEntry) -> None:
    """Export into ``entry`` in a separate process: after an export, a process does not reliably release its cores.

    Raises EngineLoadError with the last lines of its output, all of which is in the entry's compile.log.
    """
    session = CompileSession(entry.manifest, Path(settings.source), entry.path.parent, shared=False)
    label = f"{settings.source} with Optimum Neuron"
    run_compile(MODULE, settings, label, entry, session)


def export_here(settings: OptimumSettings, folder: Path) -> None:
    """Export to ``folder``, on the host, without using a device: graphs, and the weights of each core."""
    # By default, all compiles of a host share one folder and overwrite each other's files.
    os.environ["BASE_COMPILE_WORK_DIR"] = str(folder / WORK) + "/"
    package = find_package()
    config, neuron = export_config(package, settings)
    model = package.model_class.export(settings.source, neuron, config=config, load_weights=False)
    model.save_pretrained(str(folder / MODEL))
    shutil.rmtree(folder / WORK, ignore_errors=True)


def main(arguments: list[str]) -> int:
    """Runs the process of ``compile_in_subprocess``. Returns its exit code."""
    return compile_main(arguments, MODULE, OptimumSettings, export_here)
