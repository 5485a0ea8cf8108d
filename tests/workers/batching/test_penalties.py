"""Every parameter against transformers' ``generate``, on a model whose logits are the same to the last bit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import NoRepeatNGramLogitsProcessor

from tests.searches import search
from tests.workers.tables import TableEngine, answers, generated, table
from workers.batching.penalties import Ngrams
from workers.messages.requests import FinishReason, GenerateRequest

VOCAB = 257
MODEL = table(VOCAB)
EOS = 256
N = 24
PROMPTS = ([1, 2, 3, 1, 2, 3, 1], [200], [9, 9, 9, 8])


def request(id: str = "a", prompt: Any = PROMPTS[0], max_tokens: int = N, **fields: Any) -> GenerateRequest:
    return GenerateRequest(id=id, prompt_ids=list(prompt), max_tokens=max_tokens, **fields)


class OutputPenalties:
    """OpenAI's definition of presence and frequency penalty, written out."""

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for token, count in Counter(ids[0, self.prompt_length :].tolist()).items():
            scores[0, token] -= self.frequency * count + self.presence
        return scores


# By the names of GenerateRequest.
GRID: list[dict[str, Any]] = [
    repetition | ngram | bias | cut
    for repetition in ({}, {"repetition_penalty": 1.3})
    for ngram in ({}, {"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 3})
    for bias in ({}, {"logit_bias": {5: 8.0, 77: -20.0, 0: 2.5}})
    for cut in ({}, {"temperature": 0.7, "top_k": 20}, {"temperature": 1.4, "top_p": 0.8, "min_p": 0.02, "top_k": 100})
]


def as_generate(how: dict[str, Any]) -> dict[str, Any]:
    how = {"top_k": 0, "top_p": 1.0, "temperature": 1.0} | how
    bias = how.pop("logit_bias", None)
    return how | ({"sequence_bias": {(id,): value for id, value in bias.items()}} if bias else {})


@pytest.mark.parametrize("how", GRID, ids=str)
def test_a_seeded_answer_is_that_of_generate(how: dict[str, Any]) -> None:
    """The same seed and the same processors give the same ids."""
    for seed, prompt in enumerate(PROMPTS):
        expected = generated(MODEL, prompt, N, seed, **as_generate(how))
        assert answers(TableEngine(MODEL), [request(prompt=prompt, seed=seed, **how)]).ids("a") == expected


@pytest.mark.parametrize("how", [how for how in GRID if "temperature" not in how], ids=str)
def test_a_greedy_answer_is_that_of_generate(how: dict[str, Any]) -> None:
    """Temperature 0 is do_sample=False, with the same processors."""
    for prompt in PROMPTS:
        greedy = {name: value for name, value in as_generate(how).items() if name not in ("top_k", "top_p")}
        expected = generated(MODEL, prompt, N, None, **(greedy | {"temperature": None}))
        assert answers(TableEngine(MODEL), [request(prompt=prompt, temperature=0.0, **how)]).ids("a") == expected


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0.0), (0.0, 1.2), (-1.0, 0.5), (2.0, 2.0)])
@pytest.mark.parametrize("seed", [None, 3])
def test_presence_and_frequency_penalties_count_the_output_alone(
    presence: float, frequency: float, seed: int | None
) -> None:
    """They come where generate puts a custom processor: behind its own penalties, before the temperature."""
    how: dict[str, Any] = {"repetition_penalty": 1.2}
    own = [OutputPenalties(len(PROMPTS[0]), presence, frequency)]
    temperature = {"temperature": 0.9} if seed is not None else {}
    expected = generated(MODEL, PROMPTS[0], N, seed, own, top_k=0, **how, **temperature)  # type: ignore[arg-type]
    penalized = request(
        temperature=0.0 if seed is None else 0.9,
        seed=seed,
        presence_penalty=presence,
        frequency_penalty=frequency,
        **how,
    )
    assert answers(TableEngine(MODEL), [penalized]).ids("a") == expected


def eager(*ids: int) -> torch.Tensor:
    """A model that would produce one of ``ids`` at once."""
    model = MODEL.clone()
    model[:, list(ids)] += 30.0
    return model


@pytest.mark.parametrize("seed", [None, 1])
def test_no_eos_comes_before_min_tokens(seed: int | None) -> None:
    """As generate's min_new_tokens: so many tokens, then the EOS."""
    expected = generated(eager(EOS), PROMPTS[0], N, seed, eos=EOS, min_new_tokens=5, **({"top_k": 0} if seed else {}))  # type: ignore[arg-type]
    bounded = request(temperature=1.0 if seed else 0.0, seed=seed, min_tokens=5)
    got = answers(TableEngine(eager(EOS), eos=[EOS]), [bounded])
    assert (got.ids("a"), got.finish("a")) == (expected, FinishReason.STOP)
    assert len(expected) == 6


