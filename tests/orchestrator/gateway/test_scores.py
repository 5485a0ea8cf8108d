"""Reranking, scores and classes through a real gateway and data plane, in the shapes that clients of others expect."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from orchestrator.gateway.openai.answers import ClassificationList, Ranking, ScoreList
from tests.encoders import TYPED, texts
from tests.orchestrator.encoded import EncoderReplica
from tests.orchestrator.gateways import VERSION, LiveGateway, routes
from workers.engines.echo.engine import EchoEncoder, echo_vector
from workers.messages.encoder_protocol import EncodeInput

MAX_LEN = 64
QUERY, DOCUMENTS = "what", ["one", "two", "three", "four"]


@pytest.fixture(scope="module")
def served() -> Iterator[LiveGateway]:
    ranks, classes = EncoderReplica(EchoEncoder(8, MAX_LEN, width=1)), EncoderReplica()
    gateway = LiveGateway()
    gateway.serve(
        routes("r", ranks, kind="rerank", max_len=MAX_LEN),
        routes("c", classes, kind="classification", max_len=MAX_LEN),
        routes("e", classes, kind="embedding", max_len=MAX_LEN),
        routes("wide", classes, kind="rerank", max_len=MAX_LEN),
    )
    yield gateway
    gateway.close()
    ranks.close()
    classes.close()


def ask(gateway: LiveGateway, path: str, model: str, **fields: Any) -> httpx.Response:
    return gateway.http.post(path, json={"model": model, **fields})


def of(first: str, second: str) -> float:
    return echo_vector(EncodeInput([*first.encode(), *second.encode()], second=len(first.encode())), 1)[0]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_sorted_by_their_scores(served: LiveGateway, path: str) -> None:
    answer = ask(served, path, "r", query=QUERY, documents=DOCUMENTS)

    assert answer.status_code == 200
    results = answer.json()["results"]
    scores = {place: of(QUERY, text) for place, text in enumerate(DOCUMENTS)}
    assert [item["index"] for item in results] == sorted(scores, key=lambda place: -scores[place])
    assert {item["index"]: item["relevance_score"] for item in results} == scores
    assert answer.json()["usage"]["total_tokens"] == sum(len(QUERY) + len(text) for text in DOCUMENTS)
    assert answer.headers["x-corewright-model-version"] == VERSION
    msgspec.json.decode(answer.content, type=Ranking)


def test_the_best_documents_come_with_their_texts_on_request(served: LiveGateway) -> None:
    documents = [DOCUMENTS[0], *({"text": text, "title": "t"} for text in DOCUMENTS[1:])]
    whole = ask(served, "/v1/rerank", "r", query=QUERY, documents=DOCUMENTS).json()["results"]
    best = ask(served, "/v1/rerank", "r", query=QUERY, documents=documents, top_n=2, return_documents=True)
    assert best.json()["results"] == [{**item, "document": {"text": DOCUMENTS[item["index"]]}} for item in whole[:2]]
    many = ask(served, "/v1/rerank", "r", query=QUERY, documents=DOCUMENTS, top_n=9).json()
    assert many["results"] == whole


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("a", "b", [("a", "b")]),
        ("a", ["b", "cc"], [("a", "b"), ("a", "cc")]),
        (["a"], ["b", "cc"], [("a", "b"), ("a", "cc")]),
        (["a", "d"], ["b", "cc"], [("a", "b"), ("d", "cc")]),
    ],
)
@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_are_those_of_the_pairs_in_order(
    served: LiveGateway, path: str, first: Any, second: Any, pairs: list[tuple[str, str]]
) -> None:
    answer = ask(served, path, "r", text_1=first, text_2=second)
    body = msgspec.json.decode(answer.content, type=ScoreList)
    assert [(item.index, item.score) for item in body.data] == [(i, of(*pair)) for i, pair in enumerate(pairs)]


def test_coheres_client_reranks_and_reads_the_scores(served: LiveGateway) -> None:
    """By its route /v2/rerank."""
    import cohere

    client = cohere.ClientV2(api_key="none", base_url=served.url)
    answer = client.rerank(model="r", query=QUERY, documents=DOCUMENTS, top_n=2)

    best = sorted(range(len(DOCUMENTS)), key=lambda place: -of(QUERY, DOCUMENTS[place]))[:2]
    given = [(place, of(QUERY, DOCUMENTS[place])) for place in best]
    assert [(item.index, item.relevance_score) for item in answer.results] == given


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("a", "b", [("a", "b")]),
        ("a", ["b", "a"], [("a", "b"), ("a", "a")]),
        (["a", "d"], ["b", "d"], [("a", "b"), ("d", "d")]),
    ],
)
def test_scores_of_an_embedding_model_are_the_cosines_of_its_vectors(
    served: LiveGateway, first: Any, second: Any, pairs: list[tuple[str, str]]
) -> None:
    """Of the vectors that /v1/embeddings gives; equal texts have the score 1."""
    answer = ask(served, "/score", "e", text_1=first, text_2=second)

    def vector(text: str) -> list[float]:
        numbers: list[float] = ask(served, "/v1/embeddings", "e", input=text).json()["data"][0]["embedding"]
        return [number / math.hypot(*numbers) for number in numbers]

    expected = [sum(map(operator.mul, vector(one), vector(other))) for one, other in pairs]
    assert [item["score"] for item in answer.json()["data"]] == pytest.approx(expected, abs=1e-9)
    assert all(score == pytest.approx(1) for score, (one, other) in zip(expected, pairs, strict=True) if one == other)


def test_a_text_that_is_too_long_for_an_embedding_model_is_named_in_its_field(served: LiveGateway) -> None:
    long = "x" * (MAX_LEN + 1)
    for fields, where in (
        ({"text_1": long, "text_2": ["a", "b"]}, "text_1[0] has"),
        ({"text_1": "a", "text_2": ["b", long]}, "text_2[1] has"),
    ):
        answer = ask(served, "/score", "e", **fields)
        assert (answer.status_code, where in answer.json()["error"]["message"]) == (400, True)


def test_documents_are_cut_after_their_own_tokens(served: LiveGateway) -> None:
    """As Cohere's max_tokens_per_doc: the query is not cut."""
    given = {"query": QUERY, "documents": ["one" + "x" * MAX_LEN, "tw"], "max_tokens_per_doc": 3}
    results = ask(served, "/v2/rerank", "r", **given).json()["results"]
    scores = {item["index"]: item["relevance_score"] for item in results}
    assert scores == {0: of(QUERY, "one"), 1: of(QUERY, "tw")}


