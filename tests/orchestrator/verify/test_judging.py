"""The verdicts of `corewright verify`: each claim is proved by values that agree with it, and refuted by others."""

from __future__ import annotations

import pytest

from orchestrator.verify.claims import CLAIMS
from orchestrator.verify.judging import (
    NOISE_S,
    TOLERANCE,
    ScoredRow,
    held_up,
    pinned,
    same_answers,
    same_logprobs,
    scored,
    step_s,
)
from placements.engines.capabilities import Dtype
from workers.serving.timed_answers import TimedAnswer


def answer(*tokens: int, logprobs: tuple[float, ...] = (), error: str = "", at: tuple[float, ...] = ()) -> TimedAnswer:
    return TimedAnswer(
        id="a", token_ids=list(tokens), logprobs=list(logprobs), at=list(at), finish="length", error=error
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_token_that_is_less_probable_than_the_best_by_more_than_rounding_refutes(dtype: Dtype) -> None:
    allowed = TOLERANCE[dtype]
    best = [-1.0, -2.0]
    for behind, result in ((0.0, "proved"), (0.9 * allowed, "proved"), (1.1 * allowed, "refuted")):
        verdict = scored("tokens", "llama", dtype, [(answer(5, 6), [-1.0, -2.0 - behind], best)])
        assert (verdict.claim, verdict.subject, verdict.result) == ("tokens", "llama", result)


@pytest.mark.parametrize(
    ("dtype", "count", "result"), [("bf16", 5, "proved"), ("bf16", 6, "refuted"), ("fp32", 1, "refuted")]
)
def test_rounding_may_choose_another_expert_for_few_tokens(dtype: Dtype, count: int, result: str) -> None:
    """One token in twenty may differ in a type of two bytes."""
    own = [-1.0] * (100 - count) + [-9.0] * count
    assert scored("tokens", "", dtype, [(answer(*range(100)), own, [-1.0] * 100)]).result == result


def test_a_log_probability_that_differs_from_the_reference_refutes() -> None:
    own = [-1.0, -2.0]
    for given, result in (((-1.0, -2.005), "proved"), ((-1.0, -2.5), "refuted"), ((), "not run")):
        verdict = same_logprobs("", "fp32", [(answer(5, 6, logprobs=given), own, own)])
        assert (verdict.claim, verdict.result) == ("logprobs", result)


def test_an_answer_without_tokens_refutes_also_beside_others() -> None:
    failed: ScoredRow = (answer(error="the engine failed"), [], [])
    for rows in ([failed], [failed, (answer(5), [-1.0], [-1.0])]):
        verdict = scored("tokens", "", "fp32", rows)
        assert (verdict.result, verdict.finding) == ("refuted", "a: the engine failed")
    assert scored("tokens", "", "fp32", []).result == "refuted"


def test_answers_that_differ_are_shown_with_the_first_token_that_does() -> None:
    verdict = same_answers("seed", "", [("one", answer(1, 2, 3), answer(1, 2, 4)), ("two", answer(1), answer(1))])
    assert (verdict.result, verdict.finding) == ("refuted", "one differs at token 3 of 3")
    shorter = same_answers("seed", "", [("one", answer(1, 2, 3), answer(1, 2))])
    assert (shorter.result, shorter.finding) == ("refuted", "one differs at token 3 of 3")
    assert same_answers("seed", "", [("one", answer(1), answer(1))]).result == "proved"
    assert same_answers("seed", "", []).result == "not run"


def test_a_prefill_delays_others_by_its_own_time_and_two_steps() -> None:
    limit = 1.5 * 0.1 + 2 * 0.01 + NOISE_S
    assert held_up("", 64, [0.1, 0.1, 5.0], [limit - 0.001], 0.01).result == "proved"
    assert held_up("", 64, [0.1, 0.1, 5.0], [limit + 0.001], 0.01).result == "refuted"
    assert held_up("", 64, [], [0.1], 0.01).result == "not run"


def test_cpus_that_make_a_replica_slower_refute_its_pinning() -> None:
    assert pinned("numa", 0.0105, 0.010, "all").result == "proved"
    assert pinned("numa", 0.0115, 0.010, "all").result == "refuted"
    assert pinned("numa", 0.0, 0.010, "all").result == "not run"


def test_a_step_is_the_median_time_between_tokens() -> None:
    assert step_s([answer(1, 2, 3, at=(0.5, 0.6, 0.9)), answer(1, 2, at=(9.0, 9.2))]) == pytest.approx(0.2)
    assert step_s([answer(1, at=(0.5,))]) == 0.0


def test_every_claim_is_named_by_its_own_id_and_part() -> None:
    assert all(claim.id == id for id, claim in CLAIMS.items())
    assert len({claim.text for claim in CLAIMS.values()}) == len(CLAIMS)
