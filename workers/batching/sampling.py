"""Sampling: chooses the next tokens on the host, from the logits of one step.

The order of the processors is that of transformers' ``generate``: ``penalties.Penalties``, then the guide's mask
(``guidance.Guide``), then temperature, top_k, top_p, min_p, by transformers' own warpers. Each request samples from
exactly their distribution over the full vocabulary; the computation depends on the vocabulary size:

1. Greedy rows (temperature below ``GREEDY_BELOW``) take the first of the largest scores, all rows in one argmax.
2. Up to ``FULL_UP_TO`` ids, a row runs through the warpers and is drawn as ``generate`` draws it: the same seed gives
   the same tokens as ``torch.manual_seed(seed)`` and ``generate(do_sample=True)``.
3. Above, where sorting 32k ids costs 3 ms a row and drawing from them 2 ms:
   a. with a top_k up to ``SHORTLIST``, only the ``SHORTLIST`` most probable ids are cut and drawn from, unless so many
      ids tie for the last place that others could be chosen;
   b. with top_p and no top_k, when the ``SHORTLIST`` most probable ids hold at least top_p of the full vocabulary's
      probability, the nucleus is a subset of them, and only they are cut and drawn from;
   c. else all ids are cut (without top_p nothing is sorted), and one uniform number is looked up in the cumulative
      probabilities.

Every request draws from its own generator, so its tokens do not depend on the rest of the batch. Rows with the same
warpers are processed together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workers.batching.guidance import Guide
from workers.batching.penalties import Penalties, needs_penalties
from workers.batching.reasoning_budget import ReasoningBudget
from workers.messages.engine_protocol import DeviceSampling
from workers.messages.requests import GenerateRequest, InvalidField

if TYPE_CHECKING:
    import torch

GREEDY_BELOW = 1e-5  # temperature; dividing by less overflows float32
FULL_UP_TO = 1024  # ids
SHORTLIST = 256  # ids; also the most that the Neuron engines sample from on the device (global_topk)
BLOCK = 256  # ids summed together
SEED_RANGE = range(-(2**63), 2**64)  # what torch.Generator accepts
OPENAI_PENALTY = 2.0  # of presence and frequency, either way
OPENAI_BIAS = 100.0  # either way
REPETITION = (0.01, 100.0)  # beyond, float32 logits overflow
MAX_LOGPROBS = 20  # OpenAI's


@dataclass(frozen=True)
class Warp:
    """The parameters that turn scores into probabilities."""

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True)
class Sampling:
    """How one request samples its tokens: its parameters, random generator, penalties, guide and thinking budget."""

    warp: Warp
    generator: torch.Generator | None  # None: greedy
    penalties: Penalties | None = None
    guide: Guide | None = None
    budget: ReasoningBudget | None = None

    @property
    def changes_scores(self) -> bool:
        if self.guide is not None or (self.penalties is not None and self.penalties.active):
            return True
        return self.budget is not None and self.budget.forced is not None

    @property
    def error(self) -> str:
        """Why ``sample`` returned no token."""
        if self.guide is not None and self.guide.error is not None:
            return self.guide.error
        if self.changes_scores:
            return (
                "no token is possible: the logits are not finite numbers, or the request's parameters forbid every id"
            )
        return "the model's logits are not finite numbers"

    def change(self, scores: torch.Tensor) -> None:
        """Apply the penalties, the guide and the budget to ``scores`` ``[vocab_size]`` float32, in place.

        The guide takes precedence over the penalties: where no id satisfies both, only the guide applies. The end of
        the reasoning takes precedence over both.
        """
        if self.budget is not None and (forced := self.budget.forced) is not None:
            scores.fill_(float("-inf"))
            scores[forced] = 0.0
            return
        forbidden = None if self.guide is None else self.guide.forbidden(len(scores))
        if self.guide is not None and forbidden is None:
            scores.fill_(float("-inf"))
            return
        guided = None if forbidden is None else scores.masked_fill(forbidden, float("-inf"))
        if self.penalties is not None and self.penalties.active:
            self.penalties.apply(scores)
        if forbidden is not None and guided is not None:
            scores.masked_fill_(forbidden, float("-inf"))
            if scores.max() == float("-inf"):
                scores.copy_(guided)

    def record(self, token: int) -> None:
        """Record the chosen token. ``sample`` does so for the tokens that it chooses."""
        if self.penalties is not None:
            self.penalties.record(token)
        if self.guide is not None:
            self.guide.advance(token)
        if self.budget is not None:
            self.budget.record(token)


def check_sampling(request: GenerateRequest, vocab_size: int) -> None:
    """Raises InvalidField, with the value and its range, for invalid sampling parameters. NaN is in no range."""
    numbers: list[tuple[str, float, float, float]] = [
        ("top_p", request.top_p, 0, 1),
        ("min_p", request.min_p, 0, 1),
        ("repetition_penalty", request.repetition_penalty, *REPETITION),
        ("presence_penalty", request.presence_penalty, -OPENAI_PENALTY, OPENAI_PENALTY),
        ("frequency_penalty", request.frequency_penalty, -OPENAI_PENALTY, OPENAI_PENALTY),
        ("min_tokens", request.min_tokens, 0, request.max_tokens),
        ("logprobs", request.logprobs or 0, 0, MAX_LOGPROBS),
        ("prompt_logprobs", request.prompt_logprobs or 0, 0, MAX_LOGPROBS),
        *((f"logit_bias of {id}", bias, -OPENAI_BIAS, OPENAI_BIAS) for id, bias in request.logit_bias.items()),
    ]
    if not 0 <= request.temperature < float("inf"):
        raise InvalidField("temperature", f"temperature must be a number from 0, not {request.temperature}")
    for name, number, minimum, maximum in numbers:
        if not minimum <= number <= maximum:
            raise InvalidField(name.partition(" ")[0], f"{name} must be from {minimum:g} to {maximum:g}, not {number}")
    for name, count in (("top_k", request.top_k), ("no_repeat_ngram_size", request.no_repeat_ngram_size)):
        if count < 0:
            raise InvalidField(name, f"{name} must be at least 0, not {count}")
    for name, ids in (("logit_bias", list(request.logit_bias)), ("stop_token_ids", request.stop_token_ids)):
        if any(not 0 <= id < vocab_size for id in ids):
            raise InvalidField(name, f"{name} must have ids inside the vocabulary of {vocab_size}")
    if request.seed is not None and request.seed not in SEED_RANGE:
        raise InvalidField("seed", f"seed must be from -2**63 to 2**64-1, not {request.seed}")


def is_greedy(request: GenerateRequest) -> bool:
    """Returns whether each token of the answer is the most probable one."""
    return request.temperature < GREEDY_BELOW


def check_device_sampling(request: GenerateRequest, max_ids: int) -> None:
    """Raises InvalidField for parameters unsupported on a device that samples from at most ``max_ids`` ids."""
    if is_greedy(request):
        return
    engine = "this model's engine samples on the device"
    if request.top_k > max_ids:
        raise InvalidField("top_k", f"{engine}: top_k must be at most {max_ids}, not {request.top_k}")
    if not request.top_p:
        raise InvalidField("top_p", f"{engine}: top_p must be above 0")
    if request.min_p:
        raise InvalidField("min_p", f"{engine}: min_p is not supported")
    if request.seed is not None:
        raise InvalidField("seed", f"{engine}: seed is not supported")


def on_device(request: GenerateRequest, max_ids: int) -> DeviceSampling:
    """Returns the device parameters of a request that passed ``check_device_sampling``. No top_k means ``max_ids``."""
    if is_greedy(request):
        return DeviceSampling()
    return DeviceSampling(request.top_k or max_ids, request.top_p, request.temperature)


def start_sampling(
    request: GenerateRequest,
    ending_ids: frozenset[int] = frozenset(),
    guide: Guide | None = None,
    budget: ReasoningBudget | None = None,
) -> Sampling:
    """Returns the sampling state of a new request that passed ``check_sampling``; without a seed, a random one.

    ``ending_ids`` are the ids that end its answer.
    """
    penalties = Penalties(request, ending_ids) if needs_penalties(request) else None
    if is_greedy(request):
        return Sampling(Warp(), None, penalties, guide, budget)
    import torch

    generator = torch.Generator()
    if request.seed is None:
        generator.seed()
    else:
        generator.manual_seed(request.seed)
    warp = Warp(float(request.temperature), request.top_k, float(request.top_p), float(request.min_p))
    return Sampling(warp, generator, penalties, guide, budget)


def sample(logits: torch.Tensor, rows: Sequence[Sampling]) -> list[int | None]:
    """Returns the next token of each row of ``logits`` ``[len(rows), vocab_size]`` float32, and records it in ``rows``.

    None for a row whose logits are not numbers (NaN or +inf), or where no id is allowed: see ``Sampling.error``.
    """
    import torch

    with torch.inference_mode():
        best = logits.argmax(dim=-1)
        usable = _finite(logits, best)
        changed = [index for index, sampler in enumerate(rows) if usable[index] and sampler.changes_scores]
        if changed:
            logits = logits.clone()
            for index in changed:
                rows[index].change(logits[index])
            best[changed] = logits[changed].argmax(dim=-1)
            usable = [old and new for old, new in zip(usable, _finite(logits, best), strict=True)]
        tokens: list[int | None] = [token if ok else None for token, ok in zip(best.tolist(), usable, strict=True)]
        by_warp: defaultdict[Warp, list[int]] = defaultdict(list)
        for index, sampler in enumerate(rows):
            if sampler.generator is not None and usable[index]:
                by_warp[sampler.warp].append(index)
        for warp, members in by_warp.items():
            generators = [generator for index in members if (generator := rows[index].generator) is not None]
            scores = _temperature(logits if len(members) == len(logits) else logits[members], warp.temperature)
            for index, token in zip(members, _draw(scores, warp, generators), strict=True):
                tokens[index] = token
    for sampler, chosen in zip(rows, tokens, strict=True):
        if chosen is not None:
            sampler.record(chosen)
    return tokens


def _finite(logits: torch.Tensor, best: torch.Tensor) -> list[bool]:
    """Returns whether each row's largest logit is finite; NaN and +inf count as largest."""
    finite: list[bool] = logits.gather(-1, best[:, None])[:, 0].isfinite().tolist()
    return finite


