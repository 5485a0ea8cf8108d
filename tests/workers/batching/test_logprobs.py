from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.workers.tables import TableEngine, answers, table
from workers.batching.logprobs import IMPOSSIBLE, token_logprobs
from workers.messages.requests import GenerateRequest, TokenLogprobs
from workers.text.tokenizer import ByteTokenizer

MODEL = table(257)


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"id": "a", "prompt_ids": [65], "max_tokens": 12, **fields})


def logprobs_of(single: GenerateRequest, model: torch.Tensor = MODEL) -> list[tuple[int, TokenLogprobs]]:
    got = answers(TableEngine(model), [single])
    values = [logprobs for event in got.of("a") for logprobs in event.logprobs]
    return list(zip(got.ids("a"), values, strict=True))


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.0},
        {"temperature": 2.0, "seed": 1, "top_k": 3},
        {"temperature": 0.3, "seed": 1, "repetition_penalty": 2.0, "presence_penalty": 2.0},
        {"temperature": 0.0, "logit_bias": {9: 100.0}},
    ],
    ids=str,
)
def test_each_token_comes_with_the_models_own_logprobs(how: dict[str, Any]) -> None:
    """They are of the distribution before temperature, penalties, bias and cuts; the best ids are sorted."""
    before = 65
    for token, logprobs in logprobs_of(request(logprobs=4, **how)):
        raw = MODEL[before].log_softmax(-1)
        best = raw.topk(4)
        assert (logprobs.id, logprobs.logprob) == (token, float(raw[token]))
        assert [(id, logprob) for id, logprob, _, _ in logprobs.top] == list(
            zip(best.indices.tolist(), best.values.tolist(), strict=True)
        )
        before = token


def test_tokens_come_with_their_own_text_and_bytes() -> None:
    """A byte that is no character by itself shows as U+FFFD, and its number is kept."""
    logits = torch.zeros(1, 257)
    logits[0, 0xC3], logits[0, 0x41] = 5.0, 4.0
    (logprobs,) = token_logprobs(logits, [0xC3], [2], ByteTokenizer().token_bytes)
    assert logprobs is not None
    assert (logprobs.text, logprobs.bytes) == ("�", [0xC3])
    assert logprobs.top[1][2:] == ("A", [0x41])


def test_logprobs_0_covers_the_chosen_token_alone() -> None:
    """Requests without logprobs pay nothing for them."""
    assert [event.logprobs for event in answers(TableEngine(MODEL), [request(seed=1)]).of("a")] == [[]] * 12
    assert [logprobs.top for _, logprobs in logprobs_of(request(seed=1, logprobs=0))] == [[]] * 12


def test_equally_probable_ids_come_in_order_so_the_greedy_one_is_first() -> None:
    """bf16 logits often tie."""
    logits = torch.zeros(1, 257)
    (logprobs,) = token_logprobs(logits, [0], [3], ByteTokenizer().token_bytes)
    assert logprobs is not None
    assert [id for id, *_ in logprobs.top] == [0, 1, 2]
    assert logprobs.logprob == pytest.approx(-math.log(257))


def test_an_impossible_token_has_a_finite_logprob() -> None:
    """OpenAI's -9999."""
    logits = torch.full((1, 257), float("-inf"))
    logits[0, 3] = 0.0
    (logprobs,) = token_logprobs(logits, [3], [2], ByteTokenizer().token_bytes)
    assert logprobs is not None
    assert [logprob for _, logprob, _, _ in logprobs.top] == [0.0, IMPOSSIBLE]


def test_the_eos_has_logprobs_too() -> None:
    """One for each of token_ids, whatever the token is."""
    model = MODEL.clone()
    model[:, 256] = 50.0
    got = answers(TableEngine(model, eos=[256]), [request(logprobs=1, temperature=0.0)])
    assert [(event.token_ids, [logprobs.id for logprobs in event.logprobs]) for event in got.of("a")] == [
        ([256], [256])
    ]
