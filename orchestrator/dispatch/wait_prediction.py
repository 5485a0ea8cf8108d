"""How long a request will wait for a slot, and when one that is refused should come again. Pure.

The prediction knows the number S of slots, how many requests go before this one, the mean time T that a request holds a
slot, and of each slot that is taken how long its request can hold it at most. It takes it that

- of L slots that are taken, the k-th to become free does so after k T / L, or earlier if its request cannot last that
  long,
- each request that gets a slot afterwards holds it for T.

So within T from now each slot is released once, at r_1 <= r_2 <= ... <= r_S (a free one at 0), and again every T after
that: with N = q S + m requests ahead the wait is q T + r_(m+1). With all slots taken and nothing known of their
requests it is (N+1) T / S: one ends every T / S. It is never shorter with more requests ahead, with a longer T, with
more slots taken, or with requests that can hold them for longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

RETRY_AFTER_S = (1, 60)  # the bounds of what a refused client is told
MEAN_SHARE = 0.1  # of the newest request in the exponential averages
FIRST_SERVICE_S = 1.0  # that a request holds a slot, before one has ended


def predicted_wait_s(ahead: int, slots: int, mean_service_s: float, at_most_s: Sequence[float] = ()) -> float:
    """Seconds until a request with ``ahead`` others before it gets one of ``slots``; infinite without slots.

    ``at_most_s`` has one number for each slot that is taken, in any order: the seconds after which its request is over
    at the latest (the tokens that it may still get, by the pace of its replica), ``math.inf`` where nothing is known.
    """
    if slots <= 0:
        return math.inf
    taken = sorted(at_most_s)[:slots]
    free = slots - len(taken)
    rounds, place = divmod(ahead, slots)
    wait = rounds * mean_service_s
    if place >= free:
        nth = place - free
        wait += min(taken[nth], mean_service_s * (nth + 1) / len(taken))
    return wait


class WaitPrediction:
    """What is known of the waits for the slots of one model, in a gateway as in the simulator."""

    def __init__(self) -> None:
        self.mean_service_s = FIRST_SERVICE_S  # of one request in a slot; an exponential average

    def ended(self, held_s: float) -> None:
        """A request was answered, and has held its slot for so long."""
        self.mean_service_s += MEAN_SHARE * (held_s - self.mean_service_s)

    def until_s(self, ahead: int, slots: int, at_most_s: Sequence[float] = (), own_wait_s: float = 0.0) -> float:
        """As `predicted_wait_s`, and no shorter than ``own_wait_s``: what the pace of the tenant's requests says."""
        return max(predicted_wait_s(ahead, slots, self.mean_service_s, at_most_s), own_wait_s)


def retry_after_s(wait_s: float, allowed_s: float = 0.0) -> int:
    """What a refused client is told: in so many seconds its wait will be as short as is allowed, if nobody else comes.
    ``wait_s`` is the predicted wait; ``allowed_s`` the time to its deadline, or the wait of the last place in a line
    that is full. Rounded up, and within RETRY_AFTER_S."""
    lowest, highest = RETRY_AFTER_S
    over = wait_s - allowed_s
    return highest if not over < highest else max(lowest, math.ceil(over))