def _draw(scores: torch.Tensor, warp: Warp, generators: Sequence[torch.Generator]) -> list[int]:
    """Returns one token for each row of ``scores`` ``[rows, vocab_size]``; numbered as in the module's docstring."""
    if scores.shape[-1] <= FULL_UP_TO:  # 2
        return _as_generate(_cut(scores, warp.top_k, warp.top_p, warp.min_p), generators)
    if 0 < warp.top_k <= SHORTLIST:
        return _from_top_k(scores, warp, generators)
    if warp.top_k == 0 and warp.top_p < 1:
        return _from_nucleus(scores, warp, generators)
    return _look_up(_cut(scores, warp.top_k, warp.top_p, warp.min_p), generators)  # 3c


def _from_top_k(scores: torch.Tensor, warp: Warp, generators: Sequence[torch.Generator]) -> list[int]:
    """3a. Takes one id more than the shortlist, to detect ties: top_k keeps all ids that equal its last."""
    best, ids = scores.topk(SHORTLIST + 1)
    last = best[:, warp.top_k - 1]
    ties = ((last == best[:, SHORTLIST]) & last.isfinite()).tolist()
    warped = _cut(best, warp.top_k, warp.top_p, warp.min_p)
    tokens = []
    for row, tied in enumerate(ties):
        own, generator = slice(row, row + 1), generators[row : row + 1]
        if tied:  # 3c
            tokens += _look_up(_cut(scores[own], warp.top_k, warp.top_p, warp.min_p), generator)
        else:
            tokens.append(int(ids[row, _as_generate(warped[own], generator)[0]]))
    return tokens


