"""The requests of `corewright verify` to tiny models, and what their answers must be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from orchestrator.verify.claims import Verdict, not_run, proved
from orchestrator.verify.judging import ScoredRow, same_answers, same_logprobs, scored
from orchestrator.verify.stand import Stand, TrialRun
from orchestrator.verify.trials import BUCKETS, TOKENS, Extent
from workers.messages.requests import GenerateRequest
from workers.serving.timed_answers import TimedAnswer, TimedRequest

LONG = (512, 4096)  # tokens of long prompts
VARY = 37  # a prompt's ids, which all differ from their neighbours
FIRST_ID, IDS = 8, 480  # of the tokenizer's ordinary tokens


def prompt(length: int, seed: int = 0) -> list[int]:
    """Returns a prompt of so many token ids, which depend on the seed."""
    return [FIRST_ID + (seed * 101 + VARY * i + i * i) % IDS for i in range(length)]


def ask(id: str, ids: Sequence[int], tokens: int = TOKENS, *, after: int = 0, **fields: Any) -> TimedRequest:
    """Returns a request for so many tokens, greedy unless ``fields`` of GenerateRequest say otherwise; ``after``: as in
    `TimedRequest`."""
    settings = {"temperature": 0.0, **fields}
    request = GenerateRequest(id=id, prompt_ids=list(ids), max_tokens=tokens, ignore_eos=True, **settings)
    return TimedRequest(request=request, after=after)


@dataclass(frozen=True)
class _Scored:
    """An answer that the reference scores for a claim."""

    claim: str
    trial: str
    subject: str
    prompt: list[int]
    answer: TimedAnswer


def engines(stand: Stand, extent: Extent) -> Iterator[Verdict]:
    """Compares greedy answers with transformers', and sampled ones with each other."""
    answers: list[_Scored] = []
    for name in stand.trials:
        if name.startswith("family-"):
            yield from _family(stand, name, answers)
    yield from _long(stand, extent, answers)
    yield from _again(stand, answers)
    for claim, name in (("draft", "draft"), ("device-sampling", "sampled")):
        if name in stand.trials:
            sent = [_SentPrompt(claim, str(i), prompt(9, seed=i)) for i in range(3)]
            run = stand.run(name, [[ask(each.id, each.prompt, 24) for each in sent]])
            yield from _answered(run, name, sent, answers)
        else:
            yield not_run(claim, f"the engine {stand.engine} has no such setting")
    scores = stand.score([(each.trial, each.prompt, each.answer.token_ids) for each in answers])
    rows: dict[str, dict[str, list[ScoredRow]]] = {}  # by subject and claim
    dtypes = {each.subject: stand.placed(each.trial).config.dtype for each in answers}
    for each, own, best in zip(answers, scores.own, scores.best, strict=True):
        rows.setdefault(each.subject, {}).setdefault(each.claim, []).append((each.answer, own, best))
    for subject, by_claim in rows.items():
        yield from (scored(claim, subject, dtypes[subject], each) for claim, each in by_claim.items())
        if subject:
            yield same_logprobs(subject, dtypes[subject], [row for each in by_claim.values() for row in each])


class _SentPrompt(NamedTuple):
    """A prompt that was sent, by the id of its request."""

    claim: str
    id: str
    prompt: list[int]


def _answered(
    run: TrialRun, trial: str, sent: Sequence[_SentPrompt], answers: list[_Scored], subject: str = ""
) -> Iterator[Verdict]:
    """Adds the answers of a run, or yields that it has none."""
    if run.trouble:
        yield from (proved(claim, False, run.trouble, subject) for claim in dict.fromkeys(each.claim for each in sent))
        return
    answers += [_Scored(each.claim, trial, subject, each.prompt, run.answers[each.id]) for each in sent]


def _family(stand: Stand, name: str, answers: list[_Scored]) -> Iterator[Verdict]:
    """Asks prompts at the edges of buckets one by one, then all at once."""
    lengths = sorted({length + more for length in BUCKETS for more in (-1, 0, 1)} & set(range(1, BUCKETS[-1] + 1)))
    prompts = {length: prompt(length, seed=length) for length in lengths}
    sent = [
        *(
            _SentPrompt("tokens" if length in BUCKETS else "bucket-edges", f"{length}", ids)
            for length, ids in prompts.items()
        ),
        *(_SentPrompt("batch", f"{length} beside others", ids) for length, ids in prompts.items()),
    ]
    beside = [ask(each.id, each.prompt) for each in sent if each.claim == "batch"]
    alone = [each for each in sent if each.claim != "batch"]
    run = stand.run(name, [*([ask(each.id, each.prompt, logprobs=0)] for each in alone), beside])
    if not run.trouble and any(run.answers[each.id].error for each in alone):  # it gives no log probabilities
        run = stand.run(name, [*([ask(each.id, each.prompt)] for each in alone), beside])
    yield from _answered(run, name, sent, answers, name.removeprefix("family-"))


def _again(stand: Stand, answers: list[_Scored]) -> Iterator[Verdict]:
    """Asks a prompt after others with the same beginning, with a seed twice, and with top_k 1."""
    start = prompt(40)
    begins = [_SentPrompt("prefix-cache", str(i), [*start, 300 + i]) for i in range(3)]
    groups = [
        *([ask(each.id, each.prompt)] for each in begins),
        [ask("seed 1", start, temperature=1.0, seed=7)],
        [ask("seed 2", start, temperature=1.0, seed=7)],
        [ask("greedy", start)],
        [ask("top_k", start, temperature=1.0, top_k=1)],
    ]
    run = stand.run("base", groups)
    yield from _answered(run, "base", begins, answers)
    for claim, wanted, got in (("seed", "seed 1", "seed 2"), ("top-k-1", "greedy", "top_k")):
        if run.trouble:
            yield proved(claim, False, run.trouble)
        else:
            yield same_answers(claim, "", [(f"{wanted} and {got}", run.answers[wanted], run.answers[got])])


def _long(stand: Stand, extent: Extent, answers: list[_Scored]) -> Iterator[Verdict]:
    sent = [_SentPrompt("long-prompt", str(length), prompt(length)) for length in LONG if length <= extent.longest]
    run = stand.run("long", [[ask(each.id, each.prompt)] for each in sent])
    yield from _answered(run, "long", sent, answers)
