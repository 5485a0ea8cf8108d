"""Which of the free cores are taken."""

from __future__ import annotations

from typing import Any

from orchestrator.fleet.core_allocation import CoreAllocation


def test_the_cheapest_cores_are_used_first() -> None:
    """For any order of the hosts, and none above the maximum price."""
    floor = CoreAllocation(((8, 2.0), (8, 0.0), (8, 1.0)))
    taken: list[Any] = []
    while (place := floor.room(8, most=1.5)) is not None:
        assert floor.take(("m", len(taken)), 8, place)
        taken.append(place)
    assert taken == [(1, 0), (2, 0)]


def test_the_fullest_host_is_used_first() -> None:
    """So that contiguous room stays for larger replicas."""
    for fullest in (0, 1):
        floor = CoreAllocation(((24, 0.0), (24, 0.0)))
        assert floor.take(("m", 0), 8, (fullest, 0))
        assert floor.room(8) == (fullest, 8)


def test_a_replica_is_aligned_to_its_size() -> None:
    """After four used cores the next eight start at eight."""
    floor = CoreAllocation(((24, 0.0),))
    assert floor.take(("m", 0), 4, (0, 0))
    assert floor.room(8) == (0, 8)


def test_unusable_cores_are_never_covered() -> None:
    """By a window or a range, even if the cores beside them are usable."""
    floor = CoreAllocation(((16, 0.0),), (frozenset(range(8, 16)),))
    assert floor.room(16) is None
    assert floor.take(("m", 0), 8, (0, 0))
    assert list(floor.windows(16)) == []
    assert floor.free == 8
