from __future__ import annotations

from typing import Any

import pytest
import torch

from workers.sampling import FULL_UP_TO, GREEDY_BELOW, _place, check_sampling, sample, start_sampling

LARGE = 5000  # ids: above FULL_UP_TO, and no multiple of the blocks
DRAWS = 4000


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def peaked(vocab_size: int) -> torch.Tensor:
    """Logits ``[vocab_size]`` with half of the probability on a few ids, as a real model's."""
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(7)) * 3


def flat(vocab_size: int) -> torch.Tensor:
    """Logits whose nucleus is far larger than any shortlist."""
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(8)) * 0.1


def transformers_probabilities(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    from transformers import TemperatureLogitsWarper, TopPLogitsWarper

    scores = TemperatureLogitsWarper(temperature)(None, logits[None])
    return (TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores).softmax(-1)[0]


def frequencies(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    rows = [start_sampling(temperature, top_p, seed) for seed in range(DRAWS)]
    counts = torch.zeros(len(logits))
    for first in range(0, DRAWS, 500):
        for token in sample(logits.expand(500, -1), rows[first : first + 500]):
            assert token is not None
            counts[token] += 1
    return counts / DRAWS


@pytest.mark.parametrize("vocab_size", [200, 512, LARGE])
@pytest.mark.parametrize("logits", [peaked, flat])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (0.8, 0.9), (1.5, 0.5), (1.0, 0.0)])
def test_the_distribution_is_that_of_transformers_on_the_full_vocabulary(
    vocab_size: int, logits: Any, temperature: float, top_p: float
) -> None:
    """For any vocabulary and shape, with and without top_p: the right ids, as often as they should come."""
    row = logits(vocab_size)
    expected = transformers_probabilities(row, temperature, top_p)
    found = frequencies(row, temperature, top_p)
    assert set(found.nonzero()[:, 0].tolist()) <= set(expected.nonzero()[:, 0].tolist())
    # Ids in 20 groups of about equal probability: five standard deviations in each.
    order = expected.argsort(descending=True)
    groups = (expected[order].cumsum(0) * 20).long().clamp(max=19)
    wanted = torch.zeros(20).index_add_(0, groups, expected[order])
    got = torch.zeros(20).index_add_(0, groups, found[order])
    deviation = (wanted * (1 - wanted) / DRAWS).clamp(min=0).sqrt()
    assert ((got - wanted).abs() <= 5 * deviation + 1e-6).all()


def test_greedy_takes_the_first_of_the_largest() -> None:
    """As generate does; bf16 logits often tie."""
    logits = torch.zeros(3, 300)
    logits[1, [17, 250]] = 1.0
    logits[2, 299] = 1.0
    assert sample(logits, [start_sampling(0.0, 1.0, None)] * 3) == [0, 17, 299]


@pytest.mark.parametrize("vocab_size", [512, LARGE])
def test_a_seed_draws_the_same_whatever_the_neighbours_draw(vocab_size: int) -> None:
    """A request alone and the same request among others of all kinds get the same tokens."""
    logits = peaked(vocab_size)
    kinds = [(0.8, 0.9), (0.0, 1.0), (0.8, 0.9), (1.0, 1.0), (0.8, 1.0)]
    alone = start_sampling(0.8, 0.9, 42)
    wanted = [sample(logits[None], [alone])[0] for _ in range(20)]
    batch = [start_sampling(*kind, seed=index) for index, kind in enumerate(kinds)] + [start_sampling(0.8, 0.9, 42)]
    assert [sample(logits.expand(6, -1), batch)[-1] for _ in range(20)] == wanted


def test_without_a_seed_requests_differ() -> None:
    """Two clients who ask the same at the same time do not get the same answer."""
    answers = []
    for _ in range(2):
        how = start_sampling(1.0, 1.0, None)
        answers.append([sample(flat(512)[None], [how])[0] for _ in range(20)])
    assert answers[0] != answers[1]


@pytest.mark.parametrize("vocab_size", [512, LARGE])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_no_number_yields_nothing_and_harms_no_other(
    vocab_size: int, bad: float, temperature: float
) -> None:
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
def test_a_point_on_a_boundary_belongs_to_an_id_that_can_come(point: float) -> None:
    """Random numbers may be exactly 0, or fall exactly between two ids."""
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.25, 0.5, 0.0]])
    index, into = _place(weights, torch.tensor([point], dtype=torch.float64))
    assert weights[0, index] > 0
    assert 0 <= into <= 1


def test_a_temperature_near_zero_is_greedy() -> None:
    """Dividing by it would overflow."""
    assert start_sampling(GREEDY_BELOW / 2, 1.0, 1).generator is None


@pytest.mark.parametrize("seed", [-(2**63), 0, 2**64 - 1])
def test_every_seed_of_the_range_works(seed: int) -> None:
    """What check_sampling lets pass, torch takes."""
    assert sample(torch.zeros(1, 8), [start_sampling(1.0, 1.0, seed)])[0] in range(8)


@pytest.mark.parametrize(
    ("temperature", "top_p", "seed"),
    [
        (-1.0, 1.0, None),
        (float("inf"), 1.0, None),
        (1.0, -0.1, None),
        (1.0, float("nan"), None),
        (1.0, 1.0, -(2**63) - 1),
    ],
)
def test_what_cannot_be_sampled_with_is_refused(temperature: float, top_p: float, seed: int | None) -> None:
    """A client's mistake is a ValueError before anything runs."""
    with pytest.raises(ValueError, match="must be"):
        check_sampling(temperature, top_p, seed)


def test_the_large_vocabulary_of_these_tests_is_large() -> None:
    """Otherwise the shortlist would go untested."""
    assert LARGE > FULL_UP_TO
