"""What is kept free for more urgent requests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.dispatch.dispatcher import MOST_CLASSES, WINDOW_S, Headroom


def test_no_slot_is_reserved_if_all_requests_are_equally_urgent() -> None:
    """For any priority."""
    room = Headroom()
    for now in range(100):
        room.add(7, now)
    assert room.reserved(7, 64, 100) == 0


def test_as_many_slots_are_reserved_as_more_urgent_requests_ran_at_once() -> None:
    """Minus those that run now."""
    room = Headroom()
    for _ in range(3):
        room.add(0, 0.0)
    assert room.reserved(1, 64, 0.0) == 0
    room.add(1, 0.0)
    room.remove(0, 1.0)
    assert room.reserved(1, 64, 1.0) == 1
    room.remove(0, 2.0)
    room.remove(0, 3.0)
    assert room.reserved(1, 64, 3.0) == 3
    assert room.reserved(0, 64, 3.0) == 0
    assert room.reserved(-1, 64, 3.0) == 0


def test_at_most_half_of_the_slots_are_reserved() -> None:
    """Waiting requests must not wait forever for possible ones."""
    room = Headroom()
    for _ in range(30):
        room.add(0, 0.0)
    for _ in range(30):
        room.remove(0, 1.0)
    room.add(1, 1.0)
    assert [room.reserved(1, slots, 1.0) for slots in (0, 1, 3, 4, 16, 400)] == [0, 0, 1, 2, 8, 30]


def test_old_demand_is_forgotten() -> None:
    """It counts after one window, but not after two."""
    room = Headroom()
    room.add(1, 0.0)
    room.add(0, 1.0)
    room.remove(0, 2.0)
    assert room.reserved(1, 64, 1.5 * WINDOW_S) == 1
    assert room.reserved(1, 64, 2.5 * WINDOW_S) == 0


def test_many_invented_priorities_use_bounded_memory() -> None:
    """Only a limited number is tracked, and those without requests are dropped."""
    room = Headroom()
    for priority in range(10_000):
        if room.add(priority, 0.0):
            room.remove(priority, 0.0)
    assert len(room._classes) <= MOST_CLASSES
    room.add(3, 10 * WINDOW_S)
    room.remove(3, 10 * WINDOW_S)
    assert len(room._classes) <= 1


@given(st.lists(st.tuples(st.integers(-2, 2), st.booleans(), st.floats(0, 50)), max_size=60), st.integers(0, 64))
def test_the_reservation_is_never_negative_and_never_grows_with_urgency(
    steps: list[tuple[int, bool, float]], slots: int
) -> None:
    """A more urgent request has at least as much room as a less urgent one."""
    room, now, there = Headroom(), 0.0, dict.fromkeys(range(-2, 3), 0)
    for priority, comes, after in steps:
        now += after
        if comes:
            room.add(priority, now)
            there[priority] += 1
        elif there[priority]:
            room.remove(priority, now)
            there[priority] -= 1
        kept = [room.reserved(each, slots, now) for each in range(-2, 3)]
        assert kept == sorted(kept)
        assert kept[0] >= 0
        assert kept[-1] <= slots // 2
