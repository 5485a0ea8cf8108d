"""The adapter's calls of NxD Inference, step by step, as recorded over the package's own code."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from placements.engines.nxd_inference.capabilities import NXD_VERSIONS
from tests import traces
from tests.checkpoints import make_checkpoint
from tests.closed.nxd_lane import real_nxdi as real_nxdi
from tests.doubles import Neuron
from tests.doubles import neuron as neuron
from tests.workers import nxdi_traffic
from tests.workers.nxdi_traffic import FULL, Checkpoints, arrivals, drawn_mixtral, opened, served
from tests.workers.nxdi_traffic import sources as sources
from workers.engines.nxd_inference import artifacts, package
from workers.engines.nxd_inference.engine import NxdEngine
from workers.engines.nxd_inference.package import import_package

NAME = "neuronx_distributed_inference"
STEPS = ("load", "prefill", "decode", "decode_runs", "sample_by")
OLDEST, *BETWEEN, NEWEST = NXD_VERSIONS
PROMPT = [7, 300, 21, 8, 90]
BUCKETS = {"prefill_buckets": [64], "decode_buckets": [nxdi_traffic.MAX_LEN]}


@pytest.fixture(
    params=[
        pytest.param(OLDEST, id=OLDEST),
        pytest.param(NEWEST, id=NEWEST),
        pytest.param("real_nxdi", marks=[pytest.mark.real, pytest.mark.filterwarnings("ignore")]),
    ]
)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Neuron:
    """The double of a version, and the package itself above the closed layer's stand-ins."""
    monkeypatch.setattr(artifacts, "compile_in_subprocess", nxdi_traffic.compile_here)
    for name in ("BASE_COMPILE_WORK_DIR", "XLA_HANDLE_SPECIAL_SCALAR", "UNSAFE_FP8FNCAST"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    if request.param not in NXD_VERSIONS:
        real: Neuron = request.getfixturevalue(request.param)
        return real
    double: Neuron = request.getfixturevalue("neuron")
    monkeypatch.setenv("NEURON_DOUBLE_NXDI_VERSION", request.param)
    return double


@pytest.fixture
def trace(machine: Neuron, monkeypatch: pytest.MonkeyPatch) -> Iterator[traces.Trace]:
    """Watches the adapter, and the package that ``machine`` has."""
    config, application, base = (
        importlib.import_module(f"{NAME}.models.{name}") for name in ("config", "application_base", "model_base")
    )
    with monkeypatch.context() as patch:
        trace = traces.Trace(patch)
        trace.watch(traces.ENGINE, NxdEngine, *STEPS)
        for name in ("NeuronConfig", "MoENeuronConfig", "OnDeviceSamplingConfig"):
            trace.watch(traces.PACKAGE, getattr(config, name), "__init__")
        trace.watch(traces.PACKAGE, application.NeuronApplicationBase, "compile", "load", "save_quantized_state_dict")
        trace.watch(traces.PACKAGE, base.NeuronBaseForCausalLM, "forward", gives=outputs)
        yield trace


def outputs(result: Any) -> Any:
    """Returns what the adapter reads of a result."""
    fused = getattr(result, "fused_outputs", None)
    if fused is not None:
        return {"fused": [traces.shaped(fused[place]) for place in (0, 3)]}
    if result.logits is not None:
        return {"logits": traces.shaped(result.logits)}
    tokens = getattr(result, "tokens", None)
    return {"tokens": traces.shaped(result.hidden_states if tokens is None else tokens)}


def loaded(trace: traces.Trace, source: Path, folder: Path, **fields: Any) -> Any:
    """Returns the engine, after the artifacts and the number of compiled graphs are in the trace."""
    compiler = importlib.import_module("neuron_double.compiler")
    before = len(compiler.compiles())
    engine = opened(source, folder, **fields)
    files = sorted(path.relative_to(folder).as_posix().partition("/")[2] for path in folder.glob("*/model/**/*.*"))
    trace.calls.append({"class": type(engine._model).__name__, "files": files})
    trace.calls.append({"graphs": len(compiler.compiles()) - before})
    return engine


def traffic(trace: traces.Trace, source: Path, folder: Path, **fields: Any) -> None:
    """Requests that arrive while others run, one of which is cancelled."""
    served(loaded(trace, source, folder, **fields), arrivals(3, seed=9))  # no two ids are nearly the best


def continuous(trace: traces.Trace, sources: Checkpoints, folder: Path) -> None:
    traffic(trace, sources("llama"), folder)


def single(trace: traces.Trace, sources: Checkpoints, folder: Path) -> None:
    traffic(trace, sources("llama"), folder, slots=1, **BUCKETS)


def mixtral(trace: traces.Trace, sources: Checkpoints, folder: Path) -> None:
    traffic(trace, drawn_mixtral(sources, folder.parent), folder)


def device(trace: traces.Trace, sources: Checkpoints, folder: Path) -> None:
    traffic(trace, sources("llama"), folder, sampling="device")


def draft(trace: traces.Trace, sources: Checkpoints, folder: Path) -> None:
    """One that is always right."""
    traffic(trace, sources("llama"), folder, draft_source=str(sources("llama")), draft_k=3)


def stranger(trace: traces.Trace, sources: Checkpoints, folder: Path) -> None:
    """A draft that hardly ever is right."""
    other = make_checkpoint(folder.parent / "stranger", "llama", seed=9, layers=1, eos=None)
    traffic(trace, sources("llama"), folder, draft_source=str(other), draft_k=2, **BUCKETS)


def quantized(trace: traces.Trace, sources: Checkpoints, folder: Path) -> None:
    engine = loaded(trace, sources("llama"), folder, quantize="int8", **BUCKETS)
    engine.prefill([0, 2], [PROMPT, [9, 8]])
    engine.decode([0, 2], [50, 51], [len(PROMPT), 2])


def refusals(trace: traces.Trace, sources: Checkpoints, folder: Path) -> None:
    """What the package itself refuses: options, classes, shapes."""
    llama, config, adapter = (
        importlib.import_module(f"{NAME}.{name}")
        for name in ("models.llama.modeling_llama", "models.config", "utils.hf_adapter")
    )
    source = str(sources("llama"))

    def tried(label: str, call: Callable[[], Any]) -> None:
        calls, trace.calls = trace.calls, []
        try:
            call()
            outcome = "accepted"
        except Exception as error:  # noqa: BLE001 - its class is the outcome
            outcome = getattr(error, "id", type(error).__name__)
        trace.calls = [*calls, {label: outcome}]

    def configured(**options: Any) -> Any:
        usual = {"tp_degree": 2, "seq_len": 64, "batch_size": 2, "ctx_batch_size": 1, "is_continuous_batching": True}
        neuron_config = config.NeuronConfig(**{**usual, "tkg_batch_size": 2, "torch_dtype": torch.float32, **options})
        return llama.LlamaInferenceConfig(neuron_config, load_config=adapter.load_pretrained_config(source))

    def model(**options: Any) -> Any:
        return llama.NeuronLlamaForCausalLM(source, configured(**options))

    def compiles(family: str, fields: dict[str, Any]) -> None:
        opened(sources(family), folder, max_len=64, prefill_buckets=[64], decode_buckets=[64], **fields)

    def read_back(**options: Any) -> None:
        llama.LlamaInferenceConfig.from_json_string(configured(**options).to_json_string())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(package, "_check_class", lambda *_: None)
        for fields in ({"fuse_qkv": True}, {"quantize": "int8"}):
            for family in ("llama", "mistral", "mixtral", "qwen2", FULL):
                tried(f"{family} {fields}", partial(compiles, family, fields))
        nxdi_traffic.allow_fp8(patch, fp8 := {"quantize": "fp8"})
        for family in ("mixtral", "qwen2"):
            tried(f"{family} {fp8}", partial(compiles, family, fp8))
    tried("unquantized weights", lambda: configured(quantized=True))
    path = {"quantized_checkpoints_path": str(folder / "none")}
    tried("an unknown type", lambda: configured(quantized=True, quantization_dtype="int4", **path))
    tried("no checkpoint", lambda: llama.LlamaInferenceConfig(config.NeuronConfig()))
    tried("reading options back", lambda: read_back())
    tried("reading a cache of fp8 back", lambda: read_back(kv_quant_config={"direct_cast": True}))
    tried("a load before a compile", lambda: model().load(str(folder / "none") + "/"))
    tried("a call before a load", lambda: model().forward(torch.ones(1, 2).long(), position_ids=torch.arange(2)[None]))
    trace.calls, calls = [], trace.calls
    engine = opened(sources("llama"), folder, sampling="device", **BUCKETS)
    trace.calls, sampling = calls, engine._sampling_params
    for row in (
        *([257, 1, 1], [-2, 1, 1], [1.5, 1, 1], [1, 0, 1], [1, 1.1, 1]),
        *([1, 1, -1], [1, 1, 0], [0, 1, 0], [-1, 1, 0], [1, 1, 1]),
    ):
        given = torch.tensor([row], dtype=torch.float32)
        engine._sampling_params = lambda _, given=given: given
        tried(f"sampling by {row}", lambda: engine.prefill([0], [PROMPT]))
    engine._sampling_params = sampling
    tried("a prompt beyond the buckets", lambda: engine.prefill([0], [[5] * 65]))
    tried("a step beyond the buckets", lambda: engine.decode([0], [5], [nxdi_traffic.MAX_LEN + 1]))


SCENARIOS = {
    f"nxdi-{run.__name__}": run for run in (continuous, single, mixtral, device, draft, stranger, quantized, refusals)
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_calls_of_the_package_are_those_recorded(
    machine: Neuron,
    trace: traces.Trace,
    sources: Checkpoints,
    tmp_path: Path,
    name: str,
    request: pytest.FixtureRequest,
) -> None:
    """Arguments, shapes and greedy tokens are equal over the package's own code and over the double."""
    SCENARIOS[name](trace, sources, tmp_path / "compiled")
    if name == "nxdi-refusals":  # which differ
        name += "-{}.{}".format(*import_package().release)
    if "real_nxdi" in request.fixturenames:
        traces.record(name, trace)
    assert traces.written(trace.calls) == traces.recorded(name)


@pytest.mark.parametrize("machine", BETWEEN, indirect=True)
def test_refusals_of_each_version_are_those_recorded(
    machine: Neuron, trace: traces.Trace, sources: Checkpoints, tmp_path: Path
) -> None:
    """Over the doubles of the versions that the traces above leave out."""
    refusals(trace, sources, tmp_path / "compiled")
    version = "{}.{}".format(*import_package().release)
    assert traces.written(trace.calls) == traces.recorded(f"nxdi-refusals-{version}")
