"""The lengths that are compiled where bucketing is on and no list is given."""

from __future__ import annotations

import math


def generate_buckets(min_length: int, max_length: int) -> list[int]:
    """Powers of two from the shorter, and the longer; the last power is left to rounding."""
    if min_length == max_length:
        return [max_length]
    return [2**power for power in range(int(math.log2(min_length)), round(math.log2(max_length)))] + [max_length]
