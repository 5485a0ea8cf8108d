"""The adapter's calls of Optimum Neuron, step by step, as recorded over the package's own code."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import traces
from tests.closed import real_tnx as real_tnx
from tests.closed.optimum_lane import real_optimum as real_optimum
from tests.closed.optimum_lane import real_optimum_before_0_4 as real_optimum_before_0_4
from tests.doubles import Neuron
from tests.doubles import neuron as neuron
from tests.workers.nxdi_traffic import Checkpoints, arrivals, drawn_mixtral, served
from tests.workers.nxdi_traffic import sources as sources
from tests.workers.optimum_traffic import config_of, export_here, play
from workers.engines.open_engine import open_engine
from workers.engines.optimum_neuron import artifacts
from workers.engines.optimum_neuron.engine import OptimumEngine
from workers.engines.optimum_neuron.first_engine import FirstOptimumEngine
from workers.engines.optimum_neuron.package import find_package

INFERENCE = "optimum.neuron.models.inference"
EXPORTED = (
    *("batch_size", "continuous_batching", "fused_qkv", "max_context_length", "max_topk", "on_device_sampling"),
    *("sequence_length", "target", "torch_dtype", "tp_degree"),
)
PROMPT = [7, 300, 21, 8, 90]


def over(version: str, real: str) -> list[Any]:
    """The double of a version, and the package itself above the closed layer's stand-ins."""
    marks = [pytest.mark.real, pytest.mark.filterwarnings("ignore")]
    return [pytest.param(version, id=version), pytest.param(real, marks=marks)]


@pytest.fixture
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Neuron:
    monkeypatch.setattr(artifacts, "compile_in_subprocess", export_here)
    is_real = request.param.startswith("real")
    machine: Neuron = request.getfixturevalue(request.param if is_real else "neuron")
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")  # the package sets it when it is imported
    if not is_real:
        play(monkeypatch, request.param)
    return machine


@pytest.fixture
def trace(machine: Neuron, monkeypatch: pytest.MonkeyPatch) -> Iterator[traces.Trace]:
    """Watches the adapter, and the package that ``machine`` has."""
    with monkeypatch.context() as patch:
        trace = traces.Trace(patch)
        for engine in (OptimumEngine, FirstOptimumEngine):
            trace.watch(traces.ENGINE, engine, "load", "prefill", "decode")
        trace.watch(traces.ENGINE, OptimumEngine, "sample_by")
        if find_package().era == "tnx":
            kind = importlib.import_module("optimum.neuron.modeling").NeuronModelForCausalLM
            trace.watch(traces.PACKAGE, kind, "from_pretrained", "save_pretrained")
            trace.watch(traces.PACKAGE, kind, "forward", gives=lambda result: traces.shaped(result[0]))
        else:
            base = importlib.import_module(f"{INFERENCE}.modeling_utils").NeuronPreTrainedModel
            decoder = importlib.import_module(f"{INFERENCE}.backend.modules.decoder.modeling_decoder")
            trace.watch(traces.PACKAGE, base, "get_neuron_config", gives=settings)
            trace.watch(traces.PACKAGE, base, "export", "save_pretrained", "from_pretrained")
            trace.watch(traces.PACKAGE, decoder.NxDModelForCausalLM, "forward")
        yield trace


def settings(neuron_config: Any) -> Any:
    """What the class of the family has chosen."""
    return traces.described({name: getattr(neuron_config, name) for name in EXPORTED})


def loaded(trace: traces.Trace, source: Path, folder: Path, **fields: Any) -> Any:
    """Returns the engine, after the files of the export are in the trace."""
    engine = open_engine(config_of(source, folder, **fields))
    engine.load()
    paths = folder.glob("*/model/**/*.*")
    names = {"<key>" + path.suffix if path.suffix == ".neff" else path.name for path in paths}
    trace.calls.append({"files": sorted(names - {"generation_config.json"})})
    return engine


def traffic(trace: traces.Trace, source: Path, folder: Path, **fields: Any) -> None:
    """Requests that arrive while others run, one of which is cancelled."""
    served(loaded(trace, source, folder, **fields), arrivals(3, seed=9))  # no two ids are nearly the best


