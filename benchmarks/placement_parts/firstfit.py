"""First fit: hosts in order, on each the first legal range that is free."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from benchmarks.placement_parts.fleet import Machine
from benchmarks.placement_parts.rules import starts


@cache
def _start_mask(instance: str, tp: int) -> int:
    return sum(1 << first for first in starts(instance, tp))


def openings(free: int, instance: str, tp: int) -> int:
    """The legal starts (a mask) of free ranges of ``tp`` cores."""
    runs, length = free, 1
    while length < tp:
        step = min(length, tp - length)
        runs &= runs >> step
        length += step
    return runs & _start_mask(instance, tp)


class FirstFit:
    """Free cores of machines, from which ranges are taken and to which they are given back."""

    def __init__(self, machines: Sequence[Machine], degrees: Sequence[int]) -> None:
        self.instances = [machine.instance for machine in machines]
        self.free = [machine.free for machine in machines]
        self._open = dict.fromkeys(degrees, 0)  # for each degree a mask of the machines that have room
        for i in range(len(machines)):
            self._look(i)

    def _look(self, i: int) -> None:
        for tp in self._open:
            if openings(self.free[i], self.instances[i], tp):
                self._open[tp] |= 1 << i
            else:
                self._open[tp] &= ~(1 << i)

    def find(self, tp: int) -> tuple[int, int] | None:
        """(index of the machine, first core), or None where no range is free."""
        rooms = self._open[tp]
        if not rooms:
            return None
        i = (rooms & -rooms).bit_length() - 1
        places = openings(self.free[i], self.instances[i], tp)
        return i, (places & -places).bit_length() - 1

    def take(self, i: int, first: int, tp: int) -> None:
        self.free[i] &= ~(((1 << tp) - 1) << first)
        self._look(i)

    def give(self, i: int, first: int, tp: int) -> None:
        self.free[i] |= ((1 << tp) - 1) << first
        self._look(i)
