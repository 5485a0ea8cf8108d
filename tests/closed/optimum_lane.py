"""Optimum Neuron's own code on a CPU: 0.4 above the stand-ins of NxD Inference's lane.

``OPTIMUM_SOURCE`` is a checkout of huggingface/optimum-neuron, and ``NXD_SOURCE`` the `src` of neuronx-distributed.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from placements.engines.optimum_neuron.capabilities import OptimumEra, optimum_era
from tests.closed import source_of
from tests.closed.nxd_lane import CLOSED, over_stand_ins
from tests.doubles import Neuron, forget

PACKAGE = "optimum.neuron"
UNUSED = ("torch_xla", "neuronx_distributed")  # of training


def source_folders(era: OptimumEra, tmp_path: Path) -> list[str]:
    """Returns the folders to import the package and its metadata from. Skips without the package of this era."""
    folder = source_of("OPTIMUM_SOURCE", PACKAGE)
    if folder is None:
        version = metadata.version("optimum-neuron")
    else:
        file = (folder / "optimum" / "neuron" / "version.py").read_text()
        version = re.search(r'__version__ = "(.+)"', file)[1]  # type: ignore[index]
    if optimum_era(version) != era:
        pytest.skip(f"Optimum Neuron {version} is of another era")
    return [_described(tmp_path / "metadata", "torch-neuronx", "2.8.0")] + (
        [] if folder is None else [_described(tmp_path / "metadata", "optimum-neuron", version), str(folder.resolve())]
    )


def _described(folder: Path, name: str, version: str) -> str:
    """Adds the metadata of a distribution to ``folder``: Optimum looks packages up by them."""
    (place := folder / f"{name.replace('-', '_')}-{version}.dist-info").mkdir(parents=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return str(folder)


@pytest.fixture
def real_optimum(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Neuron]:
    """Optimum Neuron 0.4 over the stand-ins, on an inf2.48xlarge."""
    nxd = source_of("NXD_SOURCE", "neuronx_distributed")
    if int(metadata.version("transformers").split(".")[0]) > 4:
        pytest.skip("Optimum Neuron needs transformers 4: install it into a folder and set PYTHONPATH to that")
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "")  # so that what the package sets is undone
    folders = source_folders("nxd", tmp_path) + ([] if nxd is None else [str(nxd.resolve())])
    with over_stand_ins(monkeypatch, tmp_path, folders) as machine:
        _give_devices(monkeypatch)
        yield machine


def _give_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the package reads in /proc, /dev and /sys."""
    machine = importlib.import_module("neuron_double.machine").instance()
    system = importlib.import_module(f"{PACKAGE}.utils.system")
    instance = importlib.import_module(f"{PACKAGE}.utils.instance")
    for module in (system, instance):
        monkeypatch.setattr(module, "get_neuron_major", lambda: 240)
        monkeypatch.setattr(module, "get_instance_name", lambda: machine.name)
    monkeypatch.setattr(system, "get_neuron_devices_count", lambda: machine.devices)
    instance.current_instance_type.cache_clear()
    for place in ("utils", "models.inference.backend"):  # up to 0.4.5, and later
        try:
            memory = importlib.import_module(f"{PACKAGE}.{place}.neuron_device_memory")
        except ModuleNotFoundError:
            continue
        monkeypatch.setattr(memory, "get_neuron_device_memory", lambda: "unknown")


@pytest.fixture
def real_optimum_before_0_4(real_tnx: Neuron, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Neuron]:
    """Optimum Neuron 0.0.28 over transformers-neuronx's own code and its stand-ins."""
    folders = source_folders("tnx", tmp_path)
    for folder in folders:
        monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    forget("optimum", "closed_layer", *UNUSED)
    importlib.invalidate_caches()
    with monkeypatch.context() as only:  # of that folder, nothing but this module
        only.setattr(sys, "path", [str(CLOSED), *sys.path])
        closed = importlib.import_module("closed_layer")
    monkeypatch.setattr(closed, "PACKAGES", UNUSED)  # what the package imports for training is blank
    monkeypatch.setattr(importlib.import_module("torch_neuronx"), "__getattr__", closed.blank("torch_neuronx"), False)
    machine, is_folder = importlib.import_module("neuron_double.machine").instance(), os.path.isdir
    # Without this folder, an export is refused.
    monkeypatch.setattr(os.path, "isdir", lambda path: path == "/sys/class/neuron_device/" or is_folder(path))
    for name in ("exporters", "commands", "commands.export"):  # which the package `optimum` has, too, in its own folder
        package = importlib.import_module(f"optimum.{name}")
        package.__path__.extend(f"{folder}/optimum/{name.replace('.', '/')}" for folder in folders)
    decoder = importlib.import_module(f"{PACKAGE}.modeling_decoder")
    monkeypatch.setattr(decoder, "get_available_cores", lambda: machine.cores)
    yield real_tnx
    forget("optimum", "closed_layer", *UNUSED)
