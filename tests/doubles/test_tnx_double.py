"""What the stand-in of transformers-neuronx adds to the recorded traces: its signatures, and the device's refusals."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.contracts import contract
from tests.doubles import Neuron
from tests.workers.conftest import checkpoint as checkpoint
from workers.engines import package_contract

Checkpoints = Callable[[str], Path]


def made(path: Path, **more: Any) -> Any:
    """A model of the package that is not on the device yet."""
    import transformers_neuronx

    return transformers_neuronx.LlamaForSampling.from_pretrained(str(path), **{"n_positions": 64, **more})


@pytest.mark.parametrize("version", contract("transformers-neuronx").versions)
def test_its_surface_is_the_recorded_one(neuron: Neuron, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Names, parameters and defaults; options are read from the contract itself."""
    monkeypatch.setenv("NEURON_DOUBLE_TNX_VERSION", version)
    drift = package_contract.drift("transformers-neuronx")
    assert (drift.removed, drift.changed, drift.problem) == ((), (), None)


def test_compiling_on_the_host_claims_no_cores(neuron: Neuron, checkpoint: Checkpoints, tmp_path: Path) -> None:
    """After it the model can be saved; before it cannot."""
    model = made(checkpoint("llama"))
    with pytest.raises(AssertionError, match="successfully compiled"):
        model.save(str(tmp_path / "neffs"))
    model.cpu_compile()
    model.save(str(tmp_path / "neffs"))
    assert neuron.held() == {}


def test_neffs_that_do_not_match_show_after_the_cores_are_claimed(
    neuron: Neuron, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """``load`` itself only remembers the folder."""
    model = made(checkpoint("llama"))
    model.load(str(tmp_path / "nothing"))
    with pytest.raises(FileNotFoundError, match="matching NEFF"):
        model.to_neuron()
    assert set(neuron.held().values()) == {os.getpid()}


def test_more_cache_than_memory_is_refused(neuron: Neuron, checkpoint: Checkpoints) -> None:
    """2 layers of 2 heads of 16 numbers, for 2**28 positions, on 2 cores."""
    with pytest.raises(RuntimeError, match="status=4"):
        made(checkpoint("llama"), n_positions=2**28).to_neuron()


def test_a_degree_beyond_the_own_cores_is_refused(
    neuron: Neuron, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cores are numbered from 0 within the process."""
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "4-5")
    with pytest.raises(RuntimeError, match="Could not find VNC id 2"):
        made(checkpoint("llama"), tp_degree=4).to_neuron()
