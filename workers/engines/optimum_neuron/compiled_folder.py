"""Sources that Optimum Neuron has compiled, and checks that they match the spec.

0.4, by ``save_pretrained``:

    config.json, tokenizer.json, ...                    as in every checkpoint
    neuron_config.json                                  an NxDNeuronConfig: all settings, and the versions
    model.pt                                            the graphs
    checkpoint/weights/tp{rank}_sharded_checkpoint...   the weights of each core; left out by ``push_to_hub``

Before, with a ``neuron`` section of settings in config.json:

    checkpoint/                                         the weights; left out if they came from the hub
    compiled/*.neff                                     the graphs

The package compares versions, the target and the number of cores, after it has claimed some; and nothing with what a
caller wants. Here all of it is compared before anything is fetched or claimed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from workers.artifacts.sources.layout import COMPILED, INDEX, NEURON_CONFIG
from workers.compiled import neuron_target
from workers.compiled.prediction import Difference
from workers.engines.checkpoint_files import read_config, read_json
from workers.engines.optimum_neuron.package import OptimumPackage
from workers.engines.optimum_neuron.settings import ExportRecord, OptimumSettings, check_computed
from workers.engines.weight_files import names_of
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig

_SHARD = re.compile(r"checkpoint/weights/tp(\d+)_sharded_checkpoint\.safetensors")
_WEIGHTS = ("model.safetensors", INDEX)
_ORIGINAL_HINT = "set `source` to the original checkpoint: corewright exports it once"


@dataclass(frozen=True)
class CompiledFolder(ExportRecord):
    """What Optimum Neuron compiled in a source's folder."""

    path: Path
    names: frozenset[str]  # of all files, including those that are not fetched yet


def find(source: Path) -> CompiledFolder | None:
    """Returns what Optimum Neuron compiled in ``source``; None for an ordinary checkpoint, and for another package's.

    Raises EngineLoadError where a file cannot be read, and for what NxD Inference compiled.
    """
    names = names_of(source)
    settings = read_config(source)
    if isinstance(neuron := settings.get("neuron"), Mapping):
        return CompiledFolder("tnx", neuron, source, names)
    if NEURON_CONFIG not in names:
        return None
    recorded = read_json(source / NEURON_CONFIG)
    if "_serialized_key" not in recorded:
        fact = f"{source} was compiled by NxD Inference, whose graphs Optimum Neuron cannot run"
        raise EngineLoadError("layout-unsupported", fact, f"use engine: nxd-inference, or {_ORIGINAL_HINT}")
    return CompiledFolder("nxd", recorded, source, names)


def start_error(config: ReplicaConfig, targets: Collection[str] = ()) -> EngineLoadError | None:
    """Returns the error of a start of ``config``, as far as names and small files show it without the package: for
    planning. ``targets``: the compile targets of its machines, where they are known."""
    try:
        settings = OptimumSettings.of(config)
        check_computed(settings, read_config(Path(settings.source)))
        folder = find(Path(settings.source))
        if folder is not None:
            check(folder, settings, targets)
    except EngineLoadError as error:
        return error
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:  # not as the package writes it
        fact = f"the settings in {config.source} cannot be compared: {type(error).__name__}: {error}"
        return EngineLoadError("artifacts-mismatch", fact, _ORIGINAL_HINT)
    return None


def check(folder: CompiledFolder, settings: OptimumSettings, targets: Collection[str]) -> None:
    """Raises EngineLoadError where ``folder`` is incomplete or does not match ``settings``. Uses no device.

    1. A model.pt is a program, which must be trusted.
    2. The recorded settings match: every field that differs is reported.
    3. The weights are there: of every core, or the original ones.
    """
    if folder.era == "nxd" and not settings.allow_pickle:  # 1
        fact = f"{folder.path / COMPILED} is a compiled program, and loading it can run code"
        raise EngineLoadError("pickle-refused", fact, f"set `allow_pickle: true` if you trust it, or {_ORIGINAL_HINT}")
    if mismatches := [*folder.differences(settings), *_wrong_target(folder, targets)]:  # 2
        raise _mismatch(folder, mismatches)
    _check_weights(folder, settings)  # 3


def check_installed(folder: CompiledFolder, package: OptimumPackage) -> None:
    """Raises EngineLoadError where ``folder`` is of another version, compiler or target than this host's.

    The package itself accepts only its own version, and the version of the compiler that is installed.
    """
    recorded, target = folder.recorded, neuron_target.current().name
    versions = {"compiler": (package.compiler, recorded.get("neuronxcc_version", recorded.get("compiler_version")))}
    if folder.era != package.era:
        versions["Optimum Neuron"] = (package.version, "0.4" if folder.era == "nxd" else "before 0.4")
    elif folder.era == "nxd":
        versions["Optimum Neuron"] = (package.version, recorded.get("optimum_neuron_version"))
    wrong = [Difference(name, *pair) for name, pair in versions.items() if pair[0] != pair[1]]
    if wrong := [*wrong, *_wrong_target(folder, () if target is None else (target,))]:
        raise _mismatch(folder, wrong)


def _wrong_target(folder: CompiledFolder, targets: Collection[str]) -> Iterator[Difference]:
    """Yields the compile target, where no machine of the model has it; before 0.4 it is not recorded."""
    target = folder.recorded.get("target")
    if target is not None and targets and target not in targets:
        yield Difference("target of the machines", " or ".join(sorted(targets)), target)


def _mismatch(folder: CompiledFolder, differences: Collection[Difference]) -> EngineLoadError:
    fact = f"{folder.path} was compiled by Optimum Neuron for other settings than the spec's: "
    fact += "; ".join(map(str, differences))
    return EngineLoadError("artifacts-mismatch", fact, f"adapt the spec to these settings, or {_ORIGINAL_HINT}")


def _check_weights(folder: CompiledFolder, settings: OptimumSettings) -> None:
    names = folder.names
    if folder.era == "tnx":
        missing = "checkpoint/config.json" not in names
    else:
        ranks = {int(match[1]) for name in names if (match := _SHARD.fullmatch(name))}
        missing = not ranks and not any(name in names for name in _WEIGHTS)
        if ranks and (absent := sorted({*range(settings.tp_degree)} - ranks)):
            files = ", ".join(f"checkpoint/weights/tp{rank}_sharded_checkpoint.safetensors" for rank in absent)
            raise EngineLoadError("weights-missing", f"{folder.path} is missing {files}", "copy the weights again")
    if missing:
        origin, revision = folder.recorded.get("checkpoint_id"), folder.recorded.get("checkpoint_revision")
        fact = f"{folder.path} was compiled without weights"
        fact += f"; they are those of {origin} at {revision}" if origin else ""
        hint = "copy the model's safetensors there" if folder.era == "nxd" else "copy its folder checkpoint/ there"
        raise EngineLoadError("weights-missing", fact, f"{hint}, or {_ORIGINAL_HINT}")
