"""The adapter's calls of transformers-neuronx, step by step, as recorded over the package's own code."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import traces
from tests.checkpoints import make_checkpoint
from tests.contracts import contract
from tests.doubles import Neuron
from tests.workers import tnx_mutants
from tests.workers.tnx_runs import BUCKETS, answers, config, requests_for
from workers.engines.transformers_neuronx.engine import TransformersNeuronxEngine, open_transformers_neuronx

Checkpoints = Callable[[str], Path]
CONFIGS = (
    "NeuronConfig",
    "ContinuousBatchingConfig",
    "QuantizationConfig",
    "KVCacheQuantizationConfig",
    "GenerationConfig",
)
METHODS = (
    *("from_pretrained", "enable_speculative_decoder", "load", "save", "to_neuron", "cpu_compile", "reset"),
    *("forward", "speculative_forward", "update_generation_config"),
)
STEPS = ("load", "prefill", "decode", "verify", "sample_by")
OPTIONS = {"fuse_qkv": True, "group_query_attention": "replicated-heads", "compile_workers": 2}


@pytest.fixture(params=["neuron", pytest.param("real_tnx", marks=pytest.mark.real)])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Neuron:
    """The double of the package, and the package itself above the closed layer's stand-ins."""
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-1")
    machine: Neuron = request.getfixturevalue(request.param)
    return machine


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model of other weights."""
    return make_checkpoint(tmp_path_factory.mktemp("draft") / "llama", "llama", seed=7, layers=1, eos=None)


@pytest.fixture
def trace(machine: Neuron, monkeypatch: pytest.MonkeyPatch) -> Iterator[traces.Trace]:
    """Watches the adapter, and the package that ``machine`` has."""
    package = importlib.import_module("transformers_neuronx.config")
    kinds = importlib.import_module("transformers_neuronx.modeling_auto").NEURON_MODEL_FOR_CAUSAL_LM_MAPPING
    with monkeypatch.context() as patch:
        trace = traces.Trace(patch)
        trace.watch(traces.ENGINE, TransformersNeuronxEngine, *STEPS)
        for name in CONFIGS:
            trace.watch(traces.PACKAGE, getattr(package, name), "__init__")
        for kind in set(kinds.values()):
            trace.watch(traces.PACKAGE, kind, *(name for name in METHODS if hasattr(kind, name)))
        yield trace


def loaded(trace: traces.Trace, source: Path, **fields: Any) -> Any:
    """Returns the engine, after the number of programs that it has compiled is in the trace."""
    compiler = importlib.import_module("neuron_double.compiler")
    importlib.import_module("neuron_double.runtime").reset_for_tests()
    engine = open_transformers_neuronx(config(source, **{**BUCKETS, **fields}))
    before = len(compiler.compiles())
    engine.load()
    trace.calls.append({"programs": len(compiler.compiles()) - before})
    return engine


def attempt(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """The outcome is in the trace."""
    with contextlib.suppress(Exception):
        call(*args, **kwargs)


def batches(trace: traces.Trace, source: Path, count: int = 6, **fields: Any) -> None:
    """Requests that arrive while others run, some of which are cancelled."""
    answers(loaded(trace, source, **fields), source, requests_for(source.name, count=count))


def continuous(trace: traces.Trace, checkpoint: Checkpoints, stranger: Path, folder: Path) -> None:
    batches(trace, checkpoint("llama"))


def static(trace: traces.Trace, checkpoint: Checkpoints, stranger: Path, folder: Path) -> None:
    batches(trace, checkpoint("gpt2"))


def serial(trace: traces.Trace, checkpoint: Checkpoints, stranger: Path, folder: Path) -> None:
    batches(trace, checkpoint("gpt_neox"), prefill_buckets=None, decode_buckets=None)


def device(trace: traces.Trace, checkpoint: Checkpoints, stranger: Path, folder: Path) -> None:
    batches(trace, checkpoint("llama"), sampling="device")


def draft(trace: traces.Trace, checkpoint: Checkpoints, stranger: Path, folder: Path) -> None:
    batches(trace, checkpoint("llama"), 4, draft_source=str(stranger), draft_k=2)


def low_precision(trace: traces.Trace, checkpoint: Checkpoints, stranger: Path, folder: Path) -> None:
    """Tokens are given: rounding in one step must not change the next."""
    engine = loaded(trace, checkpoint("llama"), dtype="bf16", **OPTIONS)
    engine.prefill([2, 0], [[9, 90, 200, 31, 8, 7, 60, 61, 62], [300, 20]])
    for step in range(3):
        engine.decode([0, 2], [75 + step, 85 + step], [2 + step, 9 + step])


def artifacts(trace: traces.Trace, checkpoint: Checkpoints, stranger: Path, folder: Path) -> None:
    """The second start loads what the first one has saved."""
    for _ in range(2):
        loaded(trace, checkpoint("llama"), compiled=str(folder / "compiled"), slots=1)


def refusals(trace: traces.Trace, checkpoint: Checkpoints, stranger: Path, folder: Path) -> None:
    """Of options and shapes, by the package itself."""
    source, kind = checkpoint("llama"), importlib.import_module("transformers_neuronx").LlamaForSampling
    package = importlib.import_module("transformers_neuronx.config")
    attempt(loaded, trace, source, engine_options={"no_such_option": 1})
    sequence_parallel = {"sequence_parallel_norm": True, "sequence_parallel_norm_threshold": 1}
    attempt(loaded, trace, source, engine_options=sequence_parallel, prefill_buckets=[9, 64])
    attempt(package.QuantizationConfig, quant_dtype="s4")
    attempt(package.KVCacheQuantizationConfig, quant_dtype="s4")
    attempt(package.ContinuousBatchingConfig, slots=2)
    batching = package.NeuronConfig(
        continuous_batching=package.ContinuousBatchingConfig(batch_size_for_shared_caches=2)
    )
    attempt(kind.from_pretrained, str(source), batch_size=3, neuron_config=batching)
    attempt(kind.from_pretrained, str(source), n_positions=[64], context_length_estimate=[128])
    attempt(kind.from_pretrained, str(source), neuron_config=package.NeuronConfig(cache_layout="BSH"))
    for length in (2, 3):  # tokens of a run, of which there must be as many as slots
        importlib.import_module("neuron_double.runtime").reset_for_tests()
        engine = TransformersNeuronxEngine(config(source, **BUCKETS), source, speculates=length)
        attempt(engine.load)
    model, every = engine._model, torch.arange(3)
    long, row = torch.ones(1, 65, dtype=torch.long), torch.ones(1, 3, dtype=torch.long)
    attempt(model.forward, input_ids=long, cache_ids=torch.arange(65)[None], start_ids=every[:1])
    attempt(model.forward, input_ids=row[:, :1], cache_ids=row[:, :1].int(), start_ids=every[:1])
    attempt(model.forward, input_ids=row[:, :1], cache_ids=row[:, :1] * 64, start_ids=every[:1])
    attempt(model.forward, input_ids=row[:, :1], cache_ids=row[:, :1], start_ids=torch.tensor([3]))
    cells = torch.arange(1, 4).expand(3, 3)
    attempt(model.speculative_forward, row, cells[:1], every[:1], 3)
    attempt(model.update_generation_config, package.GenerationConfig())


def static_refusals(trace: traces.Trace, checkpoint: Checkpoints, stranger: Path, folder: Path) -> None:
    """Of a static batch."""
    model = loaded(trace, checkpoint("opt"), slots=2)._model
    row = torch.ones(2, 2, dtype=torch.long)
    attempt(model.forward, row[:1])
    attempt(model.forward, row[:, :1], torch.tensor([64], dtype=torch.int32))
    gpt2 = importlib.import_module("transformers_neuronx").GPT2ForSamplingWithContextBroadcasting
    attempt(gpt2.from_pretrained, str(checkpoint("gpt2")), context_length_estimate=0)
    attempt(gpt2.from_pretrained, str(checkpoint("gpt2")), nonsense=1)


SCENARIOS = {
    f"tnx-{run.__name__.replace('_', '-')}": run
    for run in (continuous, static, serial, device, draft, low_precision, artifacts, refusals, static_refusals)
}


@pytest.mark.parametrize("version", contract("transformers-neuronx").versions)
@pytest.mark.parametrize("name", SCENARIOS)
def test_calls_of_the_package_are_those_recorded(
    machine: Neuron,
    trace: traces.Trace,
    checkpoint: Checkpoints,
    stranger: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    name: str,
    version: str,
) -> None:
    """Arguments, shapes, greedy tokens and refusals are equal over the package's own code and over the double."""
    monkeypatch.setenv("NEURON_DOUBLE_TNX_VERSION", version)
    is_real = "real_tnx" in request.fixturenames
    if is_real and name == "tnx-serial" and not metadata.version("transformers").startswith("4."):
        pytest.skip("transformers-neuronx misreads GPT-NeoX beside transformers 5")
    SCENARIOS[name](trace, checkpoint, stranger, tmp_path)
    if is_real:
        traces.record(name, trace)
    assert traces.written(trace.calls) == traces.recorded(name)


@pytest.mark.parametrize("machine", ["neuron"], indirect=True)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tnx-continuous", tnx_mutants.SwappedRows),
        ("tnx-continuous", tnx_mutants.OneTokenPromptAsDecode),
        ("tnx-draft", tnx_mutants.VerifiedOneAhead),
        ("tnx-static", tnx_mutants.RightPaddedLockStep),
    ],
)
def test_a_mutant_of_the_adapter_has_another_trace(
    trace: traces.Trace,
    checkpoint: Checkpoints,
    stranger: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kind: type[Any],
) -> None:
    """Without the sources of the package; with them, ``test_transformers_neuronx`` has all mutants."""
    make_rows = TransformersNeuronxEngine._make_rows

    def mutated(engine: Any, model: Any, *more: Any) -> Any:
        assert isinstance(make_rows(engine, model, *more), kind.__mro__[1])
        return kind(model, engine._config.model.max_batch, engine._config.max_len)

    monkeypatch.setattr(TransformersNeuronxEngine, "_make_rows", mutated)
    with contextlib.suppress(IndexError, RuntimeError, ValueError):
        SCENARIOS[name](trace, checkpoint, stranger, tmp_path)
    assert traces.written(trace.calls) != traces.recorded(name)
