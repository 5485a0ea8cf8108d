"""What is kept free for more urgent requests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.dispatch.headroom import MOST_CLASSES, WINDOW_S, Headroom


def test_nothing_is_kept_where_all_are_equally_urgent() -> None:
    """Whatever the priority is called."""
    room = Headroom()
    for now in range(100):
        room.add(7, now)
    assert room.reserved(7, 64, 100) == 0


def test_as_many_slots_are_kept_as_more_urgent_requests_were_there_at_once() -> None:
    """Those that are there now need not be kept room for."""
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


def test_no_more_than_half_of_the_slots_is_kept() -> None:
    """What waits should not wait for ever for what may come."""
    room = Headroom()
    for _ in range(30):
        room.add(0, 0.0)
    for _ in range(30):
        room.remove(0, 1.0)
    room.add(1, 1.0)
    assert [room.reserved(1, slots, 1.0) for slots in (0, 1, 3, 4, 16, 400)] == [0, 0, 1, 2, 8, 30]


def test_what_was_long_ago_is_forgotten() -> None:
    """After one window it still counts, after two it does not."""
    room = Headroom()
    room.add(1, 0.0)
    room.add(0, 1.0)
    room.remove(0, 2.0)
    assert room.reserved(1, 64, 1.5 * WINDOW_S) == 1
    assert room.reserved(1, 64, 2.5 * WINDOW_S) == 0


def test_clients_that_make_up_priorities_fill_no_memory() -> None:
    """Only so many are looked at, and those without requests leave."""
    room = Headroom()
    for priority in range(10_000):
        if room.add(priority, 0.0):
            room.remove(priority, 0.0)
    assert len(room._classes) <= MOST_CLASSES
    room.add(3, 10 * WINDOW_S)
    room.remove(3, 10 * WINDOW_S)
    assert len(room._classes) <= 1


@given(st.lists(st.tuples(st.integers(-2, 2), st.booleans(), st.floats(0, 50)), max_size=60), st.integers(0, 64))
def test_what_is_kept_is_never_negative_and_never_grows_with_urgency(
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
