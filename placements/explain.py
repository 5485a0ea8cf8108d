"""A plan as people read it: the core map."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence

from placements.plan import Placement, Plan
from placements.topology import Host

_LETTERS = string.ascii_uppercase + string.ascii_lowercase
_WIDTH = 24  # cores in a line; with the devices grouped 24 cores take 72 columns
_FREE, _RESERVED, _QUARANTINED, _MANY = ".", "-", "!", "*"
_COLORS = (32, 33, 34, 35, 36, 31)


def core_map(
    plan: Plan, hosts: Sequence[Host], blocked: Mapping[str, frozenset[int]] | None = None, *, color: bool = False
) -> str:
    """One block for each host: its cores, grouped by device, with a letter for each replica, and a legend.

    At most 80 columns wide for model names up to 40 letters. ``color`` adds ANSI codes.
    """
    letters = {
        (placement.model, placement.replica): _LETTERS[i] if i < len(_LETTERS) else _MANY
        for i, placement in enumerate(plan.placements)
    }
    blocks = []
    for host in hosts:
        own = [placement for placement in plan.placements if placement.host == host.name]
        quarantined = (blocked or {}).get(host.name, frozenset())
        blocks.append(_block(host, own, letters, quarantined, color))
    return "\n".join(blocks)


def _block(
    host: Host,
    placements: Sequence[Placement],
    letters: Mapping[tuple[str, int], str],
    quarantined: frozenset[int],
    color: bool,
) -> str:
    marks = dict.fromkeys(range(host.cores), _FREE)
    marks.update({core: _RESERVED for core in host.reserved_cores if core in marks})
    marks.update({core: _QUARANTINED for core in quarantined if core in marks})
    for placement in placements:
        for core in placement.cores or ():
            marks[core] = letters[placement.model, placement.replica]
    used = sum(len(placement.cores or ()) for placement in placements)
    what = f"{used} of {host.cores} cores in use" if host.cores else f"{len(host.cpus)} CPUs, no NeuronCores"
    emulated = ", emulated" if host.emulated else ""
    lines = [f"{host.name}: {what}{emulated}"]
    per_device = host.topology.cores_per_device if host.topology else 1
    for first in range(0, host.cores, _WIDTH):
        cores = range(first, min(first + _WIDTH, host.cores))
        devices = [cores[i : i + per_device] for i in range(0, len(cores), per_device)]
        cells = ["".join(_paint(marks[core], color) * 2 for core in device) for device in devices]
        width = 2 * per_device
        lines.append("  core   " + " ".join(f"{device[0]:<{width}}" for device in devices).rstrip())
        lines.append("         " + " ".join(cells))
    lines.extend(
        "  " + _legend(placement, letters[placement.model, placement.replica], color) for placement in placements
    )
    signs = {_FREE: "free", _RESERVED: "reserved", _QUARANTINED: "quarantined"}
    present = [f"{sign} {word}" for sign, word in signs.items() if sign in marks.values()]
    if present:
        lines.append("  " + "   ".join(present))
    return "\n".join(lines) + "\n"


def _legend(placement: Placement, letter: str, color: bool) -> str:
    count = "1 thread" if placement.threads == 1 else f"{placement.threads} threads"
    name = f"{placement.model}/{placement.replica}"
    if placement.cores is None:
        return f"{_paint(letter, color)} {name}  no cores, {count}"
    noun = "core" if len(placement.cores) == 1 else "cores"
    return f"{_paint(letter, color)} {name}  {noun} {placement.cores}, {count}"


def _paint(mark: str, color: bool) -> str:
    if not color or mark not in _LETTERS:
        return mark
    return f"\x1b[{_COLORS[_LETTERS.index(mark) % len(_COLORS)]}m{mark}\x1b[0m"