def test_no_stop_id_comes_before_min_tokens() -> None:
    """A stop id is suppressed like the EOS, as in vLLM."""
    got = answers(TableEngine(eager(70)), [request(temperature=0.0, min_tokens=7, stop_token_ids=[70])])
    assert (len(got.ids("a")), got.ids("a")[-1], got.finish("a")) == (8, 70, FinishReason.STOP)
    assert 70 not in got.ids("a")[:-1]


def test_an_ignored_eos_is_an_ordinary_token() -> None:
    """It neither ends the answer nor is it suppressed: what does not end the answer cannot end it too early."""
    got = answers(TableEngine(eager(EOS), eos=[EOS]), [request(temperature=0.0, min_tokens=5, ignore_eos=True)])
    assert got.ids("a") == [EOS] * N
    assert got.finish("a") is FinishReason.LENGTH


def test_a_stop_string_does_not_count_before_min_tokens() -> None:
    """vLLM's rule: a stop string ends the answer when a later token completes it, even if it began earlier."""
    plain = answers(TableEngine(chain()), [request(prompt=[96], temperature=0.0, max_tokens=20)])
    assert plain.text("a") == "abcabcabcabcabcabcab"
    for min_tokens, text in ((0, ""), (2, ""), (3, "abc"), (5, "abc"), (6, "abcabc")):
        bounded = request(prompt=[96], temperature=0.0, max_tokens=20, min_tokens=min_tokens, stop=["abc"])
        got = answers(TableEngine(chain()), [bounded])
        assert (got.text("a"), got.finish("a")) == (text, FinishReason.STOP)


def chain() -> torch.Tensor:
    """A model that produces abcabcabc..."""
    model = torch.zeros(VOCAB, VOCAB)
    for last, following in ((96, 97), (97, 98), (98, 99), (99, 97)):
        model[last, following] = 10.0
    return model


def test_an_answer_without_a_possible_token_ends_with_an_error() -> None:
    """No n-gram of one token may come again, so the vocabulary is soon used up."""
    small = table(6)
    got = answers(TableEngine(small), [request(prompt=[0, 1], temperature=0.0, max_tokens=9, no_repeat_ngram_size=1)])
    assert sorted(got.ids("a")) == [2, 3, 4, 5]
    assert got.finish("a") is FinishReason.ERROR
    assert "forbid every id" in str(got.of("a")[-1].error)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 5))
def test_the_banned_tokens_are_those_of_transformers(ids: list[int], size: int) -> None:
    """N-grams recorded token by token ban the same tokens as transformers' search through all ids."""
    ngrams = Ngrams(size, ids[: len(ids) // 2])
    for token in ids[len(ids) // 2 :]:
        ngrams.add(token)
    scores = NoRepeatNGramLogitsProcessor(size)(torch.tensor([ids]), torch.zeros(1, 6))
    assert ngrams.repeating() == set((scores[0] == float("-inf")).nonzero()[:, 0].tolist())


LARGE = table(3000, spread=2.0)[:64]


def parameters(vocab_size: int) -> st.SearchStrategy[dict[str, Any]]:
    ids = st.integers(0, vocab_size - 1)
    return st.fixed_dictionaries(
        {"prompt": st.lists(ids, min_size=1, max_size=12), "max_tokens": st.integers(1, 12)},
        optional={
            "temperature": st.sampled_from([0.0, 0.7, 1.0, 3.0]),
            "top_k": st.sampled_from([1, 5, 256, 300, 10**6]),
            "top_p": st.floats(0, 1),
            "min_p": st.floats(0, 1),
            "repetition_penalty": st.floats(0.5, 3),
            "presence_penalty": st.floats(-2, 2),
            "frequency_penalty": st.floats(-2, 2),
            "no_repeat_ngram_size": st.integers(0, 4),
            "logit_bias": st.dictionaries(ids, st.floats(-100, 100), max_size=5),
            "min_tokens": st.just(1),
            "stop_token_ids": st.lists(ids, max_size=3),
            "stop": st.lists(st.sampled_from(["a", "ab", "\n"]), max_size=2),
            "ignore_eos": st.booleans(),
            "logprobs": st.integers(0, 5),
        },
    )


@pytest.mark.parametrize("model", [MODEL, pytest.param(LARGE, marks=pytest.mark.slow)], ids=["257 ids", "3000 ids"])
@search(20)
@given(data=st.data())
def test_a_mixed_batch_answers_each_request_as_alone(model: torch.Tensor, data: st.DataObject) -> None:
    """Token for token, text and logprobs included, through fewer slots than requests."""
    mix = data.draw(st.lists(parameters(model.shape[1]), min_size=2, max_size=7))
    requests = [request(str(index), seed=index, **how) for index, how in enumerate(mix)]
    engine = TableEngine(model, slots=4, eos=[EOS])
    together = answers(engine, requests)
    for single in requests:
        assert together.of(single.id) == answers(engine, [single]).of(single.id)
