"""Encoders as traces of torch-neuronx: their vectors, their compiled artifacts, and their errors."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.doubles import Neuron, neuron, traces  # noqa: F401 - fixtures
from tests.encoders import HIDDEN, save_encoder, texts
from tests.replica_configs import changed
from tests.replica_configs import replica_config as configured
from workers.batching.encode_batcher import EncodeBatcher
from workers.compiled.host_sets import LockedEntry
from workers.compiled.orders import Built, Order, Predicted, Reply
from workers.engines.open_engine import open_encoder
from workers.engines.torch_neuronx.artifacts import TRACE, compile_missing
from workers.engines.torch_neuronx.tracing import Tracing
from workers.messages.encoder_protocol import EncodeInput
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig
from workers.messages.requests import GenerateRequest, TokenEvent
from workers.messages.status import Reaction, Trouble
from workers.serving.backend import failure_of
from workers.serving.prepare import run

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
CLOSE = 1e-5
TRACED = ("bert", "distilbert", "mpnet", "roberta", "xlm-roberta")
BUCKETS = [8, 20]


@pytest.fixture(autouse=True)
def machine(traces: Neuron, monkeypatch: pytest.MonkeyPatch) -> Neuron:  # noqa: F811
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "3")
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")
    return traces


def config(source: Path, tmp_path: Path, **fields: Any) -> ReplicaConfig:
    """A batch of 5 inputs runs as compiled batches of 2, the last of them filled."""
    given: dict[str, Any] = {
        "kind": "embedding",
        "dtype": "fp32",
        "slots": 5,
        "max_len": BUCKETS[-1],
        "prefill_buckets": BUCKETS,
        "engine_options": {"compiled_batch": 2},
        "compiled": str(tmp_path / "compiled"),
    }
    return configured(model="encoder", engine="torch-neuronx", source=str(source), **given | fields)


def replies_to(command: str, replica_config: ReplicaConfig, **fields: Any) -> list[Reply]:
    results: list[Reply] = []
    run(command, Order(config=replica_config, **fields), results.append)
    return results


def built(replica_config: ReplicaConfig, **fields: Any) -> Built:
    reply = replies_to("compile", replica_config, **fields)[-1]
    assert isinstance(reply, Built), reply
    return reply


def compiles() -> int:
    return len(importlib.import_module("neuron_double.compiler").compiles())


def loaded(replica_config: ReplicaConfig) -> Any:
    """Compiles in this process, which is faster, then loads."""
    compile_missing(replica_config)
    engine = open_encoder(replica_config)
    engine.load()
    return engine


def refused(replica_config: ReplicaConfig) -> EngineLoadError:
    with pytest.raises(EngineLoadError) as caught:
        loaded(replica_config)
    return caught.value


def batched(engine: Any, inputs: Sequence[EncodeInput]) -> Any:
    """Returns the vectors that the batcher gives for one request."""
    events: list[TokenEvent] = []
    batcher = EncodeBatcher(engine, events.extend)
    batcher.submit(GenerateRequest(id="a", prompt_ids=[], max_tokens=0, inputs=list(inputs)))
    while batcher.step():
        pass
    data = b"".join(event.part.data for event in events if event.part is not None)
    return np.frombuffer(data, dtype=np.float32).reshape(len(inputs), -1)


@pytest.mark.parametrize("family", TRACED)
def test_vectors_of_ragged_batches_are_those_of_sentence_transformers(
    family: str, machine: Neuron, tmp_path: Path
) -> None:
    """Through the batcher, in all buckets and in batches that do not fill the compiled one; on the replica's core."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    tokenizer = save_encoder(tmp_path / "model", family)
    given = texts(13)
    model: Any = SentenceTransformer(modules=[Transformer(str(tmp_path / "model")), Pooling(HIDDEN)], device="cpu")
    expected = model.encode(given)
    engine = loaded(config(tmp_path / "model", tmp_path))
    assert (engine.spec.rows, engine.spec.buckets, engine.spec.width) == (5, tuple(BUCKETS), HIDDEN)
    vectors = batched(engine, [EncodeInput(tokenizer(text)["input_ids"]) for text in given])
    assert np.abs(vectors - expected).max() < CLOSE
    assert np.abs(expected[0] - expected[1]).max() > 100 * CLOSE  # else any vectors would pass
    assert list(machine.held()) == [3]


