"""The Neuron packages' own code on a CPU: the closed layer below them is stood in for, everything above it is real.

``TNX_SOURCE``, ``NXD_SOURCE`` and ``NXDI_SOURCE`` name the ``src`` of a checkout; on a Neuron image the packages are
found as installed. Without them the tests skip.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles import PACKAGES, Neuron, forget, fresh_machine

FOLDER = Path(__file__).parent
CLOSED_BELOW_TNX = ("torch_neuronx", "libneuronxla", "neuronxcc")


def source_of(variable: str, package: str) -> Path | None:
    """Returns the folder to import ``package`` from, None where it is installed.

    Skips the test with what to set where there is neither.
    """
    folder = os.environ.get(variable)
    if folder:
        if not Path(folder, *package.split("."), "__init__.py").exists():
            pytest.fail(f"{variable}={folder} has no package {package}; name the `src` of a checkout")
        return Path(folder)
    with contextlib.suppress(ModuleNotFoundError):  # of a parent
        if importlib.util.find_spec(package) is not None:
            return None
    pytest.skip(f"set {variable} to the `src` of a checkout of {package.replace('_', '-').replace('.', '-')}")


@pytest.fixture
def real_tnx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Neuron]:
    """transformers-neuronx's own code above the stand-ins of this folder. Fails if a run of a program failed unseen."""
    source = source_of("TNX_SOURCE", "transformers_neuronx")
    machine = fresh_machine(monkeypatch, tmp_path)
    monkeypatch.syspath_prepend(str(FOLDER / "tnx"))
    if source is not None:
        monkeypatch.syspath_prepend(str(source))
    monkeypatch.setattr(sys, "path", [*sys.path, str(PACKAGES)])  # last: it has doubles of these packages, too
    forget("transformers_neuronx", *CLOSED_BELOW_TNX)
    importlib.invalidate_caches()
    device = importlib.import_module("neuron_double.runtime")
    device.reset_for_tests()
    runtime = importlib.import_module("torch_neuronx.runtime")
    yield machine
    device.reset_for_tests()
    forget("transformers_neuronx", *CLOSED_BELOW_TNX)
    assert not runtime.FAILURES, runtime.FAILURES[0]
