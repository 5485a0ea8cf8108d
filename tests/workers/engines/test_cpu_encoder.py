"""The CPU engine's embeddings and scores are those of sentence-transformers and transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.encoders import DECODERS, FAMILIES, HIDDEN, TYPED, save_encoder, sentence_transformer, texts
from workers.engines.cpu.encoder import CpuEncoder
from workers.messages.encoder_protocol import EncodeInput, EncoderKind
from workers.messages.engine_protocol import EngineLoadError

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
CLOSE = 1e-5

POOLINGS: tuple[Any, ...] = (
    "mean",
    "cls",
    "max",
    "mean_sqrt_len_tokens",
    "weightedmean",
    "lasttoken",
    ("cls", "mean"),
)


def _loaded(folder: Path, kind: EncoderKind = "embedding", **options: Any) -> CpuEncoder:
    engine = CpuEncoder(folder, kind=kind, rows=32, max_len=64, **options)
    engine.load()
    return engine


def _inputs(tokenizer: Any, given: list[str]) -> list[EncodeInput]:
    return [EncodeInput(tokenizer(text)["input_ids"]) for text in given]


def _pairs(tokenizer: Any, given: list[tuple[str, str]]) -> list[EncodeInput]:
    read = [tokenizer(*pair) for pair in given]
    return [
        EncodeInput(one["input_ids"], one["token_type_ids"].index(1) if "token_type_ids" in one else 0) for one in read
    ]


@pytest.mark.parametrize("family", [*FAMILIES, *DECODERS])
def test_a_plain_checkpoint_gives_the_vectors_of_sentence_transformers_alone_and_in_ragged_batches(
    family: str, tmp_path: Path
) -> None:
    tokenizer = save_encoder(tmp_path, family)
    given = texts(17)
    expected = sentence_transformer(tmp_path, "mean").encode(given)
    engine = _loaded(tmp_path)
    inputs = _inputs(tokenizer, given)
    assert np.abs(engine.encode(inputs) - expected).max() < CLOSE
    alone = np.concatenate([engine.encode([input]) for input in inputs])
    assert np.abs(alone - expected).max() < CLOSE
    assert np.abs(expected[0] - expected[1]).max() > 100 * CLOSE  # else any vectors would pass


@pytest.mark.parametrize("pooling", POOLINGS, ids=str)
@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_a_folder_of_sentence_transformers_brings_its_pooling_and_what_follows(
    family: str, pooling: Any, tmp_path: Path
) -> None:
    from sentence_transformers.base.modules import Dense, Normalize

    tokenizer = save_encoder(tmp_path / "plain", family)
    after = [] if isinstance(pooling, tuple) else [Dense(HIDDEN, 24)]
    model = sentence_transformer(tmp_path / "plain", pooling, *after, Normalize())
    model.save(str(tmp_path / "saved"))
    given = texts(9)
    vectors = _loaded(tmp_path / "saved").encode(_inputs(tokenizer, given))
    assert vectors.shape == (9, 24 if after else 2 * HIDDEN)
    assert np.abs(vectors - model.encode(given)).max() < CLOSE


def test_tokens_of_a_prompt_are_left_out_of_the_pooling_where_the_folder_says_so(tmp_path: Path) -> None:
    from sentence_transformers.sentence_transformer.modules import Pooling

    tokenizer = save_encoder(tmp_path / "plain", "bert")
    model = sentence_transformer(tmp_path / "plain", "mean")
    model[1] = Pooling(HIDDEN, "mean", include_prompt=False)
    model.save(str(tmp_path / "saved"))
    given, prompt = texts(5), "w1 w2 w3 "
    expected = model.encode(given, prompt=prompt)
    inputs = [EncodeInput(tokenizer(prompt + text)["input_ids"], prompt=4) for text in given]  # [CLS] and three words
    assert np.abs(_loaded(tmp_path / "saved").encode(inputs) - expected).max() < CLOSE


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reranker_gives_the_scores_of_a_cross_encoder(family: str, tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    tokenizer = save_encoder(tmp_path, family, labels=1, **({"type_vocab_size": 2} if family in TYPED else {}))
    pairs = list(zip(texts(9, seed=1), texts(9, seed=2), strict=True))
    scores = _loaded(tmp_path, "rerank").encode(_pairs(tokenizer, pairs))
    assert scores.shape == (9, 1)
    assert np.abs(scores[:, 0] - CrossEncoder(str(tmp_path), device="cpu").predict(pairs)).max() < CLOSE


@pytest.mark.parametrize(("labels", "problem"), [(3, None), (3, "multi_label_classification"), (1, None)])
def test_classes_have_the_scores_of_transformers_pipeline(labels: int, problem: str | None, tmp_path: Path) -> None:
    from transformers import pipeline

    names = {i: f"label {i}" for i in range(labels)}
    tokenizer = save_encoder(tmp_path, "bert", labels=labels, id2label=names, problem_type=problem)
    engine, given = _loaded(tmp_path, "classification"), texts(5)
    assert engine.spec.labels == tuple(names.values())
    pipe: Any = pipeline("text-classification", model=str(tmp_path), top_k=None)
    for row, answer in zip(engine.encode(_inputs(tokenizer, given)), pipe(given), strict=True):
        by_name = {part["label"]: part["score"] for part in answer}
        assert row == pytest.approx([by_name[name] for name in names.values()], abs=CLOSE)


def _set(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_module_that_would_change_the_vectors_is_refused_by_name(tmp_path: Path) -> None:
    save_encoder(tmp_path / "plain", "bert")
    from sentence_transformers.base.modules import Dense

    sentence_transformer(tmp_path / "plain", "mean", Dense(HIDDEN, 24)).save(str(tmp_path))
    dense = tmp_path / "2_Dense" / "config.json"
    _set(dense, activation_function="os.system")
    with pytest.raises(EngineLoadError, match=r"its activation os\.system is not supported"):
        _loaded(tmp_path)
    _set(dense, activation_function="torch.nn.modules.activation.Tanh", use_residual=True)
    with pytest.raises(EngineLoadError, match="residual"):
        _loaded(tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[2]["type"] = "sentence_transformers.models.LSTM"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(EngineLoadError, match="'LSTM' is not supported after the pooling") as caught:
        _loaded(tmp_path)
    assert caught.value.id == "encoder-unsupported"
    (tmp_path / "modules.json").write_text("[")
    with pytest.raises(EngineLoadError, match=r"modules\.json cannot be read") as caught:
        _loaded(tmp_path)
    assert caught.value.id == "encoder-unreadable"


def test_inputs_are_no_longer_than_the_positions_that_roberta_can_use(tmp_path: Path) -> None:
    save_encoder(tmp_path, "roberta", max_position_embeddings=65)
    with pytest.raises(EngineLoadError, match="max_len 64 exceeds the 63 positions"):
        _loaded(tmp_path)


def test_a_reranker_without_its_head_is_refused_and_not_filled_with_random_weights(tmp_path: Path) -> None:
    save_encoder(tmp_path, "bert")
    _set(tmp_path / "config.json", num_labels=1)
    with pytest.raises(EngineLoadError, match="is missing weights") as caught:
        _loaded(tmp_path, "rerank")
    assert caught.value.id == "weights-mismatch"
