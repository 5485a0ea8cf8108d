from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from workers.batching.sampling import FULL_UP_TO, GREEDY_BELOW, SHORTLIST, Sampling, check_sampling, locate, sample
from workers.batching.sampling import start_sampling as start
from workers.messages.requests import GenerateRequest, InvalidField

LARGE = 4 * FULL_UP_TO + 904  # ids: beyond the full pass, and no multiple of the blocks
DRAWS = 2000


def request(prompt: Sequence[int] = (1,), max_tokens: int = 64, **fields: Any) -> GenerateRequest:
    return GenerateRequest(id="a", prompt_ids=list(prompt), max_tokens=max_tokens, **fields)


def start_sampling(temperature: float, top_p: float, seed: int | None, **fields: Any) -> Sampling:
    return start(request(temperature=temperature, top_p=top_p, seed=seed, **fields))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def peaked(vocab_size: int) -> torch.Tensor:
    """Logits ``[vocab_size]`` with half of the probability on a few ids, as a real model's."""
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(7)) * 3


def flat(vocab_size: int) -> torch.Tensor:
    """Logits whose nucleus is far larger than any shortlist."""
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(8)) * 0.1


def transformers_probabilities(logits: torch.Tensor, **how: Any) -> torch.Tensor:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = TemperatureLogitsWarper(how["temperature"])(None, logits[None])
    if how.get("top_k"):
        scores = TopKLogitsWarper(how["top_k"])(None, scores)
    if "top_p" in how:
        scores = TopPLogitsWarper(how["top_p"])(None, scores)
    if "min_p" in how:
        scores = MinPLogitsWarper(how["min_p"])(None, scores)  # type: ignore[arg-type]
    return scores.softmax(-1)[0]


def frequencies(logits: torch.Tensor, **how: Any) -> torch.Tensor:
    rows = [start(request(seed=seed, **how)) for seed in range(DRAWS)]
    counts = torch.zeros(len(logits))
    for first in range(0, DRAWS, 500):
        for token in sample(logits.expand(500, -1), rows[first : first + 500]):
            assert token is not None
            counts[token] += 1
    return counts / DRAWS


def assert_drawn_from(expected: torch.Tensor, drawn: torch.Tensor) -> None:
    assert set(drawn.nonzero()[:, 0].tolist()) <= set(expected.nonzero()[:, 0].tolist())
    # Ids in 20 groups of about equal probability: five standard deviations in each.
    order = expected.argsort(descending=True)
    groups = (expected[order].cumsum(0) * 20).long().clamp(max=19)
    shares = torch.zeros(20).index_add_(0, groups, expected[order])
    got = torch.zeros(20).index_add_(0, groups, drawn[order])
    deviation = (shares * (1 - shares) / DRAWS).clamp(min=0).sqrt()
    assert ((got - shares).abs() <= 5 * deviation + 1e-6).all()


@pytest.mark.parametrize(
    ("vocab_size", "logits"),
    [
        (512, peaked),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in ((512, flat), (LARGE, flat))),
        (LARGE, peaked),
    ],
)
@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.5, "top_p": 0.5},
        {"temperature": 1.0, "top_p": 0.0},
        {"temperature": 1.0, "top_k": 40},
        {"temperature": 1.2, "top_k": SHORTLIST, "top_p": 0.9},
        {"temperature": 1.0, "top_k": SHORTLIST + 50, "top_p": 0.95, "min_p": 0.01},
        {"temperature": 1.0, "top_k": 10**6},
        {"temperature": 0.9, "min_p": 0.1},
        {"temperature": 1.0, "top_p": 0.9, "min_p": 0.3},
    ],
    ids=str,
)
def test_the_distribution_is_that_of_transformers_on_the_full_vocabulary(
    vocab_size: int, logits: Any, how: dict[str, Any]
) -> None:
    """For any vocabulary and shape, and however it is cut: the right ids, as often as they should come."""
    row = logits(vocab_size)
    assert_drawn_from(transformers_probabilities(row, **how), frequencies(row, **how))


def test_ids_that_tie_for_the_lastlocate_of_top_k_are_all_kept() -> None:
    """As in transformers, also when there are more of them than the shortlist holds: bf16 logits often tie."""
    row = torch.zeros(LARGE)
    row[:10] = 8.0
    how = {"temperature": 1.0, "top_k": 20}
    expected = transformers_probabilities(row, **how)
    assert int((expected > 0).sum()) == LARGE
    assert_drawn_from(expected, frequencies(row, **how))


def test_greedy_takes_the_first_of_the_largest() -> None:
    """As generate does; bf16 logits often tie."""
    logits = torch.zeros(3, 300)
    logits[1, [17, 250]] = 1.0
    logits[2, 299] = 1.0
    assert sample(logits, [start_sampling(0.0, 1.0, None)] * 3) == [0, 17, 299]


@pytest.mark.parametrize("vocab_size", [512, LARGE])
def test_a_seeded_row_does_not_depend_on_other_rows(vocab_size: int) -> None:
    """A request alone and the same request among others of all kinds get the same tokens."""
    logits = peaked(vocab_size)
    kinds = [(0.8, 0.9), (0.0, 1.0), (0.8, 0.9), (1.0, 1.0), (0.8, 1.0)]
    alone = start_sampling(0.8, 0.9, 42)
    expected = [sample(logits[None], [alone])[0] for _ in range(20)]
    batch = [start_sampling(*kind, seed=index) for index, kind in enumerate(kinds)] + [start_sampling(0.8, 0.9, 42)]
    assert [sample(logits.expand(6, -1), batch)[-1] for _ in range(20)] == expected


