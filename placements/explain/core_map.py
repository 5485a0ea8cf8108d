"""Draws a plan for the terminal: each host's devices, the links between them, and the replicas on their cores."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from placements.facts.core_range import CoreRange, ranges
from placements.facts.plural import counted, plural
from placements.facts.topology import Host
from placements.planner.plan import Placement, Plan
from placements.spec.schema import Spec

WIDTH = 80  # columns; the default of terminals
DRAWN_APART = 4  # up to this many hosts, each host has its own picture
MOST_PICTURES = 12  # for more hosts, once identical ones share a picture

_LETTERS = string.ascii_uppercase + string.ascii_lowercase
_NUMBERS = string.digits + string.ascii_lowercase  # replica numbers, modulo 36
_MANY = "*"
_FREE, _RESERVED, _CORDONED, _QUARANTINED, _WINDOW = "..", "##", "//", "!!", "[]"
_SIGNS = {
    _WINDOW: "the window",
    _FREE: "free",
    _RESERVED: "reserved",
    _CORDONED: "cordoned",
    _QUARANTINED: "quarantined",
}
_SIGN_COLORS = {_WINDOW: "1", _FREE: "2", _RESERVED: "2", _CORDONED: "33", _QUARANTINED: "31"}
_MODEL_COLORS = (36, 33, 35, 32, 34, 31, 96, 93, 95, 92, 94, 91)
_TORUS = 4  # devices in a row, and rows
_JOINTS = {2: 3, 4: 2}  # columns between the devices of a torus, by cores of a device; 1 where there are more
_INDENT = "         "


@dataclass(frozen=True)
class _Pen:
    """The letters and colours of models, the same on every host."""

    letters: Mapping[str, str]
    color: bool

    @classmethod
    def of(cls, spec: Spec | None, plan: Plan, color: bool) -> _Pen:
        in_spec = [model.name for model in spec.models] if spec is not None else []
        models = dict.fromkeys([*in_spec, *(placement.model for placement in plan.placements)])
        letters = {model: _LETTERS[i] if i < len(_LETTERS) else _MANY for i, model in enumerate(models)}
        return cls(letters, color)

    def paint(self, cell: str) -> str:
        """Returns a cell in the colour of its model, or of its sign."""
        if not self.color:
            return cell
        if cell in _SIGN_COLORS:
            return f"\x1b[{_SIGN_COLORS[cell]}m{cell}\x1b[0m"
        number = _LETTERS.find(cell[0])
        if number < 0:
            return cell
        return f"\x1b[7;{_MODEL_COLORS[number % len(_MODEL_COLORS)]}m{cell}\x1b[0m"


@dataclass(frozen=True)
class _Drawn:
    """One host and what is drawn of it. Hosts that look identical have equal ``look`` values."""

    host: Host
    placements: tuple[Placement, ...]
    marks: tuple[str, ...]  # the sign of each core without a replica
    taken: frozenset[int]
    cordoned_in_use: tuple[str, ...]

    @property
    def look(self) -> tuple[object, ...]:
        """Everything except the host's name and the replica numbers."""
        shapes = tuple((placement.model, placement.cores, placement.threads) for placement in self.placements)
        host = self.host
        return (host.topology, host.emulated, len(host.cpus), self.marks, shapes, self.cordoned_in_use)

    @property
    def empty(self) -> bool:
        return not self.placements and set(self.marks) <= {_FREE, _RESERVED}


def core_map(
    plan: Plan,
    hosts: Sequence[Host],
    quarantined: Mapping[str, frozenset[int]] | None = None,
    cordoned: Mapping[str, frozenset[int]] | None = None,
    *,
    spec: Spec | None = None,
    window: tuple[str, CoreRange] | None = None,
    color: bool = False,
) -> str:
    """Returns a picture of each host: its devices and links, with two columns for each core.

    A core shows the letter of its model and the last base-36 digit of its replica number, or a sign that the legend
    explains. Letters follow the order of the models in ``spec``, those without replicas included, and without a spec
    that of the placements. ``window`` is a host and the range on it to mark. With more than four hosts, hosts that
    differ only in replica numbers share a picture, empty hosts share a line, and at most twelve pictures are drawn.
    The text is at most 80 columns wide. ``color`` adds ANSI codes, one colour for each model.
    """
    pen = _Pen.of(spec, plan, color)
    on_host: dict[str, list[Placement]] = {}
    for placement in plan.placements:
        on_host.setdefault(placement.host, []).append(placement)
    drawn = [
        _drawn(
            host,
            on_host.get(host.name, ()),
            (quarantined or {}).get(host.name, frozenset()),
            (cordoned or {}).get(host.name, frozenset()),
            window[1] if window is not None and window[0] == host.name else None,
        )
        for host in hosts
    ]
    if len(drawn) <= DRAWN_APART:
        return "\n".join(_block([host_view], pen) for host_view in drawn)
    return "\n".join(_summarised(drawn, pen))


