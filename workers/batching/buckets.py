"""Buckets: the few lengths that an engine is compiled for, and the choice of one for a length."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

SHORTEST_PREFILL = 16  # tokens; below this the padding costs less than a call
SHORTEST_DECODE = 64  # tokens; reading a shorter KV cache is not measurably faster


def ladder(shortest: int, longest: int) -> tuple[int, ...]:
    """Returns lengths that double from ``shortest`` up to exactly ``longest``: 16, 32, 64, 100 for (16, 100).

    Raises ValueError unless both are positive; a ``longest`` below ``shortest`` is the only rung.
    """
    if shortest < 1 or longest < 1:
        raise ValueError(f"bucket lengths must be positive, not {shortest} and {longest}")
    rungs = []
    rung = shortest
    while rung < longest:
        rungs.append(rung)
        rung *= 2
    return (*rungs, longest)


def default_prefill_buckets(max_len: int) -> tuple[int, ...]:
    """Returns the prompt lengths for a slot of ``max_len`` tokens."""
    return ladder(SHORTEST_PREFILL, max_len)


def default_decode_buckets(max_len: int) -> tuple[int, ...]:
    """Returns the KV lengths for a slot of ``max_len`` tokens."""
    return ladder(SHORTEST_DECODE, max_len)


def smallest_bucket(buckets: Sequence[int], length: int) -> int:
    """Returns the smallest of the ascending ``buckets`` that holds ``length`` tokens. Raises ValueError where
    none does: taking the largest instead would silently cut the input."""
    index = bisect_left(buckets, length)
    if index == len(buckets):
        raise ValueError(f"no bucket holds {length} tokens, the largest is {buckets[-1] if buckets else 'missing'}")
    return buckets[index]


def checked_buckets(kind: str, buckets: Sequence[int], max_len: int) -> tuple[int, ...]:
    """Returns ``buckets`` as a tuple. Raises ValueError unless positive, ascending and at most ``max_len``."""
    lengths = tuple(buckets)  # at least one
    if lengths[0] < 1 or any(a >= b for a, b in pairwise(lengths)):
        raise ValueError(f"{kind} buckets must be positive and ascending, not {list(lengths)}")
    if lengths[-1] > max_len:
        raise ValueError(f"the {kind} bucket {lengths[-1]} is longer than max_len {max_len}")
    return lengths
