"""Stand-ins of the Neuron packages and runtime, and the fixture that brings them into a test's process.

They refuse what the real ones refuse and silently do wrong what the real ones silently do wrong; torch computes.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
PACKAGES = FOLDER / "packages"
DIGEST = FOLDER / "digest.txt"  # of what this folder's own tests have passed with; while it holds, they are slow tests
PLAYED = ("transformers_neuronx", "neuronx_distributed_inference", "neuronx_distributed", "torch_neuronx")


def digest() -> str:
    """The stand-ins, their tests, and the recorded contracts, in one SHA-256."""
    files = [*FOLDER.rglob("*.py"), FOLDER.parent / "contracts.py", *(FOLDER.parent / "contracts").iterdir()]
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(f"{path.relative_to(FOLDER.parent)}\0".encode() + path.read_bytes())
    return total.hexdigest()


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


@pytest.fixture
def neuron(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Neuron]:
    """The stand-ins can be imported, and this process has not touched a device yet. All of it ends with the test."""
    for name in [name for name in os.environ if name.startswith(("NEURON_", "NEURONX_"))]:
        monkeypatch.delenv(name)
    state = tmp_path / "neuron"
    state.mkdir()
    monkeypatch.setenv("NEURON_DOUBLE_STATE", str(state))
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "neuron-compile-cache"))
    monkeypatch.syspath_prepend(str(PACKAGES))
    _forget_packages()
    runtime = importlib.import_module("neuron_double.runtime")
    runtime.reset_for_tests()
    yield Neuron(state)
    runtime.reset_for_tests()
    _forget_packages()


def beside_transformers(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """The stand-ins read configurations as they would beside that version of transformers, and engines see it."""
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: version if name == "transformers" else real(name))


def _forget_packages() -> None:
    """They are imported anew, by the version that the next test names; and are missing where no test names them."""
    for name in [name for name in sys.modules if name.split(".")[0] in PLAYED]:
        del sys.modules[name]
