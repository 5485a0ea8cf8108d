"""An engine is one folder of the workers: its runner does what its capabilities state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from placements.engines.registry import ENGINES, NAMES
from tests.replica_configs import replica_config
from workers import engines
from workers.compiled.host_sets import compiles
from workers.engines.open_engine import open_encoder, open_engine, runner_of
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig

ENGINES_FOLDER = Path(engines.__file__).parent
FOLDERS = {engine.module for engine in ENGINES.values()}


def config(engine: str, **fields: Any) -> ReplicaConfig:
    return replica_config(engine=engine, **fields)


def test_the_engines_are_those_of_the_registry() -> None:
    assert {path.parent.name for path in ENGINES_FOLDER.glob("*/__init__.py")} == FOLDERS


@pytest.mark.parametrize("name", NAMES)
def test_a_runner_does_what_its_engine_can(name: str) -> None:
    engine, runner = ENGINES[name], runner_of(name)
    serves = engine.runs_on == "server"
    assert (runner.serve is not None) == serves
    assert (runner.generate is not None) == ("generate" in engine.kinds and not serves)
    assert (runner.encode is not None) == (any(kind != "generate" for kind in engine.kinds) and not serves)


def test_an_engine_is_not_opened_for_what_it_cannot_do() -> None:
    """The error names the engines that can."""
    with pytest.raises(EngineLoadError, match=r"torch-neuronx does not serve models of kind generate.*use cpu, echo"):
        open_engine(config("torch-neuronx"))
    with pytest.raises(EngineLoadError, match=r"optimum-neuron does not serve.*use cpu, echo, vllm or torch-neuronx"):
        open_encoder(config("optimum-neuron", kind="embedding"))


def test_only_some_starts_compile() -> None:
    """The cpu engine with its option, vLLM on real hosts, and those of Neuron."""
    assert [name for name in NAMES if compiles(config(name))] == [
        *("transformers-neuronx", "nxd-inference", "vllm", "optimum-neuron", "torch-neuronx")
    ]
    assert compiles(config("cpu", engine_options={"compile": True}))
    assert not compiles(config("vllm", claims="/claims"))
