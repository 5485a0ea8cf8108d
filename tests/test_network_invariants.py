"""Two processes with locks on a core of one number are found, although the kernel grants each of their files once."""

from __future__ import annotations

from tests.network_invariants import CoreWatch, Held


def test_a_core_that_two_processes_hold_for_different_hosts_is_a_violation() -> None:
    """Each planner's host has lock files of its own, so that two replicas could share a machine's core."""
    watch = CoreWatch([])
    watch.look("h1", [Held("0", 4, 71), Held("0", 5, 71), Held("1", 6, 80)])
    assert watch.violations == []
    watch.look("h1", [Held("0", 4, 71), Held("1", 4, 80)])
    assert len(watch.violations) == 1
