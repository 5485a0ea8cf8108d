"""Compiled artifacts of NxD Inference: what they depend on, and the process that compiles them."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from workers.compiled.compile_session import CompileSession
from workers.compiled.host_sets import Buildable, LockedEntry, Tell, check_room
from workers.compiled.neuron_cache import WRAPPER_FLAGS
from workers.engines.compiled_engine import compile_main, run_compile
from workers.engines.manifest_parts import NXD_PACKAGES, checkpoint_digests, neuron_build, versions_of
from workers.engines.nxd_inference.config import NxdSettings, lengths, neuron_options
from workers.engines.nxd_inference.package import DISTRIBUTION, Package, build_config, import_package
from workers.engines.weight_files import copy_bytes

MODULE = "workers.engines.nxd_inference.artifacts"
MODEL, QUANTIZED, WORK = "model", "quantized", "work"  # in an entry


def unit(settings: NxdSettings, package: Package, root: Path | None, read: bool = True) -> Buildable:
    """Returns the compile unit, whose artifacts contain sharded weights: so they depend on all weight files, too.

    ``root`` is the folder of entries; None: the artifacts are not kept, and no other start can use them. With ``read``
    False, only digests stored in ``root`` are used, and the place of an unknown one is empty.
    """
    sources = (settings.source, settings.draft_source, settings.quantized_source)
    digests, unread = checkpoint_digests(map(Path, filter(None, sources)), root, read=read)
    manifest = {
        "engine": "nxd-inference",
        "versions": {DISTRIBUTION: package.version, **versions_of(NXD_PACKAGES)},
        **neuron_build(),
        "options": neuron_options(settings, lengths(settings), package.release, QUANTIZED),
        "checkpoints": digests,
    }

    def make(held: LockedEntry, tell: Tell) -> None:
        if not settings.presharded:
            weights = filter(None, (settings.quantized_source or settings.source, settings.draft_source))
            check_room(held.path, sum(copy_bytes(Path(source), settings.dtype) for source in weights))
        compile_in_subprocess(settings, held)
        held.finish(settings.source)

    return Buildable(source=Path(settings.source), manifest=manifest, make=make, kept=root is not None, unread=unread)


def compile_in_subprocess(settings: NxdSettings, entry: LockedEntry) -> None:
    """Compile into ``entry`` in a separate process, so that this one can claim the cores afterwards.

    Raises EngineLoadError with the last lines of its output, all of which is in the entry's compile.log.
    """
    run_compile(MODULE, settings, f"{settings.source} with NxD Inference", entry, session(settings, entry))


def session(settings: NxdSettings, entry: LockedEntry) -> CompileSession:
    """Returns a session: the package compiles through the persistent cache, also failures."""
    return CompileSession(entry.manifest, Path(settings.source), entry.path.parent, shared=False)


def compile_here(settings: NxdSettings, folder: Path) -> None:
    """Compile into ``folder``, on the host, without using a device."""
    # By default, all compiles of a host share one folder and overwrite each other's files.
    os.environ["BASE_COMPILE_WORK_DIR"] = str(folder / WORK) + "/"
    package = import_package()
    kind, config = build_config(package, settings, settings.quantized_source or str(folder / QUANTIZED))
    if settings.quantize is not None and settings.quantized_source is None and not settings.presharded:
        (folder / QUANTIZED).mkdir(exist_ok=True)
        kind.save_quantized_state_dict(settings.source, config)
    model = kind(settings.source, config)
    for graphs in model.models:
        graphs.compiler_args = with_flags(graphs.compiler_args, os.environ.get("NEURON_CC_FLAGS", ""))
    model.compile(str(folder / MODEL))
    shutil.rmtree(folder / WORK, ignore_errors=True)


_LEVEL = re.compile(r"(?<!\S)(?:-O|--optlevel[ =])(\d)(?!\S)")


def with_flags(own: str, environment_flags: str) -> str:
    """Returns the package's flags for one kind of graph with those of NEURON_CC_FLAGS, which it does not read itself.

    An optimization level replaces the package's. neuronx-distributed adds ``-O1`` where it finds no ``-O``.
    """
    flags = _LEVEL.sub(
        r"-O\1", " ".join(flag for flag in environment_flags.split() if flag.partition("=")[0] not in WRAPPER_FLAGS)
    )
    return " ".join(filter(None, (_LEVEL.sub("", own) if _LEVEL.search(flags) else own, flags)))


if __name__ == "__main__":
    sys.exit(compile_main(sys.argv[1:], MODULE, NxdSettings, compile_here))
