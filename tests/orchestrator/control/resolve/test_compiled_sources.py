"""Sources that Optimum Neuron has compiled, and caches of its graphs: compared with the spec before a fetch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from orchestrator.control.resolve.spec_file import load
from placements.spec.problems import render
from tests.hub import HubServer, Repo
from tests.orchestrator.control.resolve.test_sources import home as home
from tests.orchestrator.control.resolve.test_sources import hub as hub
from tests.stubs import LLAMA, stub_checkpoint

GOLDEN = Path(__file__).parents[3] / "golden" / "sources" / "optimum.yaml"
NXD = {
    "_serialized_key": "NxDNeuronConfig",
    "optimum_neuron_version": "0.4.5",
    "batch_size": 4,
    "sequence_length": 64,
    "tp_degree": 2,
    "torch_dtype": "bfloat16",
    "on_device_sampling": True,
    "continuous_batching": True,
    "target": "trn1",
}
TNX = {"task": "text-generation", "batch_size": 4, "sequence_length": 64, "num_cores": 2, "auto_cast_type": "bf16"}
MODULE = "neuronxcc-2.21.33363.0+82129205/MODULE_12486829708343293975+d41d8cd9"
REGISTRY = "neuronxcc-2.21.33363.0+82129205/0_REGISTRY"
BY_0_4_5 = {**LLAMA, "neuron": NXD, "_model_id": "meta-llama/Llama-3.1-8B"}
CACHE: Mapping[str, Any] = {  # as 0.0.28 and 0.4.5 write it; 0.4.5 writes each entry twice
    f"{REGISTRY}/0.0.28/inference/llama/meta-llama/Llama-2-7b-hf/1f.json": {**LLAMA, "neuron": TNX},
    f"{REGISTRY}/0.4.5/llama/meta-llama/Llama-3.1-8B/9c.json": BY_0_4_5,
    f"{REGISTRY}/0.4.5/5e/9c.json": BY_0_4_5,
    f"{REGISTRY}/0.4.5/bert/org/bert/77.json": {"model_type": "bert", "neuron": {"static_batch_size": 1}},
    f"{REGISTRY}/0.4.5/llama/org/broken/88.json": None,
}
SAVED: Mapping[str, Any] = {"neuron_config.json": NXD, "model.pt": None}
FIRST: Mapping[str, Any] = {
    "config.json": {**LLAMA, "neuron": TNX},
    "checkpoint/config.json": LLAMA,
    "compiled/a.neff": None,
}


def write(folder: Path, files: Mapping[str, Any]) -> None:
    """Files with these values as JSON; None: a file of another format."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x" if content is None else json.dumps(content))


@pytest.fixture
def sources(tmp_path: Path, hub: HubServer) -> HubServer:
    """The folders of the golden spec beside it, and all of them on the hub."""
    write(stub_checkpoint(tmp_path / "saved"), SAVED)
    first = stub_checkpoint(tmp_path / "first")
    write(first, FIRST)
    (first / "model.safetensors").rename(first / "checkpoint" / "model.safetensors")
    graphs = {f"{MODULE}/model.neff": None, f"{MODULE}/model.done": None}
    write(tmp_path / "cache", {**CACHE, **graphs})
    write(tmp_path / "plain", graphs)
    for folder in ("saved", "first", "cache"):
        repo = hub.repos[f"org/{folder}"] = Repo()
        files = [path for path in (tmp_path / folder).rglob("*") if path.is_file()]
        repo.commit({path.relative_to(tmp_path / folder).as_posix(): path.read_bytes() for path in files})
    return hub


def test_compiled_sources_give_exactly_these_problems(
    sources: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with its degree, batch and length; of the hub's files only the small ones are fetched."""
    (tmp_path / "optimum.yaml").write_bytes(GOLDEN.read_bytes())
    monkeypatch.chdir(tmp_path)
    problems = render(load("optimum.yaml", folders="plan").problems)
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.with_suffix(".txt").write_text(problems)
    assert problems == GOLDEN.with_suffix(".txt").read_text()
    fetched = {request.path.rpartition("/resolve/")[2].partition("/")[2] for request in sources.asked}
    assert not [name for name in fetched if name.endswith((".neff", ".pt", ".safetensors", ".done"))]
