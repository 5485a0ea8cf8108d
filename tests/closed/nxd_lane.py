"""NxD Inference's own code on a CPU: the closed layer below it is stood in for, everything above it is unmodified.

``NXD_SOURCE`` and ``NXDI_SOURCE`` name the ``src`` of a checkout of neuronx-distributed and of
neuronx-distributed-inference, of one release of the SDK; on a Neuron image the installed packages are used. Without
them the tests skip. The code stays in ``sys.modules`` only while a test uses it, so that tests with doubles of the same
names can run in the same process.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.closed import source_of
from tests.doubles import PACKAGES, Neuron, forget, fresh_machine

CLOSED = Path(__file__).parent / "nxd"  # the stand-ins
SOURCES = {"NXD_SOURCE": "neuronx_distributed", "NXDI_SOURCE": "neuronx_distributed_inference"}
CLOSED_PACKAGES = ("torch_xla", "torch_neuronx", "neuronxcc", "libneuronxla", "nki", "nkilib", "neuronxlogger")
MODULES = (*SOURCES.values(), "optimum", *CLOSED_PACKAGES, "closed_layer")  # `optimum`: see `optimum_lane`
OVERWRITTEN = {"_FUSED_PREFIX", "_model_cls"}
_imported: dict[str, ModuleType] = {}


def source_folders() -> list[str]:
    """Returns the folders that the packages are imported from; none for installed ones. Skips without a package."""
    folders = [source_of(variable, package) for variable, package in SOURCES.items()]
    if int(metadata.version("transformers").split(".")[0]) > 4:
        pytest.skip("NxD Inference needs transformers 4: install it into a folder and set PYTHONPATH to that")
    return [str(folder.resolve()) for folder in folders if folder is not None]


@pytest.fixture
def real_nxdi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Neuron]:
    """NxD Inference over the stand-ins, in this process and in those that it starts."""
    with over_stand_ins(monkeypatch, tmp_path, source_folders()) as machine:
        variables = _class_variables()
        yield machine
        _reset(variables)


@contextlib.contextmanager
def over_stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sources: list[str]) -> Iterator[Neuron]:
    """A fresh machine, on which the stand-ins and ``sources`` can be imported, also in processes that it starts."""
    folders = [str(CLOSED), *sources]
    machine = fresh_machine(monkeypatch, tmp_path)
    for name in ("BASE_COMPILE_WORK_DIR", "XLA_HANDLE_SPECIAL_SCALAR", "UNSAFE_FP8FNCAST"):
        monkeypatch.setenv(name, "")  # so that what the adapter sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("NXD_LOG_LEVEL", os.environ.get("NXD_LOG_LEVEL", "error"))
    # The folder of doubles comes last: it has packages of these names, too.
    paths = [*folders, str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""), str(PACKAGES)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setattr(sys, "path", [*folders, *sys.path, str(PACKAGES)])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    importlib.invalidate_caches()
    forget(*MODULES)
    sys.modules.update(_imported)
    importlib.import_module("closed_layer").install()
    device = importlib.import_module("neuron_double.runtime")
    device.reset_for_tests()
    groups = vars(importlib.import_module("neuronx_distributed.parallel_layers.parallel_state"))
    before = dict(groups)
    yield machine
    device.reset_for_tests()
    groups.update(before)
    _imported.update(forget(*MODULES))


def _class_variables() -> list[tuple[type, dict[str, Any]]]:
    """Returns what a model with a draft overwrites in its class, for all later models: a replica has one model, but a
    run of tests has many."""
    for name in ("models.config", "utils.constants"):
        importlib.import_module(f"{SOURCES['NXDI_SOURCE']}.{name}")
    kinds = [sys.modules[f"{SOURCES['NXDI_SOURCE']}.models.application_base"].NeuronApplicationBase]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return [(kind, {name: vars(kind)[name] for name in OVERWRITTEN & vars(kind).keys()}) for kind in kinds]


def _reset(variables: list[tuple[type, dict[str, Any]]]) -> None:
    for kind, values in variables:
        for name in OVERWRITTEN & vars(kind).keys() - values.keys():
            delattr(kind, name)
        for name, value in values.items():
            setattr(kind, name, value)
