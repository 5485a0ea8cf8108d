"""The boundary of tasks that must go on after an error."""

from __future__ import annotations

import asyncio
import logging

import pytest

from workers.host.task_boundary import task_boundary

log = logging.getLogger(__name__)


def test_an_error_is_logged_with_its_traceback_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    """What follows the boundary runs."""
    errors: list[Exception] = []
    with task_boundary(log, "round %d failed", 7, level=logging.WARNING, on_error=errors.append):
        raise ValueError("broken")
    (record,) = caplog.records
    assert (record.getMessage(), record.levelname, record.exc_info is not None) == ("round 7 failed", "WARNING", True)
    assert [str(error) for error in errors] == ["broken"]


def test_without_an_error_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """And ``on_error`` is not called."""
    errors: list[Exception] = []
    with task_boundary(log, "failed", on_error=errors.append):
        pass
    assert (caplog.records, errors) == ([], [])


@pytest.mark.parametrize("error", [asyncio.CancelledError, KeyboardInterrupt])
def test_cancellation_passes_the_boundary(error: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    """Else a task could not be stopped."""
    with pytest.raises(error), task_boundary(log, "failed"):
        raise error
    assert caplog.records == []