def _drawn(
    host: Host,
    placements: Iterable[Placement],
    quarantined: frozenset[int],
    cordoned: frozenset[int],
    window: CoreRange | None,
) -> _Drawn:
    own = tuple(sorted(placements, key=lambda p: (p.cores is None, p.cores.first if p.cores else 0)))
    in_use = frozenset(core for placement in own for core in placement.cores or ())
    marks = []
    for core in range(host.cores):
        if core in quarantined:
            marks.append(_QUARANTINED)
        elif core in host.reserved_cores:
            marks.append(_RESERVED)
        elif core in cordoned:
            marks.append(_CORDONED)
        else:
            marks.append(_WINDOW if window is not None and core in window else _FREE)
    return _Drawn(host, own, tuple(marks), in_use, tuple(ranges(cordoned & in_use)))


def _summarised(drawn: Sequence[_Drawn], pen: _Pen) -> list[str]:
    """Returns blocks and lines for fleets that are too large for one picture a host."""
    alike: dict[tuple[object, ...], list[_Drawn]] = {}
    for view in drawn:
        alike.setdefault(view.look, []).append(view)
    groups = list(alike.values())
    pictured = [group for group in groups if not group[0].empty]
    blocks = [_block(group, pen) for group in pictured[:MOST_PICTURES]]
    others = [view for group in pictured[MOST_PICTURES:] for view in group]
    if others:
        used, cores = sum(len(view.taken) for view in others), sum(view.host.cores for view in others)
        many = counted(len(others), "more host")
        blocks.append(f"{many}: {used} of {cores} cores in use; `-o json` has every replica\n")
    for group in groups:
        if group[0].empty:
            host = group[0].host
            words = ["no replicas", *([f"{host.cores} cores"] if host.cores else []), *_kind(host)]
            blocks.append("\n".join(_filled(f"{_hosts(group)}: ", words, ", ", "  ")) + "\n")
    return blocks


def host_names(names: Sequence[str]) -> str:
    """Returns a short text such as "5 hosts, inf2.48xlarge/0-3,7"."""
    if len(names) == 1:
        return names[0]
    numbers: dict[str, list[int]] = {}
    for name in names:
        kind, _, number = name.rpartition("/")
        if not (kind and number.isdecimal()):
            return f"{len(names)} hosts like {names[0]}"
        numbers.setdefault(kind, []).append(int(number))
    parts = []
    for kind, indices in numbers.items():
        runs = ranges(indices)
        parts.append(f"{kind}/{','.join(runs[:3])}" + (",..." if len(runs) > 3 else ""))
    return f"{len(names)} hosts, {', '.join(parts[:2])}" + (", ..." if len(parts) > 2 else "")


def _hosts(group: Sequence[_Drawn]) -> str:
    return host_names([view.host.name for view in group])


def _kind(host: Host) -> list[str]:
    """Returns a short description of the machine."""
    topology = host.topology
    if topology is None:
        return [f"{len(host.cpus)} CPUs, no NeuronCores"]
    shape = {"ring": "in a ring", "line": "in a line", "torus": "in a 4 x 4 torus", "switch": "on a switch"}
    words = [f"{topology.devices} devices {shape[topology.link]}"] if topology.link in shape else []
    if topology.lnc is not None:
        words.append(f"LNC {topology.lnc}")
    if host.emulated:
        words.append("emulated")
    return words


def _block(group: Sequence[_Drawn], pen: _Pen) -> str:
    """Returns the header, picture and legend of one host, or of several identical ones."""
    view = group[0]
    host, apart = view.host, len(group) == 1
    if host.topology is None:
        lines = [f"{_hosts(group)}: {', '.join(_kind(host))}"]
    else:
        used = f"{len(view.taken)} of {host.cores} cores in use" + ("" if apart else " on each")
        lines = _filled(f"{_hosts(group)}: ", [used, *_kind(host)], ", ", "  ")
        lines += _picture(host, _cells(view, pen, apart), pen)
    lines += _legend(view, pen, apart)
    present = dict.fromkeys(mark for core, mark in enumerate(view.marks) if core not in view.taken)
    signs = [f"{pen.paint(sign)} {word}" for sign, word in _SIGNS.items() if sign in present]
    if view.cordoned_in_use:
        signs.append(f"cordoned in use: {','.join(view.cordoned_in_use)}")
    if signs:
        lines.append("  " + "   ".join(signs))
    return "\n".join(lines) + "\n"


