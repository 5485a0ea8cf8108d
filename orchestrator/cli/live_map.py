"""Draws the cores of running hosts, one line for each host, for `corewright top`."""

from __future__ import annotations

import string
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import groupby

from orchestrator.fleet.fleet_status import HostInFleet
from placements.facts.core_range import CoreRange
from placements.facts.topology import TOPOLOGIES

LETTERS = string.ascii_uppercase
MANY = "*"  # of each model after the 26th
MODEL_COLORS = (36, 33, 35, 32, 34, 31, 96, 93, 95, 92, 94, 91)
FREE, RESERVED, CORDONED, QUARANTINED, LOST = ".#/!?"
LEGEND = "A ready  a not ready  . free  # reserved  / cordoned  ! quarantined  ? lost"


def letters(models: Iterable[str]) -> dict[str, str]:
    """Returns the letter of each model, the same on every host."""
    return {name: LETTERS[i] if i < len(LETTERS) else MANY for i, name in enumerate(models)}


def cells(host: HostInFleet, ready: Container[str], letter_of: Mapping[str, str]) -> list[str]:
    """Returns one character for each core of a host of the status: the letter of its model, which is a capital if
    the replica is ``ready``, or a sign of LEGEND."""
    drawn = [LOST if host.lost else FREE] * host.cores
    if isinstance(host.cordoned, str):
        drawn = [CORDONED] * host.cores
    else:
        _mark(drawn, host.cordoned, CORDONED)
    _mark(drawn, host.reserved_cores, RESERVED)
    _mark(drawn, [str(held.core) for held in host.quarantine], QUARANTINED)
    for lease in host.leases:
        letter = letter_of.get(lease.replica.rpartition("/")[0], MANY)
        _mark(drawn, [lease.cores], letter if lease.replica in ready else letter.lower())
    return drawn


def _mark(drawn: list[str], ranges: Iterable[str], sign: str) -> None:
    for text in ranges:
        for core in CoreRange.parse(text):
            if core < len(drawn):
                drawn[core] = sign


def host_line(host: HostInFleet, drawn: Sequence[str], width: int, color: bool) -> str:
    """Returns the cores in groups of one device, without the groups where they are wider than ``width``."""
    topology = TOPOLOGIES.get(host.instance or "")
    devices = topology.devices if topology is not None and host.cores % topology.devices == 0 else 1
    per = max(1, host.cores // devices)
    gap = " " if len(drawn) + devices <= width else ""
    groups = (drawn[first : first + per] for first in range(0, len(drawn), per))
    return gap.join("".join(_painted(cell, len(list(run)), color) for cell, run in groupby(group)) for group in groups)


def _painted(cell: str, times: int, color: bool) -> str:
    if not color:
        return cell * times
    if cell.upper() in LETTERS:
        number = MODEL_COLORS[LETTERS.index(cell.upper()) % len(MODEL_COLORS)]
        return f"\x1b[{'7;' if cell.isupper() else ''}{number}m{cell * times}\x1b[0m"
    return f"\x1b[31m{cell * times}\x1b[0m" if cell in (QUARANTINED, LOST) else cell * times