def test_without_a_seed_requests_differ() -> None:
    """Two equal requests at the same time get different answers."""
    answers = []
    for _ in range(2):
        how = start_sampling(1.0, 1.0, None)
        answers.append([sample(flat(512)[None], [how])[0] for _ in range(20)])
    assert answers[0] != answers[1]


@pytest.mark.parametrize("vocab_size", [512, LARGE])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_nan_gives_no_token_and_changes_no_other(vocab_size: int, bad: float, temperature: float) -> None:
    """None for that row, a token for its neighbours."""
    logits = peaked(vocab_size).repeat(3, 1)
    logits[1, 5] = bad
    tokens = sample(logits, [start_sampling(temperature, 0.9, 1) for _ in range(3)])
    assert [token is None for token in tokens] == [False, True, False]


def test_masked_ids_are_never_drawn() -> None:
    """-inf is a legal logit: that id has probability 0, in every way of drawing."""
    for vocab_size in (512, LARGE):
        logits = torch.full((vocab_size,), float("-inf"))
        logits[[3, 260, vocab_size - 1]] = 0.0
        for top_p in (1.0, 0.99):
            rows = [start_sampling(1.0, top_p, seed) for seed in range(200)]
            assert set(sample(logits.expand(200, -1), rows)) == {3, 260, vocab_size - 1}


@pytest.mark.parametrize("point", [0.0, 0.25, 0.5, 1.0])
def test_a_point_on_a_boundary_belongs_to_an_id_of_nonzero_weight(point: float) -> None:
    """Random numbers may be exactly 0, or fall exactly between two ids."""
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.25, 0.5, 0.0]])
    index, into = locate(weights, torch.tensor([point], dtype=torch.float64))
    assert weights[0, index] > 0
    assert 0 <= into <= 1


def test_a_temperature_near_zero_is_greedy() -> None:
    """Dividing by it would overflow."""
    assert start_sampling(GREEDY_BELOW / 2, 1.0, 1).generator is None


@pytest.mark.parametrize("seed", [-(2**63), 0, 2**64 - 1])
def test_every_seed_of_the_range_works(seed: int) -> None:
    """What check_sampling lets pass, torch takes."""
    assert sample(torch.zeros(1, 8), [start_sampling(1.0, 1.0, seed)])[0] in range(8)


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -1.0}, "temperature must be a number from 0, not -1.0"),
        ({"temperature": INFINITY}, "temperature must be"),
        ({"temperature": NAN}, "temperature must be"),
        ({"top_p": -0.1}, "top_p must be from 0 to 1, not -0.1"),
        ({"top_p": NAN}, "top_p must be"),
        ({"seed": -(2**63) - 1}, "seed must be"),
        ({"top_k": -1}, "top_k must be at least 0, not -1"),
        ({"min_p": 1.5}, "min_p must be from 0 to 1, not 1.5"),
        ({"min_p": NAN}, "min_p must be"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be from 0.01 to 100, not 0.0"),
        ({"repetition_penalty": NAN}, "repetition_penalty must be"),
        ({"presence_penalty": 2.1}, "presence_penalty must be from -2 to 2, not 2.1"),
        ({"frequency_penalty": -INFINITY}, "frequency_penalty must be from -2 to 2"),
        ({"no_repeat_ngram_size": -2}, "no_repeat_ngram_size must be at least 0, not -2"),
        ({"logit_bias": {7: 101.0}}, "logit_bias of 7 must be from -100 to 100, not 101.0"),
        ({"logit_bias": {7: NAN}}, "logit_bias of 7 must be"),
        ({"logit_bias": {512: 1.0}}, "logit_bias must have ids inside the vocabulary of 512"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias must have ids"),
        ({"stop_token_ids": [512]}, "stop_token_ids must have ids inside the vocabulary of 512"),
        ({"min_tokens": 65}, "min_tokens must be from 0 to 64, not 65"),
        ({"min_tokens": -1}, "min_tokens must be"),
        ({"logprobs": 21}, "logprobs must be from 0 to 20, not 21"),
        ({"logprobs": -1}, "logprobs must be"),
    ],
    ids=str,
)
def test_invalid_sampling_parameters_are_refused(wrong: dict[str, Any], message: str) -> None:
    """A client's mistake is a ValueError with the number and its range before anything runs."""
    with pytest.raises(InvalidField, match=message) as refused:
        check_sampling(request(**wrong), 512)
    assert [refused.value.param] == list(wrong)


def test_the_limits_themselves_are_allowed() -> None:
    """Both ends of each range are valid, and sampling works with them."""
    for how in (
        {"top_p": 0.0, "min_p": 1.0, "repetition_penalty": 100.0, "presence_penalty": 2.0, "logit_bias": {0: 100.0}},
        {
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 0.01,
            "frequency_penalty": -2.0,
            "logit_bias": {511: -100.0},
        },
        {"min_tokens": 64, "logprobs": 20, "top_k": 2**40, "no_repeat_ngram_size": 2**40},
    ):
        check_sampling(request(**how), 512)
        row = start(request(seed=1, **how), frozenset({3}))
        assert all(sample(peaked(512)[None], [row])[0] is not None for _ in range(3))
