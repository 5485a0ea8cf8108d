"""Judges answers and times against the claims. Pure: all measurements are arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from orchestrator.verify.claims import Verdict, not_run, proved
from placements.engines.capabilities import Dtype
from workers.serving.timed_answers import TimedAnswer

TOLERANCE: Mapping[Dtype, float] = {"fp32": 0.01, "fp16": 0.1, "bf16": 0.5}
"""By how much a log probability may differ from transformers' in float32, which read the same bfloat16 weights:
rounding gave up to 0.35 with the stand-ins of AWS's packages; a wrong position or mask gives several units."""
MAX_ROUTED = 0.05
"""The share of tokens that may differ by more in a type of two bytes: where two experts of a mixture are about equal,
rounding chooses the other one."""
MAX_STEP_RATIO = 1.1  # of the step of a pinned replica to that of an unpinned one
MAX_HOLD_RATIO = 1.5  # of the delay of other slots by a prefill, without two steps, to the time of the prefill alone
NOISE_S = 0.005  # by which the scheduler of a busy host delays a step
STEPS_BESIDE = 2  # decoding steps around a prefill, which a client sees as one gap


def first_difference(wanted: Sequence[int], got: Sequence[int]) -> str:
    """Returns where two answers differ; "" if they do not."""
    if list(wanted) == list(got):
        return ""
    at = next((i for i, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), min(len(wanted), len(got)))
    return f"token {at + 1} of {len(wanted)}"


def same_answers(claim: str, subject: str, pairs: Sequence[tuple[str, TimedAnswer, TimedAnswer]]) -> Verdict:
    """Returns whether answers that must be equal are; each pair has the name of its case."""
    differing = []
    for name, wanted, got in pairs:
        if got.error or wanted.error:
            differing.append(f"{name}: {got.error or wanted.error}")
        elif difference := first_difference(wanted.token_ids, got.token_ids):
            differing.append(f"{name} differs at {difference}")
    if not pairs:
        return not_run(claim, "no answers to compare", subject)
    return proved(claim, not differing, "; ".join(differing) or f"{len(pairs)} answers are equal", subject)


ScoredRow = tuple[TimedAnswer, Sequence[float], Sequence[float]]
"""An answer, and for each of its tokens the reference's log probability and that of the most probable token there."""


def scored(claim: str, subject: str, dtype: Dtype, rows: Sequence[ScoredRow]) -> Verdict:
    """Returns whether greedy answers are the most probable ones."""
    failed = [f"{answer.id}: {answer.error or answer.finish}" for answer, _, _ in rows if not answer.token_ids]
    behind = [top - each for _, own, best in rows for each, top in zip(own, best, strict=True)]
    holds, finding = _within(behind, dtype)
    finding = "; ".join(failed) or f"{len(behind)} tokens, {finding} less probable than the best"
    return proved(
        claim, holds and not failed, finding, subject, tokens=len(behind), worst=round(max(behind, default=0.0), 5)
    )


def same_logprobs(subject: str, dtype: Dtype, rows: Sequence[ScoredRow]) -> Verdict:
    """Returns whether the log probabilities in answers are the reference's."""
    off = [abs(a - b) for answer, own, _ in rows if answer.logprobs for a, b in zip(answer.logprobs, own, strict=True)]
    if not off:
        return not_run("logprobs", "the engine returns none", subject)
    holds, finding = _within(off, dtype)
    return proved("logprobs", holds, f"{len(off)} tokens differ by {finding}", subject, worst=round(max(off), 5))


def _within(differences: Sequence[float], dtype: Dtype) -> tuple[bool, str]:
    """Returns whether differences of log probabilities are those of rounding, and a text with the largest one."""
    beyond = sum(each > TOLERANCE[dtype] for each in differences)
    allowed = 0 if dtype == "fp32" else int(MAX_ROUTED * len(differences))
    finding = f"at most {max(differences, default=0.0):.3f} (allowed {TOLERANCE[dtype]}"
    return bool(differences) and beyond <= allowed, f"{finding}, {beyond} beyond it)" if beyond else f"{finding})"


def paces(answer: TimedAnswer) -> list[float]:
    """Returns the seconds between the events of an answer, from its first token on."""
    return [after - before for before, after in zip(answer.at, answer.at[1:], strict=False)]


def step_s(answers: Sequence[TimedAnswer]) -> float:
    """Returns the median seconds from token to token; 0.0 without two."""
    every = [pace for answer in answers for pace in paces(answer)]
    return median(every) if every else 0.0


def held_up(subject: str, length: int, alone: Sequence[float], gaps: Sequence[float], step: float) -> Verdict:
    """Returns whether prefills of ``length`` tokens stall another slot for their own time: ``gaps`` has the longest gap
    of its answer in each round, ``alone`` the times to the first token of such prompts; ``step`` is the median step. In
    seconds."""
    if not alone or not gaps:
        return not_run("held-up", "no answers to measure", subject)
    prefill, gap = median(alone), median(gaps)
    limit = MAX_HOLD_RATIO * prefill + STEPS_BESIDE * step + NOISE_S
    finding = f"{length} tokens: {1000 * gap:.1f} ms, a prefill alone takes {1000 * prefill:.1f} ms"
    return proved(
        "held-up",
        gap <= limit,
        finding,
        subject,
        tokens=length,
        gap_ms=round(1000 * gap, 3),
        alone_ms=round(1000 * prefill, 3),
    )


def pinned(claim: str, planned: float, others: float, where: str) -> Verdict:
    """Returns whether the planned CPUs cost speed, by the median steps of a replica on them and on others, in s."""
    if not planned or not others:
        return not_run(claim, "no steps to measure")
    ratio = planned / others
    finding = f"a step takes {1000 * planned:.2f} ms on its CPUs, {1000 * others:.2f} ms on {where}"
    return proved(claim, ratio <= MAX_STEP_RATIO, finding, ratio=round(ratio, 3))
