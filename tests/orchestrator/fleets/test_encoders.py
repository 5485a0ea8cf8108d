"""Two models that generate, an embedding model of four replicas and a reranker, on one emulated inf2.48xlarge."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.checkpoints import make_checkpoint
from tests.encoders import save_encoder, sentence_transformer, texts
from tests.fleet import LiveFleet, until
from tests.orchestrator.fleets.test_exact import generate, load, requests

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

CLOSE = 1e-5
PACE_S = 0.1  # between a client's requests: the machine also starts processes
UPDATED_S = 240.0
GENERATE = ("llama", "gpt2")
SPEC = """\
version: 1
hosts: {{emulate: inf2.48xlarge}}
defaults: {{engine: cpu, dtype: fp32, max_len: 128}}
models:
  llama: {{source: ./llama, tp_degree: 2}}
  gpt2: {{source: ./gpt2, tp_degree: 2}}
  embedder: {{source: ./{embedder}, kind: embedding, replicas: 4}}
  reranker: {{source: ./reranker, kind: rerank, update: {{strategy: surge}}}}
"""
TEXTS = texts(60)
QUERY = "w1 w2 w3"


class Client:
    """Sends one kind of request after the other until it is stopped, and keeps the answers."""

    def __init__(self, live: LiveFleet, route: str, body: Callable[[random.Random], dict[str, Any]]) -> None:
        self.answers: list[tuple[dict[str, Any], httpx.Response]] = []
        self._url, self._body = live.url + route, body
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> list[tuple[dict[str, Any], httpx.Response]]:
        """Returns the requests with their answers."""
        self._ended.set()
        self._thread.join(60.0)
        return self.answers

    def goes_on(self, count: int = 3) -> None:
        """Waits until so many further requests were answered with 200."""
        before = len(self.answers)
        until(lambda: sum(a.status_code == 200 for _, a in self.answers[before:]) >= count, 120.0, "it is answered")

    def _run(self) -> None:
        draw = random.Random(self._url)
        while not self._ended.wait(PACE_S):
            body = self._body(draw)
            self.answers.append((body, httpx.post(self._url, json=body, timeout=120.0)))


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveFleet]:
    from sentence_transformers.base.modules import Normalize

    for family in GENERATE:
        make_checkpoint(tmp_path / family, family, eos=None)
    for name, spread in (("first", 0.2), ("second", 0.4)):
        save_encoder(tmp_path / f"{name}-plain", "bert", initializer_range=spread)
        sentence_transformer(tmp_path / f"{name}-plain", "cls", Normalize()).save(str(tmp_path / name))
    save_encoder(tmp_path / "reranker", "xlm-roberta", labels=1)
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.format(embedder="first"))
    with LiveFleet(spec) as fleet:
        yield fleet.wait_ready(240.0)


def embed(draw: random.Random) -> dict[str, Any]:
    return {"model": "embedder", "input": draw.sample(TEXTS, draw.randint(1, 40))}


def rerank(draw: random.Random) -> dict[str, Any]:
    return {"model": "reranker", "query": QUERY, "documents": draw.sample(TEXTS, draw.randint(1, 20))}


def complete(model: str) -> Callable[[random.Random], dict[str, Any]]:
    def body(draw: random.Random) -> dict[str, Any]:
        ids, count = draw.choice(requests(1))
        fields = {"model": model, "prompt": ids, "max_tokens": count}
        return {**fields, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

    return body


def check_embeddings(folder: Path, answers: list[tuple[dict[str, Any], httpx.Response]]) -> None:
    """Each answer has the vectors of one version, the one in its header; both versions have answered."""
    import numpy
    from sentence_transformers import SentenceTransformer

    assert {answer.status_code for _, answer in answers} == {200}  # another replica has answered instead of a lost one
    models = [SentenceTransformer(str(folder / name), device="cpu") for name in ("first", "second")]
    expected = [dict(zip(TEXTS, model.encode(TEXTS), strict=True)) for model in models]
    seen = set()
    for body, answer in answers:
        vectors = numpy.array([row["embedding"] for row in answer.json()["data"]])
        errors = [abs(vectors - numpy.array([own[text] for text in body["input"]])).max() for own in expected]
        assert min(errors) < CLOSE
        assert max(errors) > 100 * CLOSE
        seen.add((answer.headers["x-corewright-model-version"], errors.index(min(errors))))
    assert sorted(version for _, version in seen) == [0, 1]
    assert len({header for header, _ in seen}) == 2


def check_scores(folder: Path, answers: list[tuple[dict[str, Any], httpx.Response]]) -> None:
    from sentence_transformers import CrossEncoder

    scores = CrossEncoder(str(folder / "reranker"), device="cpu").predict([(QUERY, text) for text in TEXTS])
    expected = dict(zip(TEXTS, scores, strict=True))
    for body, answer in answers:
        results = answer.json()["results"]
        assert sorted(result["index"] for result in results) == list(range(len(body["documents"])))
        for result in results:
            assert result["relevance_score"] == pytest.approx(expected[body["documents"][result["index"]]], abs=CLOSE)


def check_tokens(folder: Path, family: str, answers: list[tuple[dict[str, Any], httpx.Response]]) -> None:
    assert {answer.status_code for _, answer in answers} == {200}
    model, expected = load(folder / family), {}
    for body, answer in answers:
        key = tuple(body["prompt"])
        if key not in expected:
            expected[key] = generate(model, body["prompt"], body["max_tokens"], None)
        assert answer.json()["choices"][0]["token_ids"] == expected[key]


def test_three_kinds_of_traffic_survive_kills_and_a_rolling_update_and_stay_exact(live: LiveFleet) -> None:
    """A killed embedding replica costs no request, a killed reranker only those before its restart. During the update
    all vectors of an answer are of the version in its header."""
    folder = live.spec.parent
    embedding = [Client(live, "/v1/embeddings", embed) for _ in range(2)]
    generating = {family: Client(live, "/v1/completions", complete(family)) for family in GENERATE}
    reranking = Client(live, "/v1/rerank", rerank)
    clients = [*embedding, *generating.values(), reranking]
    for client in clients:
        client.goes_on()

    for killed in ("embedder/1", "reranker/0"):
        os.kill(live.replica(killed)["pid"], signal.SIGKILL)
    for client in clients:
        client.goes_on()
    until(lambda: live.replica("embedder/1")["state"] == "ready", UPDATED_S, "the killed replica is ready again")
    live.spec.write_text(SPEC.format(embedder="second"))
    applied = live.corewright("apply", str(live.spec), "--yes")
    assert applied.returncode == 0, applied.stdout + applied.stderr
    until(lambda: live.status()["rollout"]["state"] == "complete", UPDATED_S, "the update is complete")
    for client in clients:
        client.goes_on()

    check_embeddings(folder, [answer for client in embedding for answer in client.stop()])
    for family, client in generating.items():
        check_tokens(folder, family, client.stop())
    reranked = reranking.stop()
    check_scores(folder, [each for each in reranked if each[1].status_code == 200])
    assert {answer.status_code for _, answer in reranked} <= {200, 503}
    assert reranked[-1][1].status_code == 200
