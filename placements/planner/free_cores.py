"""The free cores of a host, as a bit mask."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from placements.facts.core_range import CoreRange
from placements.facts.topology import Host


class FreeCores(NamedTuple):
    """The free cores of a host: bit i of ``mask`` stands for core i."""

    cores: int
    mask: int

    @classmethod
    def of(cls, host: Host, taken: Iterable[int] = ()) -> FreeCores:
        """Returns the cores of a host that are neither reserved nor ``taken``."""
        mask = (1 << host.cores) - 1
        for core in (*host.reserved_cores, *taken):
            if 0 <= core < host.cores:
                mask &= ~(1 << core)
        return cls(host.cores, mask)

    def without(self, cores: CoreRange) -> FreeCores:
        """Returns a copy in which ``cores`` are not free."""
        return self._replace(mask=self.mask & ~bits(cores))

    def holds(self, cores: CoreRange) -> bool:
        """Returns whether all of ``cores`` are free."""
        mask = bits(cores)
        return cores.last < self.cores and self.mask & mask == mask


def bits(cores: CoreRange) -> int:
    """Returns the mask with these cores set."""
    return ((1 << len(cores)) - 1) << cores.first
