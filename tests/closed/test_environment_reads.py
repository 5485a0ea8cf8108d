"""The variables that the packages' own code reads while it is imported are those of the tables in docs/engines.md."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from placements.facts.versions import series
from tests.closed import real_tnx as real_tnx
from tests.closed.nxd_lane import real_nxdi as real_nxdi
from tests.closed.optimum_lane import real_optimum as real_optimum

pytestmark = pytest.mark.real

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
# What an adapter imports before it reads weights.
IMPORTED = {
    "transformers-neuronx": ("transformers_neuronx", "transformers_neuronx.modeling_auto"),
    "NxD Inference": (
        "neuronx_distributed_inference.models.config",
        "neuronx_distributed_inference.utils.constants",
        "neuronx_distributed_inference.utils.hf_adapter",
        "neuronx_distributed_inference.modules.generation.sampling",
    ),
    "Optimum Neuron": ("optimum.neuron", "optimum.neuron.models.inference.modeling_utils"),
}
OWN = ("/transformers_neuronx/", "/neuronx_distributed/", "/neuronx_distributed_inference/", "/optimum/neuron/")
PROGRAM = """
import contextlib, importlib, json, os, sys

class Recorder(type(os.environ)):
    def __getitem__(self, name):
        frame = sys._getframe(1)
        while frame.f_code.co_filename.endswith(("/os.py", "_collections_abc.py")) or "<" in frame.f_code.co_filename:
            frame = frame.f_back
        if any(part in frame.f_code.co_filename for part in OWN):
            names.add(name)
        return super().__getitem__(name)

names, OWN, modules = set(), *json.loads(sys.argv[1])
os.environ.__class__ = Recorder
with contextlib.suppress(ModuleNotFoundError):  # transformers-neuronx has none
    importlib.import_module("closed_layer").install()
with contextlib.redirect_stdout(sys.stderr):
    for module in modules:
        importlib.import_module(module)
print(json.dumps(sorted(names)))
"""


def read_by(package: str) -> set[str]:
    """Returns the variables that a fresh process reads while it imports the package."""
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps([OWN, IMPORTED[package]])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    return set(json.loads(done.stdout.splitlines()[-1]))


def names_in(cell: str) -> set[str]:
    return set(re.findall(r"`([A-Z][A-Z0-9_]+)`", cell))


def documented(package: str) -> set[str]:
    """Returns the variables in the second column of the package's row."""
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| {package}, reads at import"))
    return names_in(row.split("|")[2])


def documented_of(version: str) -> set[str]:
    """Returns the variables that a version of NxD Inference reads, from the table of its versions."""
    table = (
        PAGE.read_text().partition("What NxD Inference reads at import, by its version:\n\n")[2].partition("\n\n")[0]
    )
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    column = header.index(version)
    return {name for row in rows if row[column] == "yes" for name in names_in(row[0])}


@pytest.mark.usefixtures("real_tnx")
def test_transformers_neuronx_reads_these_at_import() -> None:
    assert read_by("transformers-neuronx") <= documented("transformers-neuronx")


@pytest.mark.usefixtures("real_nxdi")
def test_nxd_inference_reads_these_at_import() -> None:
    version = importlib.import_module("neuronx_distributed_inference").__version__
    assert read_by("NxD Inference") == documented_of(series(version))


@pytest.mark.usefixtures("real_optimum")
def test_optimum_neuron_reads_these_at_import() -> None:
    assert read_by("Optimum Neuron") <= documented("Optimum Neuron")
