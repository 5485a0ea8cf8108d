from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from tests.searches import search
from workers.batching.slots import SlotError, Slots

COUNT = 4


class SlotsKeepTheirOwners(RuleBasedStateMachine):
    """A slot has one owner at a time, the lowest free one is taken first, and none is ever lost."""

    taken = Bundle("taken")

    def __init__(self) -> None:
        super().__init__()
        self.slots: Slots[object] = Slots(COUNT)
        self.model: dict[int, object] = {}

    @precondition(lambda self: len(self.model) < COUNT)
    @rule(target=taken)
    def take(self) -> int:
        owner = object()
        slot = self.slots.take(owner)
        assert slot == min(set(range(COUNT)) - set(self.model))
        self.model[slot] = owner
        return slot

    @precondition(lambda self: len(self.model) == COUNT)
    @rule()
    def take_one_too_many(self) -> None:
        with pytest.raises(SlotError):
            self.slots.take(object())

    @rule(slot=consumes(taken))
    def release(self, slot: int) -> None:
        assert self.slots.release(slot) is self.model.pop(slot)

    @rule(slot=st.integers(-2, COUNT + 1))
    def release_what_is_not_live(self, slot: int) -> None:
        if slot not in self.model:
            with pytest.raises(SlotError):
                self.slots.release(slot)

    @invariant()
    def live_slots_are_sorted_and_complete(self) -> None:
        assert self.slots.live() == sorted(self.model.items(), key=lambda item: item[0])
        assert len(self.slots.live()) + self.slots.free_count == len(self.slots) == COUNT


TestSlotsKeepTheirOwners = SlotsKeepTheirOwners.TestCase
TestSlotsKeepTheirOwners.settings = search(20, stateful_step_count=30)


def test_an_engine_without_slots_is_refused() -> None:
    """There is always a slot to take."""
    with pytest.raises(ValueError, match="at least one slot"):
        Slots(0)