def test_a_folder_of_sentence_transformers_is_traced_with_what_follows_the_pooling(tmp_path: Path) -> None:
    """A row that only fills the compiled batch has no last token."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    tokenizer = save_encoder(tmp_path / "plain", "bert")
    parts = [Transformer(str(tmp_path / "plain")), Pooling(HIDDEN, "lasttoken"), Dense(HIDDEN, 24), Normalize()]
    model: Any = SentenceTransformer(modules=parts, device="cpu")
    model.save(str(tmp_path / "saved"))
    given = texts(3)
    engine = loaded(config(tmp_path / "saved", tmp_path, prefill_buckets=[20]))
    vectors = engine.encode([EncodeInput(tokenizer(text)["input_ids"]) for text in given])
    assert np.abs(vectors - model.encode(given)).max() < CLOSE


@pytest.mark.parametrize("family", TRACED)
def test_a_reranker_gives_the_scores_of_a_cross_encoder(family: str, tmp_path: Path) -> None:
    """The types of tokens, where the family has them, tell the second text of a pair from the first."""
    from sentence_transformers import CrossEncoder

    tokenizer = save_encoder(tmp_path / "model", family, labels=1)
    pairs = list(zip(texts(5, seed=1, longest=7), texts(5, seed=2, longest=7), strict=True))
    read = [tokenizer(*pair) for pair in pairs]
    inputs = [EncodeInput(one["input_ids"], one.get("token_type_ids", [1]).index(1)) for one in read]
    scores = loaded(config(tmp_path / "model", tmp_path, kind="rerank", prefill_buckets=[20])).encode(inputs)
    assert np.abs(scores[:, 0] - CrossEncoder(str(tmp_path / "model"), device="cpu").predict(pairs)).max() < CLOSE


def test_classes_have_the_scores_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    save_encoder(tmp_path / "model", "distilbert", labels=3)
    engine = loaded(config(tmp_path / "model", tmp_path, kind="classification", prefill_buckets=[20]))
    model: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        expected = model(torch.tensor([[2, 9, 8, 3]])).logits.softmax(-1).numpy()
    assert np.abs(engine.encode([EncodeInput([2, 9, 8, 3])]) - expected).max() < CLOSE
    assert engine.spec.labels == ("LABEL_0", "LABEL_1", "LABEL_2")


def test_weights_and_vectors_of_bf16_are_close(tmp_path: Path) -> None:
    save_encoder(tmp_path / "model", "bert", num_hidden_layers=1)
    inputs = [EncodeInput([2, 9, 8, 3]), EncodeInput([2, 9, 3])]
    exact, rounded = (
        loaded(config(tmp_path / "model", tmp_path, dtype=dtype, prefill_buckets=[20])).encode(inputs)
        for dtype in ("fp32", "bf16")
    )
    assert rounded.dtype == np.float32
    assert CLOSE < np.abs(exact - rounded).max() < 0.1 * np.abs(exact).max()


def test_a_start_compiles_what_is_missing_in_a_process_of_its_own(machine: Neuron, tmp_path: Path) -> None:
    """Then it loads it, and the next start compiles nothing."""
    tokenizer = save_encoder(tmp_path / "model", "bert", num_hidden_layers=1)
    replica_config = config(tmp_path / "model", tmp_path, prefill_buckets=[20])
    engine = open_encoder(replica_config)
    engine.load()
    lines = (machine.state / "compiles.jsonl").read_text().splitlines()
    assert len(lines) == 1
    assert json.loads(lines[0])["pid"] != os.getpid()
    vectors = engine.encode([EncodeInput(tokenizer("w1 w2")["input_ids"])])
    again = open_encoder(replica_config)
    again.load()
    assert compiles() == 1
    assert (again.encode([EncodeInput(tokenizer("w1 w2")["input_ids"])]) == vectors).all()


def test_traces_are_compiled_ahead_without_a_core_and_the_prediction_names_them(
    machine: Neuron, tmp_path: Path
) -> None:
    save_encoder(tmp_path / "model", "bert", num_hidden_layers=1)
    replica_config = config(tmp_path / "model", tmp_path)
    (before,) = replies_to("predict", replica_config)
    assert isinstance(before, Predicted)
    assert [(wanted.complete, wanted.ahead) for wanted in before.wanted] == [(False, True)] * 2
    result = built(replica_config)
    assert result.compiled == [wanted.key for wanted in before.wanted]
    assert machine.held() == {}
    assert built(replica_config).compiled == []
    assert replies_to("check", replica_config)[-1].__class__.__name__ == "Checked"


def test_two_versions_of_one_shape_share_one_compile(tmp_path: Path) -> None:
    """A trace has the weights of neither; each version gives its own vectors."""
    names = ("good", "bad")
    save_encoder(tmp_path / "one", "bert", labels=2)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    file = tmp_path / "two" / "config.json"
    settings = json.loads(file.read_text()) | {"id2label": dict(enumerate(names)), "_name_or_path": "two"}
    file.write_text(json.dumps(settings | {"label2id": {name: i for i, name in enumerate(names)}}))
    from safetensors.torch import load_file, save_file

    weights = load_file(tmp_path / "two" / "model.safetensors")
    others = {name: weight.flip(0).contiguous() for name, weight in weights.items()}
    save_file(others, tmp_path / "two" / "model.safetensors", {"format": "pt"})
    one, two = (config(tmp_path / name, tmp_path, kind="classification") for name in ("one", "two"))
    assert len(built(one).compiled) == 2
    assert built(two).compiled == []
    assert compiles() == 2
    rows = [loaded(replica_config) for replica_config in (one, two)]
    assert [engine.spec.labels for engine in rows] == [("LABEL_0", "LABEL_1"), names]
    first, second = (engine.encode([EncodeInput([2, 9, 8, 3])]) for engine in rows)
    assert np.abs(first - second).max() > 100 * CLOSE
    cpu = open_encoder(changed(two, engine="cpu", compiled=None))
    cpu.load()
    assert np.abs(cpu.encode([EncodeInput([2, 9, 8, 3])]) - second).max() < CLOSE
    assert compiles() == 2


def test_only_what_has_changed_is_compiled_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One bucket; or all, for another compiled batch, type or flags. More rows in the batcher change nothing."""
    save_encoder(tmp_path / "model", "bert", num_hidden_layers=1)
    assert len(built(config(tmp_path / "model", tmp_path)).compiled) == 2

    def missing(**fields: Any) -> int:
        (reply,) = replies_to("predict", config(tmp_path / "model", tmp_path, **fields))
        assert isinstance(reply, Predicted)
        return sum(not wanted.complete for wanted in reply.wanted)

    counts = [missing(), missing(slots=9), missing(prefill_buckets=[12, 20]), missing(dtype="bf16")]
    counts.append(missing(engine_options={"compiled_batch": 3}))
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O1")
    assert [*counts, missing()] == [0, 0, 1, 2, 2, 2]


