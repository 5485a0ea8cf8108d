"""`bench encoding` against a gateway with an encoder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator.bench.encoding import Texts
from orchestrator.bench.prompts import Prompts
from orchestrator.cli.main import run
from placements.facts.encoders import Kind
from tests.orchestrator.encoded import EncoderReplica
from tests.orchestrator.gateway.test_scores import OneScore
from tests.orchestrator.gateways import LiveGateway, routes

STEP_MS = 10.0


@pytest.fixture(scope="module")
def encoder() -> Iterator[EncoderReplica]:
    replica = EncoderReplica(OneScore(rows=8, max_len=512, step_ms=STEP_MS))
    yield replica
    replica.close()


def bench(gateway: LiveGateway, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, Any]:
    code = run(["bench", "encoding", "--url", gateway.url, "--model", "e", "-o", "json", *more])
    out = capsys.readouterr().out
    return code, json.loads(out) if out else None


@pytest.mark.parametrize(
    ("route", "kind"),
    [("embeddings", "embedding"), ("rerank", "rerank"), ("score", "rerank"), ("score", "embedding")],
)
def test_each_route_is_measured(
    route: str, kind: Kind, gateway: LiveGateway, encoder: EncoderReplica, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.serve(routes("e", encoder, kind=kind, max_len=512))
    load = ("--route", route, "--concurrency", "2", "--requests", "6", "--inputs", "3", "--words", "2:5")
    code, data = bench(gateway, capsys, *load)
    assert (code, data["ok"], data["sent"], data["errors"]) == (0, 6, 6, {})
    assert data["latency_ms"]["p50"] >= STEP_MS
    assert 18 / data["items_per_s"] == pytest.approx(data["duration_s"], abs=0.001)  # both are rounded
    assert data["tokens"] >= 18 * 5  # two words of two letters and a space


def test_a_model_of_another_kind_is_refused_with_the_servers_reason(
    gateway: LiveGateway, encoder: EncoderReplica, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.serve(routes("e", encoder, kind="embedding", max_len=512))
    assert run(["bench", "encoding", "--url", gateway.url, "--model", "e", "--route", "classify"]) == 1
    assert "bench-refused: /classify of" in capsys.readouterr().err


def test_the_same_seed_gives_the_same_texts() -> None:
    texts, prompts = Texts.parse(2, "3:9"), Prompts(1)
    assert texts.of(4, prompts, 1) == texts.of(4, Prompts(1), 1)
    assert {len(text.split()) for index in range(50) for text in texts.of(index, prompts, 1)} == set(range(3, 10))


@pytest.mark.parametrize("words", ["", "0", "5:2", "a:b", "3:", ":3"])
def test_invalid_words_are_rejected(words: str) -> None:
    with pytest.raises(ValueError, match="is not LEAST:MOST words"):
        Texts.parse(1, words)