def test_a_class_has_the_label_of_its_highest_number(served: LiveGateway) -> None:
    answer = ask(served, "/classify", "c", input=["a", "bb"])
    body = msgspec.json.decode(answer.content, type=ClassificationList)
    for item, text in zip(body.data, ["a", "bb"], strict=True):
        expected = echo_vector(EncodeInput([*text.encode()]))
        assert tuple(item.probs) == expected
        assert item.label == f"LABEL_{expected.index(max(expected))}"
        assert item.num_classes == len(expected)
    assert len(ask(served, "/classify", "c", input="a").json()["data"]) == 1


@pytest.mark.parametrize(
    ("path", "model", "fields", "param", "words"),
    [
        ("/rerank", "r", {"query": "", "documents": ["a"]}, "query", "query is empty"),
        ("/rerank", "r", {"query": "a", "documents": []}, "documents", "documents is empty"),
        ("/rerank", "r", {"query": "a", "documents": ["b"] * 2049}, "documents", "2049 texts exceed"),
        ("/rerank", "r", {"query": "a", "documents": ["b", {}]}, "documents[1].text", "you must provide"),
        ("/rerank", "r", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "0 is out of range"),
        ("/rerank", "r", {"query": "a", "documents": ["b", "c" * 64]}, "documents", "documents[1] has 65"),
        ("/rerank", "wide", {"query": "a", "documents": ["b"]}, "model", "gives 8 numbers for a pair"),
        ("/score", "r", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "text_1 must have 1, or as many"),
        ("/score", "r", {"text_1": "a"}, "text_2", "you must provide 'text_2'"),
        ("/classify", "c", {"input": [1, 2]}, "input[0]", "got int"),
    ],
)
def test_a_wrong_field_is_named(
    served: LiveGateway, path: str, model: str, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = ask(served, path, model, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in error["message"]


# With tokenizers and models of real formats


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_scores_are_those_of_a_cross_encoder(family: str, tmp_path: Path) -> None:
    """With token types where the family has them, and pairs cut as it cuts them."""
    pytest.importorskip("torch")
    from sentence_transformers import CrossEncoder

    from tests.encoders import save_encoder
    from workers.engines.cpu.encoder import CpuEncoder

    save_encoder(tmp_path, family, labels=1, **({"type_vocab_size": 2} if family in TYPED else {}))
    replica, gateway = EncoderReplica(CpuEncoder(tmp_path, kind="rerank", rows=4, max_len=20)), LiveGateway()
    try:
        gateway.serve(routes("r", replica, kind="rerank", engine="cpu", source=str(tmp_path), max_len=20))
        query, documents = "w1 w2 w3", texts(9)
        model = CrossEncoder(str(tmp_path), device="cpu", max_length=20)
        expected = model.predict([(query, text) for text in documents]).tolist()
        answer = ask(gateway, "/score", "r", text_1=query, text_2=documents, truncate=True)
        assert [item["score"] for item in answer.json()["data"]] == pytest.approx(expected, abs=1e-5)
        ranked = ask(gateway, "/rerank", "r", query=query, documents=documents, truncate=True).json()["results"]
        assert [item["index"] for item in ranked] == [item["corpus_id"] for item in model.rank(query, documents)]
    finally:
        gateway.close()
        replica.close()


def test_classes_are_those_of_transformers_pipeline(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from transformers import pipeline

    from tests.encoders import save_encoder
    from workers.engines.cpu.encoder import CpuEncoder

    save_encoder(tmp_path, "bert", labels=3, id2label={0: "bad", 1: "fair", 2: "good"})
    replica, gateway = EncoderReplica(CpuEncoder(tmp_path, kind="classification", rows=4, max_len=64)), LiveGateway()
    try:
        gateway.serve(routes("c", replica, kind="classification", engine="cpu", source=str(tmp_path), max_len=64))
        pipe: Any = pipeline("text-classification", model=str(tmp_path))
        answer = ask(gateway, "/classify", "c", input=texts(6))
        for item, expected in zip(answer.json()["data"], pipe(texts(6)), strict=True):
            assert item["label"] == expected["label"]
            assert max(item["probs"]) == pytest.approx(expected["score"], abs=1e-5)
    finally:
        gateway.close()
        replica.close()
