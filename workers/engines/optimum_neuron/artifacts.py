"""Artifacts that Optimum Neuron 0.4 exports: what they depend on, and the process that compiles them."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import msgspec

from workers.compiled.compile_session import CompileSession
from workers.compiled.host_sets import Buildable, LockedEntry, Tell, check_room
from workers.engines.compiled_engine import compile_main, run_compile
from workers.engines.manifest_parts import NXD_PACKAGES, checkpoint_digests, neuron_build, versions_of
from workers.engines.optimum_neuron.package import DISTRIBUTION, OptimumPackage, export_config, find_package
from workers.engines.optimum_neuron.settings import OptimumSettings
from workers.engines.weight_files import copy_bytes

MODULE = "workers.engines.optimum_neuron.artifacts"
MODEL, WORK = "model", "work"  # in an entry


def unit(settings: OptimumSettings, package: OptimumPackage, root: Path | None, read: bool = True) -> Buildable:
    """Returns the compile unit, whose artifacts contain the weights of each core. ``root`` and ``read``: as in
    `workers.engines.nxd_inference.artifacts`."""
    digests, unread = checkpoint_digests([Path(settings.source)], root, read=read)
    fields = msgspec.to_builtins(settings)
    manifest = {
        "engine": "optimum-neuron",
        "versions": {DISTRIBUTION: package.version, **versions_of(NXD_PACKAGES)},
        **neuron_build(),
        "options": {name: fields[name] for name in fields if name not in ("source", "allow_pickle")},
        "checkpoints": digests,
    }

    def make(held: LockedEntry, tell: Tell) -> None:
        check_room(held.path, copy_bytes(Path(settings.source), settings.dtype))
        compile_in_subprocess(settings, held)
        held.finish(settings.source)

    return Buildable(source=Path(settings.source), manifest=manifest, make=make, kept=root is not None, unread=unread)


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


if __name__ == "__main__":
    sys.exit(compile_main(sys.argv[1:], MODULE, OptimumSettings, export_here))
