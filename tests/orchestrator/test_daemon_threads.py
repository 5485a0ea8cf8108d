"""What becomes of an error on a thread of `up`."""

from __future__ import annotations

import pytest

from orchestrator.daemon import watched
from orchestrator.failure import Failed


@pytest.mark.parametrize(
    ("raised", "id", "what"),
    [
        (Failed("port-in-use", "port 8000 is taken", ""), "port-in-use", "port 8000 is taken"),
        (KeyError("models"), "up-failed", "KeyError: 'models'"),
    ],
)
def test_an_error_on_a_thread_ends_the_fleet(raised: Exception, id: str, what: str) -> None:
    """A fleet that nobody narrates or watches any more must not look alive."""

    def work() -> None:
        raise raised

    told: list[Failed] = []
    watched(work, told.append)
    assert [(one.problem.id, one.problem.what) for one in told] == [(id, what)]


def test_a_thread_that_ends_in_order_ends_nothing() -> None:
    """Nor does the end of the fleet, which they all see."""
    told: list[Failed] = []
    watched(lambda: None, told.append)
    assert told == []