def test_traces_are_fetched_from_the_shared_cache(tmp_path: Path) -> None:
    save_encoder(tmp_path / "model", "bert", num_hidden_layers=1)
    shared = {"neff_cache": str(tmp_path / "shared")}
    pushed = built(config(tmp_path / "model", tmp_path, **shared), push=True).pushed
    other = config(tmp_path / "model", tmp_path, compiled=str(tmp_path / "other"), **shared)
    assert built(other).pulled == pushed
    assert (len(pushed), compiles()) == (2, 2)
    loaded(other)


def test_a_machine_without_the_package_is_told_where_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_encoder(tmp_path / "model", "bert", num_hidden_layers=1)
    stand_in = importlib.import_module("torch_neuronx")
    monkeypatch.setattr(stand_in, "trace", lambda func, example_inputs, compiler_args=None: None)
    error = refused(config(tmp_path / "model", tmp_path))
    assert error.id == "engine-not-installed"
    assert (
        "2.8.0.2.10.16998 has no trace(compiler_workdir, compiler_args, inline_weights_to_neff, cpu_backend)"
        in error.what
    )
    monkeypatch.setattr("workers.engines.torch_neuronx.artifacts.NAME", "torch_neuronx_absent")
    error = refused(config(tmp_path / "model", tmp_path))
    assert (error.id, error.what) == (
        "engine-not-installed",
        "the torch-neuronx engine needs torch_neuronx_absent",
    )