def continuous(trace: traces.Trace, sources: Checkpoints, folder: Path) -> None:
    traffic(trace, sources("llama"), folder)


def device(trace: traces.Trace, sources: Checkpoints, folder: Path) -> None:
    traffic(trace, sources("llama"), folder, sampling="device")


def single(trace: traces.Trace, sources: Checkpoints, folder: Path) -> None:
    traffic(trace, sources("llama"), folder, slots=1)


def static(trace: traces.Trace, sources: Checkpoints, folder: Path) -> None:
    """A class that ignores slots."""
    source = drawn_mixtral(sources, folder.parent) if find_package().era == "nxd" else sources("opt")
    engine = loaded(trace, source, folder)
    engine.prefill([0, 2], [PROMPT, [9, 8]])
    engine.decode([0, 2], [50, 51], [len(PROMPT), 2])


def reused(trace: traces.Trace, sources: Checkpoints, folder: Path) -> None:
    """A second start, of what the first one has exported."""
    loaded(trace, sources("llama"), folder).close()
    importlib.import_module("neuron_double.runtime").reset_for_tests()
    trace.calls.clear()
    loaded(trace, sources("llama"), folder)


def refusals(trace: traces.Trace, sources: Checkpoints, folder: Path) -> None:
    """What the package itself refuses: settings, folders, sampling parameters."""
    outcomes: list[Any] = []
    kind = importlib.import_module("optimum.neuron").NeuronModelForCausalLM
    source = str(sources("llama"))
    sizes = {"batch_size": 4, "sequence_length": 96, "tensor_parallel_size": 2}

    def tried(label: str, call: Callable[[], Any]) -> None:
        try:
            call()
            outcomes.append({label: "accepted"})
        except Exception as error:  # noqa: BLE001 - its class is the outcome
            outcomes.append({label: getattr(error, "id", type(error).__name__)})

    tried("an unknown machine", lambda: kind.get_neuron_config(source, instance_type="g5", **sizes))
    tried("an unknown family", lambda: kind.get_neuron_config(str(sources("gpt2")), **sizes))
    tried("an unknown size", lambda: kind.get_neuron_config(source, max_batch=4, **sizes))
    tried("a folder that is not exported", lambda: kind.from_pretrained(source))
    engine: Any = loaded(trace, sources("llama"), folder, sampling="device")
    for row in (
        *([257, 1, 1], [-2, 1, 1], [1.5, 1, 1], [1, 0, 1], [1, 1.1, 1]),
        *([1, 1, -1], [1, 1, 0], [0, 1, 0], [-1, 1, 0], [1, 1, 1]),
    ):
        given = torch.tensor([row], dtype=torch.float32)
        engine._sampling_params = lambda _, given=given: given
        tried(f"sampling by {row}", lambda: engine.prefill([0], [PROMPT]))
    trace.calls[:] = outcomes


NXD = {f"optimum-{run.__name__}": run for run in (continuous, device, single, static, reused, refusals)}
TNX = {f"optimum-first-{run.__name__}": run for run in (continuous, static, reused)}


def run(scenario: Any, name: str, trace: traces.Trace, sources: Checkpoints, folder: Path) -> None:
    scenario(trace, sources, folder)
    traces.record(name, trace)
    assert traces.written(trace.calls) == traces.recorded(name)


@pytest.mark.parametrize("name", NXD)
@pytest.mark.parametrize("machine", over("0.4.5", "real_optimum"), indirect=True)
def test_calls_of_0_4_are_those_recorded(
    machine: Neuron, name: str, trace: traces.Trace, sources: Checkpoints, tmp_path: Path
) -> None:
    """Arguments, shapes and greedy tokens are equal over the package's own code and over the double."""
    if find_package().version != "0.4.5":
        pytest.skip("another version, with other arguments")
    run(NXD[name], name, trace, sources, tmp_path / "compiled")


@pytest.mark.parametrize("name", TNX)
@pytest.mark.parametrize("machine", over("0.0.28", "real_optimum_before_0_4"), indirect=True)
def test_calls_of_0_0_28_are_those_recorded(
    machine: Neuron, name: str, trace: traces.Trace, sources: Checkpoints, tmp_path: Path
) -> None:
    """The same, of the first era."""
    run(TNX[name], name, trace, sources, tmp_path / "compiled")