def _from_nucleus(scores: torch.Tensor, warp: Warp, generators: Sequence[torch.Generator]) -> list[int]:
    """3b."""
    import torch

    shortlists, ids = scores.topk(SHORTLIST)
    shares = torch.exp(shortlists.logsumexp(-1) - scores.logsumexp(-1)).tolist()
    tokens = []
    for row, share in enumerate(shares):
        own, generator = slice(row, row + 1), generators[row : row + 1]
        if share < warp.top_p:  # 3c
            tokens += _look_up(_cut(scores[own], 0, warp.top_p, warp.min_p), generator)
        else:  # the warper sees only the shortlist, so top_p is scaled up by its share
            place = _as_generate(_cut(shortlists[own], 0, min(1.0, warp.top_p / share), warp.min_p), generator)[0]
            tokens.append(int(ids[row, place]))
    return tokens


def _as_generate(scores: torch.Tensor, generators: Sequence[torch.Generator]) -> list[int]:
    """Draw as transformers' ``generate`` does, each row with its own generator."""
    import torch

    probabilities = torch.softmax(scores, dim=-1)
    return [
        int(torch.multinomial(row, num_samples=1, generator=generator))
        for row, generator in zip(probabilities, generators, strict=True)
    ]


def _look_up(scores: torch.Tensor, generators: Sequence[torch.Generator]) -> list[int]:
    """Inverse transform sampling in two steps: first a block of ids, then an id within it.

    Only the block's sums are cumulated: all 32k probabilities would take three times as long.
    """
    import torch

    probabilities = torch.softmax(scores, dim=-1)
    blocks = torch.nn.functional.pad(probabilities, (0, -scores.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    points = torch.cat([torch.rand(1, dtype=torch.float64, generator=generator) for generator in generators])
    block, inside = locate(blocks.sum(-1), points)
    token, _ = locate(blocks[torch.arange(len(generators)), block], inside)
    tokens: list[int] = (block * BLOCK + token).tolist()
    return tokens


def locate(weights: torch.Tensor, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the index of the weight where each of ``points`` (0 to 1) falls on its row, and how far into it.

    Never a weight of 0. Shapes ``[rows, n]``, ``[rows]`` -> ``[rows]``, ``[rows]``.
    """
    import torch

    ends = weights.double().cumsum(-1)
    targets = (points.clamp(max=1 - 1e-12) * ends[:, -1])[:, None]
    index = torch.searchsorted(ends, targets, right=True)  # right: the first end beyond, whose weight is not 0
    weight = weights.gather(-1, index).double()
    into = (targets - (ends.gather(-1, index) - weight)) / weight
    return index[:, 0], into[:, 0].clamp(0, 1)


def _temperature(scores: torch.Tensor, temperature: float) -> torch.Tensor:
    from transformers.generation.logits_process import TemperatureLogitsWarper

    if temperature == 1:
        return scores
    warped: torch.Tensor = TemperatureLogitsWarper(temperature)(None, scores)
    return warped


def _cut(scores: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Returns ``scores`` with -inf for ids that top_k, top_p or min_p exclude, in the order of ``generate``."""
    from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers: list[Any] = []
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    for warper in warpers:
        scores = warper(None, scores)
    return scores
