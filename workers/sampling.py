"""Choosing the next token on the host, from the logits of one step.

What each request gets is exactly the distribution of transformers' own TemperatureLogitsWarper and TopPLogitsWarper
over the full vocabulary; how it is computed depends on the vocabulary:

1. Greedy rows (temperature below ``GREEDY_BELOW``) take the first of the largest logits, all rows in one argmax.
2. Up to ``FULL_UP_TO`` ids, a row runs through the warpers and is drawn as ``generate`` draws it: the same seed gives
   the same tokens as ``torch.manual_seed(seed)`` and ``generate(do_sample=True)``.
3. Above, where sorting 32k ids costs 3 ms a row and drawing from them 2 ms:
   a. without top_p, one uniform number is looked up in the cumulated probabilities of all ids;
   b. with top_p, when the ``SHORTLIST`` most probable ids hold at least top_p of the full vocabulary's probability,
      the nucleus lies inside them, and only they are cut and drawn from;
   c. else (a flat distribution) the full row is sorted, and drawn from as in a.

Every request draws from a generator of its own, so its tokens do not depend on what else is in the batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GREEDY_BELOW = 1e-5  # temperature; dividing by less overflows float32
FULL_UP_TO = 1024  # ids
SHORTLIST = 256  # ids; also the most that the Neuron engines sample from on the device (global_topk)
BLOCK = 256  # ids looked at together
SEED_RANGE = range(-(2**63), 2**64)  # what torch.Generator accepts


@dataclass(frozen=True)
class Sampling:
    """How one request chooses its tokens. Holds the state of its random numbers, so it belongs to one request."""

    temperature: float
    top_p: float
    generator: torch.Generator | None  # None: greedy


def check_sampling(temperature: float, top_p: float, seed: int | None) -> None:
    """Raises ValueError for what cannot be sampled with: temperature below 0, top_p outside 0 to 1, seed too long."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be a number from 0, not {temperature}")
    if not 0 <= top_p <= 1:
        raise ValueError(f"top_p must be from 0 to 1, not {top_p}")
    if seed is not None and seed not in SEED_RANGE:
        raise ValueError(f"seed must be from -2**63 to 2**64-1, not {seed}")


def start_sampling(temperature: float, top_p: float, seed: int | None) -> Sampling:
    """The sampling state of a new request; without ``seed`` a random one. Raises ValueError as ``check_sampling``."""
    check_sampling(temperature, top_p, seed)
    if temperature < GREEDY_BELOW:
        return Sampling(0.0, 1.0, None)
    import torch

    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return Sampling(float(temperature), float(top_p), generator)


def sample(logits: torch.Tensor, rows: Sequence[Sampling]) -> list[int | None]:
    """The next token of each row of ``logits`` ``[len(rows), vocab_size]`` float32.

    None for a row whose logits are not numbers (NaN or +inf): there is nothing to choose.
    """
    import torch

    with torch.inference_mode():
        best = logits.argmax(dim=-1)
        usable = logits.gather(-1, best[:, None])[:, 0].isfinite().tolist()  # NaN and +inf count as largest
        tokens: list[int | None] = [token if ok else None for token, ok in zip(best.tolist(), usable, strict=True)]
        alike: dict[tuple[float, float], list[int]] = defaultdict(list)  # rows that the same warpers can take together
        for index, how in enumerate(rows):
            if how.generator is not None and usable[index]:
                alike[how.temperature, how.top_p].append(index)
        for (temperature, top_p), members in alike.items():
            generators = [generator for index in members if (generator := rows[index].generator) is not None]
            scores = _temperature(logits if len(members) == len(logits) else logits[members], temperature)
            for index, token in zip(members, _draw(scores, top_p, generators), strict=True):
                tokens[index] = token
        return tokens


def _draw(scores: torch.Tensor, top_p: float, generators: Sequence[torch.Generator]) -> list[int]:
    """One token from each row of ``scores`` ``[rows, vocab_size]``; the numbers are those of the module's docstring."""
    if scores.shape[-1] <= FULL_UP_TO:  # 2
        return _as_generate(_top_p(scores, top_p), generators)
    if top_p == 1:  # 3a
        return _look_up(scores, generators)
    import torch

    shortlists, ids = scores.topk(SHORTLIST)
    held = torch.exp(shortlists.logsumexp(-1) - scores.logsumexp(-1)).tolist()
    tokens = []
    for row, share in enumerate(held):
        own, generator = slice(row, row + 1), generators[row : row + 1]
        if share < top_p:  # 3c
            tokens += _look_up(_top_p(scores[own], top_p), generator)
        else:  # 3b: to the warper the shortlist is the whole, so top_p grows by what the shortlist leaves out
            place = _as_generate(_top_p(shortlists[own], min(1.0, top_p / share)), generator)[0]
            tokens.append(int(ids[row, place]))
    return tokens


def _as_generate(scores: torch.Tensor, generators: Sequence[torch.Generator]) -> list[int]:
    """The draw of transformers' ``generate``, each row with its own generator."""
    import torch

    probabilities = torch.softmax(scores, dim=-1)
    return [
        int(torch.multinomial(row, num_samples=1, generator=generator))
        for row, generator in zip(probabilities, generators, strict=True)
    ]


def _look_up(scores: torch.Tensor, generators: Sequence[torch.Generator]) -> list[int]:
    """Inverse transform sampling, in two steps: which block of ids, then which of its ids.

    Only the block's sums are cumulated: all 32k probabilities would take three times as long.
    """
    import torch

    probabilities = torch.softmax(scores, dim=-1)
    blocks = torch.nn.functional.pad(probabilities, (0, -scores.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    points = torch.cat([torch.rand(1, dtype=torch.float64, generator=generator) for generator in generators])
    block, inside = _place(blocks.sum(-1), points)
    token, _ = _place(blocks[torch.arange(len(generators)), block], inside)
    found: list[int] = (block * BLOCK + token).tolist()
    return found


def _place(weights: torch.Tensor, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each of ``points`` (0 to 1) falls on its row of ``weights`` laid end to end, and how far into that weight.

    Never a weight of 0. Shapes ``[rows, n]``, ``[rows]`` -> ``[rows]``, ``[rows]``.
    """
    import torch

    ends = weights.double().cumsum(-1)
    targets = (points.clamp(max=1 - 1e-12) * ends[:, -1])[:, None]
    index = torch.searchsorted(ends, targets, right=True)  # right: the first end beyond, so its weight is not 0
    weight = weights.gather(-1, index).double()
    into = (targets - (ends.gather(-1, index) - weight)) / weight
    return index[:, 0], into[:, 0].clamp(0, 1)


def _temperature(scores: torch.Tensor, temperature: float) -> torch.Tensor:
    from transformers.generation.logits_process import TemperatureLogitsWarper

    if temperature == 1:
        return scores
    warped: torch.Tensor = TemperatureLogitsWarper(temperature)(None, scores)
    return warped


def _top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    from transformers.generation.logits_process import TopPLogitsWarper

    if top_p == 1:
        return scores
    warped: torch.Tensor = TopPLogitsWarper(top_p)(None, scores)
    return warped
