"""Two processes with locks on a core of one number are found, although the kernel grants each of their files once."""

from __future__ import annotations

import threading

import pytest

from tests.network_invariants import CoreWatch, Held
from tests.repeated import Repeated


class Broken(Repeated):
    """Fails at its first look."""

    pause_s = 0.0

    def __init__(self) -> None:
        self.looked = threading.Event()

    def look(self) -> None:
        self.looked.set()
        raise ValueError("no such process")


def test_a_watch_that_fails_fails_its_test() -> None:
    """Else nothing would be checked from then on."""
    with pytest.raises(ValueError, match="no such process"), Broken() as watch:
        assert watch.looked.wait(10)


def test_the_error_of_the_test_itself_is_raised_first() -> None:
    watch = Broken()
    with pytest.raises(KeyError), watch:
        raise KeyError(watch.looked.wait(10))


def test_a_core_that_two_processes_hold_for_different_hosts_is_a_violation() -> None:
    """Each planner's host has lock files of its own, so that two replicas could share a machine's core."""
    watch = CoreWatch([])
    watch.check("h1", [Held("0", 4, 71), Held("0", 5, 71), Held("1", 6, 80)])
    assert watch.violations == []
    watch.check("h1", [Held("0", 4, 71), Held("1", 4, 80)])
    assert len(watch.violations) == 1
