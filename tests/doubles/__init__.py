"""Stand-ins of the Neuron packages and runtime, and the fixture that brings them into a test's process."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parent
PACKAGES = FOLDER / "packages"
TRACED = FOLDER / "traced"  # torch-neuronx's traces; apart, since the other packages need a torch-neuronx of their own
PLAYED = ("transformers_neuronx", "neuronx_distributed_inference", "neuronx_distributed", "optimum", "torch_neuronx")


@dataclass(frozen=True)
class Neuron:
    """The machine that the stand-ins play, as a test sees it."""

    state: Path  # $NEURON_DOUBLE_STATE

    def plan(self, *faults: dict[str, Any]) -> None:
        """These faults come from now on; neuron_double/faults.py has the keys."""
        written = self.state / "faults.json.new"
        written.write_text(json.dumps(faults))
        written.replace(self.state / "faults.json")

    def held(self) -> dict[int, int | None]:
        """Cores that a living process holds, each with its pid."""
        cores: dict[int, int | None] = importlib.import_module("neuron_double.runtime").held()
        return cores

    @property
    def env(self) -> dict[str, str]:
        """What another process needs to stand on the same machine."""
        names = [name for name in os.environ if name.startswith("NEURON_DOUBLE_")]
        return {"PYTHONPATH": str(PACKAGES), **{name: os.environ[name] for name in names}}


def fresh_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Neuron:
    """Returns a machine without settings, state and compiled graphs of the packages, for the length of the test."""
    for name in [name for name in os.environ if name.startswith(("NEURON_", "NEURONX_"))]:
        monkeypatch.delenv(name)
    state = tmp_path / "neuron"
    state.mkdir()
    monkeypatch.setenv("NEURON_DOUBLE_STATE", str(state))
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "neuron-compile-cache"))
    return Neuron(state)


def forget(*packages: str) -> dict[str, ModuleType]:
    """Removes the modules of these packages, so that the next import runs them anew, and returns them."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in packages}


@pytest.fixture
def neuron(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Neuron]:
    """The stand-ins can be imported, and this process has not touched a device yet. All of it ends with the test."""
    machine = fresh_machine(monkeypatch, tmp_path)
    monkeypatch.syspath_prepend(str(PACKAGES))
    forget(*PLAYED)
    runtime = importlib.import_module("neuron_double.runtime")
    runtime.reset_for_tests()
    yield machine
    runtime.reset_for_tests()
    forget(*PLAYED)


@pytest.fixture
def traces(neuron: Neuron, monkeypatch: pytest.MonkeyPatch) -> Neuron:
    """The machine with the stand-in of torch-neuronx's traces, for processes of the test, too."""
    torch: Any = importlib.import_module("torch")
    for name in ("save", "load"):
        monkeypatch.setattr(torch.jit, name, getattr(torch.jit, name))  # the stand-in replaces them
    monkeypatch.syspath_prepend(str(TRACED))
    monkeypatch.setenv("PYTHONPATH", f"{TRACED}{os.pathsep}{PACKAGES}")
    return neuron


def beside_transformers(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """The stand-ins read configurations as they would beside that version of transformers, and engines see it."""
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: version if name == "transformers" else real(name))