def test_a_bucket_that_does_not_compile_is_named_with_its_batch(machine: Neuron, tmp_path: Path) -> None:
    """So is one whose compiler was killed; the first bucket is kept."""
    save_encoder(tmp_path / "model", "bert", num_hidden_layers=1)
    replica_config = config(tmp_path / "model", tmp_path)
    machine.plan({"at": "compile", "count": 2, "exit": 70})
    reply = replies_to("compile", replica_config)[-1]
    assert isinstance(reply, Trouble)
    assert reply.failure.id == "compiler-failed"
    assert "the bucket of 20 tokens, 2 rows, of" in reply.failure.what
    machine.plan()
    assert len(built(replica_config).compiled) == 1


def test_the_machine_to_compile_for_must_be_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save_encoder(tmp_path / "model", "bert", num_hidden_layers=1)
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE")
    monkeypatch.setattr("workers.host.host_facts.instance_type", lambda: None)
    assert "NEURON_PLATFORM_TARGET_OVERRIDE is unset" in refused(config(tmp_path / "model", tmp_path)).what


def test_an_artifact_of_another_shape_is_refused_and_discarded(tmp_path: Path) -> None:
    """Its record and its manifest are right; only its trace is of another model."""
    save_encoder(tmp_path / "model", "bert", num_hidden_layers=1)
    save_encoder(tmp_path / "other", "bert", hidden_size=64)
    one, two = (config(tmp_path / name, tmp_path, prefill_buckets=[20]) for name in ("model", "other"))
    (entry,) = [Path(wanted.folder) for wanted in built(one).wanted]
    (other,) = [Path(wanted.folder) for wanted in built(two).wanted]
    shutil.copyfile(other / TRACE, entry / TRACE)
    LockedEntry(entry, json.loads((entry / "corewright.json").read_text())).finish()
    error = refused(one)
    assert error.id == "artifacts-stale"
    assert f"the trace in {entry} does not take the weights of {tmp_path / 'model'}" in error.what
    assert not (entry / "corewright.json").exists()


def test_full_memory_of_the_core_names_the_buckets_and_their_weights(machine: Neuron, tmp_path: Path) -> None:
    save_encoder(tmp_path / "model", "bert", num_hidden_layers=1)
    replica_config = config(tmp_path / "model", tmp_path)
    built(replica_config)
    machine.plan({"at": "allocate", "count": 2, "status": 4})
    error = refused(replica_config)
    assert error.id == "hbm-exhausted"
    assert f"is full after 1 of the length buckets of {tmp_path / 'model'}, each with 0 MiB of weights" in error.what
    assert failure_of("load-failed", error, "the load", replica_config).reaction is Reaction.STOP


