"""Parses lists of ids in the format of the kernel and the Neuron runtime: "0-47,96-143"."""

from __future__ import annotations

import re

MOST_IDS = 2**14  # more CPUs than any machine has; limits the memory that an invalid list can take
_PART = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")


def parse_cpulist(text: str) -> tuple[int, ...] | None:
    """Returns the distinct ids, ascending; () for an empty list, None for an invalid one.

    The format of /sys/devices/system/node/node*/cpulist (empty for a memory-only node) and of
    ``NEURON_RT_VISIBLE_CORES`` (Neuron Runtime Configuration: "7", "3-6", "3,4,5,6", "3-5,6").
    """
    ids: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _PART.fullmatch(part)
        if match is None:
            return None
        first = int(match[1])
        last = int(match[2] or first)
        if last < first or last >= MOST_IDS:
            return None
        ids.update(range(first, last + 1))
    return tuple(sorted(ids))
