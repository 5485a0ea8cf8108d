"""Predicts how long a request will wait for a slot, and when a rejected one should be retried. Pure.

The inputs are the number S of slots, the requests ahead, the mean time T that a request holds a slot, and for each
taken slot the longest time that its request can still hold it. The model assumes that

- of L taken slots, the k-th to become free does so after k T / L, or earlier if its request cannot last that long,
- each later request holds its slot for T.

So within T from now each slot is released once, at r_1 <= r_2 <= ... <= r_S (a free one at 0), and every T after that:
with N = q S + m requests ahead the wait is q T + r_(m+1). With all slots taken and no bounds on their requests it is
(N+1) T / S: one ends every T / S. The wait never gets shorter with more requests ahead, a longer T, more taken slots,
or longer bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

RETRY_AFTER_S = (1, 60)  # the bounds of Retry-After
MEAN_SHARE = 0.1  # weight of the newest request in the exponential averages
FIRST_SERVICE_S = 1.0  # assumed time in a slot until a request has ended


def predicted_wait_s(ahead: int, slots: int, mean_service_s: float, at_most_s: Sequence[float] = ()) -> float:
    """Returns the seconds until a request with ``ahead`` others before it gets one of ``slots``; infinite without
    slots.

    ``at_most_s`` has one number for each taken slot, in any order: the seconds until its request is over at the latest
    (its remaining tokens at the pace of its replica), ``math.inf`` where that is unknown.
    """
    if slots <= 0:
        return math.inf
    bounds = sorted(at_most_s)[:slots]
    free = slots - len(bounds)
    rounds, place = divmod(ahead, slots)
    wait = rounds * mean_service_s
    if place >= free:
        nth = place - free
        wait += min(bounds[nth], mean_service_s * (nth + 1) / len(bounds))
    return wait


def retry_after_s(wait_s: float, allowed_s: float = 0.0) -> int:
    """Returns the Retry-After of a rejected request: the seconds until its wait would be short enough, if no other
    request arrives. ``wait_s`` is the predicted wait, ``allowed_s`` the wait that is acceptable: the time to its
    deadline, or the wait of the last place in a full queue. Rounded up, and within RETRY_AFTER_S."""
    lowest, highest = RETRY_AFTER_S
    over = wait_s - allowed_s
    return highest if not over < highest else max(lowest, math.ceil(over))