def test_a_trace_that_has_lost_its_mask_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """transformers leaves the mask out where the example has no padding, and a trace keeps that for all inputs."""
    save_encoder(tmp_path / "model", "bert", num_hidden_layers=1)
    types = ("Transformer", "Pooling")
    modules = [
        {"path": f"{i}_{name}" * i, "type": f"sentence_transformers.models.{name}"} for i, name in enumerate(types)
    ]
    (tmp_path / "model" / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "model" / "1_Pooling").mkdir()
    (tmp_path / "model" / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
    replica_config = config(tmp_path / "model", tmp_path, prefill_buckets=[20])
    loaded(changed(replica_config, compiled=str(tmp_path / "right")))

    def full(tracing: Tracing, length: int) -> Any:
        return tracing.inputs([EncodeInput([5] * length)] * tracing.batch, length)

    monkeypatch.setattr(Tracing, "example", full)
    error = refused(replica_config)
    assert error.id == "trace-deviates"
    assert error.what.startswith(f"the trace of 20 tokens of {tmp_path / 'model'} differs from the CPU by ")


@pytest.mark.parametrize(
    ("family", "kind", "why"),
    [
        ("deberta-v2", "rerank", "AWS documents no trace of it"),
        ("modernbert", "embedding", "AWS documents no trace of it"),
        ("qwen3", "embedding", "AWS documents no trace of a decoder that gives embeddings"),
    ],
)
def test_families_without_a_documented_trace_are_refused_with_the_reason(
    family: str, kind: str, why: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    error = refused(config(tmp_path, tmp_path, kind=kind))
    assert error.id == "unknown-family"
    assert error.what.endswith(f"config.json: {why}")


def _stand_in() -> tuple[Any, Any, tuple[Any, ...]]:
    """Returns the stand-in, a trace that is not on a core yet, and its example."""
    stand_in: Any = importlib.import_module("torch_neuronx")
    example = (torch.zeros(2, 4),)
    options = {"compiler_args": ["--target", "trn1"], "cpu_backend": True, "inline_weights_to_neff": False}
    return stand_in, stand_in.trace(torch.nn.Linear(4, 3), example, **options), example


def test_the_stand_in_refuses_what_the_documentation_does() -> None:
    """Keywords, shapes, types, cores; also what costs time only: weights that are not on the core."""
    stand_in, trace, example = _stand_in()
    with pytest.raises(TypeError, match="dynamic_batch_size"):
        stand_in.trace(torch.nn.Linear(4, 3), example, dynamic_batch_size=True)
    with pytest.raises(TypeError, match="positional"):
        stand_in.trace(torch.nn.Linear(4, 3), example, {}, None)
    with pytest.raises(ValueError, match="--target"):
        stand_in.trace(torch.nn.Linear(4, 3), example, cpu_backend=True)
    with pytest.raises(RuntimeError, match="unrecognized arguments: --fast"):
        stand_in.trace(torch.nn.Linear(4, 3), example, compiler_args="--target trn1 --fast", cpu_backend=True)
    with pytest.raises(RuntimeError, match="not on the core"):
        trace(*example)
    with pytest.raises(RuntimeError, match="Could not find VNC id 1"):
        stand_in.move_trace_to_device(trace, 1)
    stand_in.move_trace_to_device(trace, 0)
    assert trace(*example).shape == (2, 3)
    with pytest.raises(ValueError, match="without dynamic batching"):
        trace(torch.zeros(3, 4))
    assert stand_in.dynamic_batch(trace)(torch.zeros(5, 4)).shape == (5, 3)
    with pytest.raises(ValueError, match="has the shape"):
        trace(torch.zeros(2, 5))
    with pytest.raises(RuntimeError, match=r"torch\.float64"):
        trace(torch.zeros(2, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="other names"):
        stand_in.replace_weights(trace, {"weight": torch.zeros(3, 4)})
    with pytest.raises(ValueError, match="bias is"):
        stand_in.replace_weights(trace, {"weight": torch.zeros(3, 4), "bias": torch.zeros(4)})


def test_a_saved_trace_is_loaded_only_where_the_package_is_imported(tmp_path: Path) -> None:
    """It is then on a core at once, in turn over all cores of the process."""
    plain = torch.jit.load
    _, trace, _ = _stand_in()
    file = str(tmp_path / "trace.pt")
    torch.jit.save(trace, file)
    assert [torch.jit.load(file).core for _ in range(2)] == [0, 0]
    with pytest.raises(RuntimeError):
        plain(file)
