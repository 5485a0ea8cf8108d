"""Prefill buckets for recorded prompts: of each number of buckets, those with the least padding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from workers.batching.buckets import ladder, smallest_bucket

STEP = 128
"""Buckets are multiples of it, except the longest: vLLM's plugin accepts no others."""

MOST_LENGTHS = 512
"""With more lengths to choose from, they are multiples of 256, and so on."""


@dataclass(frozen=True)
class BucketSet:
    """Ascending prefill buckets, and the padding that they cause."""

    lengths: tuple[int, ...]
    padding: float  # padded tokens beyond the prompts', as a share of the prompts' tokens

    @classmethod
    def of(cls, lengths: Sequence[int], prompts: Mapping[int, int]) -> BucketSet:
        """Returns these buckets for prompts: the number of each length."""
        padded = sum(smallest_bucket(lengths, length) * count for length, count in prompts.items())
        return cls(tuple(lengths), padded / sum(length * count for length, count in prompts.items()) - 1)


@dataclass(frozen=True)
class BucketAdvice:
    """The best sets of 1, 2 and more buckets for one model's prompts, and the default set."""

    prompts: int
    best: tuple[BucketSet, ...]
    default: BucketSet

    @property
    def chosen(self) -> BucketSet:
        """The smallest set that pads no more than the default; without one, the largest."""
        return next((each for each in self.best if each.padding <= self.default.padding), self.best[-1])


def advise_buckets(lengths: Iterable[int], most: int, longest: int | None = None) -> BucketAdvice:
    """Returns the sets of up to ``most`` buckets for prompts of these lengths, in tokens.

    The last bucket is ``longest``, by default the longest prompt rounded up to a multiple of STEP; no prompt may be
    longer.
    """
    prompts = Counter(lengths)
    last = longest or _rounded(max(prompts), STEP)
    step = STEP
    while last > step * MOST_LENGTHS:
        step *= 2
    choices = sorted({min(_rounded(length, step), last) for length in prompts} | {last})
    counts = Counter[int]()
    for length, count in prompts.items():
        counts[min(_rounded(length, step), last)] += count
    best = [BucketSet.of(chosen, prompts) for chosen in _least_padded(choices, counts, most)]
    return BucketAdvice(prompts.total(), tuple(best), BucketSet.of(ladder(STEP, last), prompts))


def _rounded(length: int, step: int) -> int:
    return -(-length // step) * step


def _least_padded(choices: list[int], counts: Mapping[int, int], most: int) -> Iterable[list[int]]:
    """Yields the subset of ``choices`` with 1, 2 and more members that pads the prompts least; each has the last one.

    A dynamic program: ``padded[i]`` is the least number of padded tokens of all prompts up to ``choices[i]`` with so
    many buckets, the last of them ``choices[i]``; ``before[k][i]`` is the index of the bucket before it.
    """
    below = [0, *accumulate(counts[choice] for choice in choices)]
    padded: list[float] = [choice * below[i + 1] for i, choice in enumerate(choices)]
    before: list[list[int]] = [[-1] * len(choices)]
    yield choices[-1:]
    for size in range(2, min(most, len(choices)) + 1):
        earlier = [-1] * len(choices)
        sums = [float("inf")] * len(choices)
        for i in range(size - 1, len(choices)):
            options = [padded[j] + choices[i] * (below[i + 1] - below[j + 1]) for j in range(size - 2, i)]
            sums[i] = min(options)
            earlier[i] = size - 2 + options.index(sums[i])
        padded = sums
        before.append(earlier)
        yield _chain(choices, before)


def _chain(choices: list[int], before: list[list[int]]) -> list[int]:
    at, chain = len(choices) - 1, list[int]()
    for earlier in reversed(before):
        chain.append(choices[at])
        at = earlier[at]
    return chain[::-1]