def _filled(start: str, parts: Sequence[str], separator: str, indent: str) -> list[str]:
    """Returns ``start`` and the parts, wrapped at WIDTH."""
    lines = [start]
    for i, part in enumerate(parts):
        text = part + (separator.rstrip() if i + 1 < len(parts) else "")
        if i and len(lines[-1]) + len(text) + 1 > WIDTH:
            lines.append(indent + text)
        else:
            lines[-1] += (" " if i else "") + text
    return lines


def _cells(view: _Drawn, pen: _Pen, apart: bool) -> list[str]:
    """Returns the two columns of each core. In a picture of several hosts, replicas are numbered from 0 on each."""
    cells = list(view.marks)
    counted: dict[str, int] = {}
    for placement in view.placements:
        number = placement.replica if apart else counted.get(placement.model, 0)
        counted[placement.model] = counted.get(placement.model, 0) + 1
        sign = _NUMBERS[number % len(_NUMBERS)]
        for core in placement.cores or ():
            if core < len(cells):
                cells[core] = pen.letters[placement.model] + sign
    return cells


def _picture(host: Host, cells: Sequence[str], pen: _Pen) -> list[str]:
    """Returns the devices, the number of each one's first core, and the links between devices."""
    assert host.topology is not None
    topology = host.topology
    per, width = topology.cores_per_device, 2 * topology.cores_per_device
    firsts = list(range(0, len(cells), per))
    devices = ["".join(pen.paint(cell) for cell in cells[first : first + per]) for first in firsts]
    if topology.link == "torus":
        return _torus(devices, firsts, width, _JOINTS.get(per, 1))
    wide = _TORUS if topology.link == "switch" else len(devices)
    rows = [slice(first, first + wide) for first in range(0, len(devices), wide)]
    numbers = ["  core   " + " ".join(f"{first:<{width}}" for first in firsts[row]).rstrip() for row in rows]
    if topology.link != "ring":
        joint = "-" if topology.link == "line" else " "
        return [
            line for at, row in zip(numbers, rows, strict=True) for line in (at, _INDENT + joint.join(devices[row]))
        ]
    inside = len(devices) * (width + 1) - 1
    return [*numbers, f"{_INDENT[:-2]},-{'-'.join(devices)}-.", f"{_INDENT[:-2]}'{'-' * (inside + 2)}'"]


def _torus(devices: Sequence[str], firsts: Sequence[int], width: int, joint: int) -> list[str]:
    """Returns the rows of devices; bars and dashes at an edge continue at the opposite edge."""
    lines = []
    gap = "-" * joint
    margin = " " * (len(_INDENT) - joint if joint < 3 else len(_INDENT))
    for row in range(0, len(devices), _TORUS):
        bars = [f"|{first}".ljust(width + joint) for first in firsts[row : row + _TORUS]]
        head = "  core" if row == 0 else ""
        lines.append(head.ljust(len(margin) + joint) + "".join(bars).rstrip())
        lines.append(margin + gap + gap.join(devices[row : row + _TORUS]) + gap)
    lines.append(" " * (len(margin) + joint) + "".join("|".ljust(width + joint) for _ in range(_TORUS)).rstrip())
    return [*lines, f"{_INDENT}(a link at an edge continues at the opposite edge)"]


def _legend(view: _Drawn, pen: _Pen, apart: bool) -> list[str]:
    """Returns a line for each model on the host: its letter and the places of its replicas, if they fit."""
    lines = []
    for model in dict.fromkeys(placement.model for placement in view.placements):
        own = [placement for placement in view.placements if placement.model == model]
        each = _threads([placement.threads for placement in own])
        start = f"{pen.letters[model]} {model}  "
        if len(own) == 1 and apart:
            start = f"{pen.letters[model]} {model}/{own[0].replica}  "
            description = f"{_range(own[0].cores)}, {each}"
        elif own[0].cores is None:
            description = f"{counted(len(own), 'replica')}, no cores, {each}"
        else:
            description = ", ".join(f"{placement.replica} on {placement.cores}" for placement in own) + f"; {each}"
            if not apart or len(start) + len(description) + 2 > WIDTH:
                description = f"{counted(len(own), 'replica')} of {counted(len(own[0].cores), 'core')}, {each}"
        text = start + description
        if len(text) + 2 > WIDTH:
            text = f"{start.rstrip()}\n      {description}"
        lines.append("  " + pen.paint(text[0]) + text[1:])
    return lines


def _range(cores: CoreRange | None) -> str:
    if cores is None:
        return "no cores"
    return f"{plural(len(cores), 'core')} {cores}"


def _threads(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    if least != most:
        return f"{least} to {most} threads each"
    noun = counted(most, "thread")
    return noun + (" each" if len(counts) > 1 else "")
