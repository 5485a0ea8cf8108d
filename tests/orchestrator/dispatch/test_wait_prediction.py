"""How long a request will wait, and when one that is refused should come again."""

from __future__ import annotations

import math

import pytest

from orchestrator.dispatch.wait_prediction import predicted_wait_s, retry_after_s


def test_with_a_free_slot_no_request_waits() -> None:
    """As long as no more are ahead than there are free slots."""
    assert predicted_wait_s(0, 4, 10.0, [math.inf] * 3) == 0
    assert predicted_wait_s(1, 4, 10.0, [math.inf] * 2) == 0
    assert predicted_wait_s(1, 4, 10.0, [math.inf] * 3) > 0


@pytest.mark.parametrize("ahead", [0, 1, 3, 4, 11, 400])
def test_full_slots_end_evenly(ahead: int) -> None:
    """Without knowledge of running requests, one ends every mean service time / slots."""
    assert predicted_wait_s(ahead, 4, 10.0, [math.inf] * 4) == pytest.approx((ahead + 1) * 10.0 / 4)


def test_an_almost_complete_answer_shortens_the_wait() -> None:
    """A running request ends at the latest when it has all its tokens; the slots after it follow in order."""
    taken = [0.5, math.inf, 1.0, math.inf]
    assert [predicted_wait_s(ahead, 4, 10.0, taken) for ahead in range(5)] == [0.5, 1.0, 7.5, 10.0, 10.5]


def test_without_slots_the_wait_has_no_end() -> None:
    """The retry time is the longest one."""
    assert predicted_wait_s(0, 0, 10.0) == math.inf
    assert retry_after_s(math.inf) == 60


def test_with_fewer_slots_than_requests_in_them_the_first_count() -> None:
    """A replica may have left while its requests go on."""
    assert predicted_wait_s(0, 2, 9.0, [3.0, 1.0, 2.0]) == 1.0


@pytest.mark.parametrize(
    ("wait", "allowed", "retry_after"), [(12.1, 10.0, 3), (10.2, 10.0, 1), (500.0, 10.0, 60), (1, 9, 1)]
)
def test_retry_after_is_when_the_wait_would_be_short_enough(wait: float, allowed: float, retry_after: int) -> None:
    """In whole seconds, rounded up, between 1 and 60."""
    assert retry_after_s(wait, allowed) == retry_after
