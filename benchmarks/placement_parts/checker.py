"""Checks whether a layout is valid. Shares no code with the planner: rules and tables are written down anew."""

from __future__ import annotations

from collections import Counter, defaultdict

from benchmarks.placement_parts.fleet import Fleet, Layout, Replica
from benchmarks.placement_parts.rules import CORES, MEMORY_GIB, starts


class InvalidLayout(AssertionError):
    """A plan breaks a rule."""


def check(fleet: Fleet, layout: Layout, moves: int | None = 0) -> None:
    """Raise InvalidLayout with all that is wrong. ``moves`` is how many were allowed; None: any number."""
    violated = violations(fleet, layout, moves)
    if violated:
        raise InvalidLayout(f"{len(violated)} violations: " + "; ".join(violated[:10]))


def violations(fleet: Fleet, layout: Layout, moves: int | None = 0) -> list[str]:
    """One sentence for each rule that is broken, () when the layout is valid."""
    broken: list[str] = []
    known = [replica for replica in layout.placed if replica.model in fleet.by_name]
    broken.extend(f"{_name(replica)} is of no model" for replica in layout.placed if replica.model not in fleet.by_name)
    broken.extend(_off_their_place(fleet, known))
    broken.extend(_overlapping(layout.placed))
    broken.extend(_off_their_pins(fleet, known))
    broken.extend(_miscounted(fleet, layout))
    broken.extend(_crowded(fleet, known))
    broken.extend(_moved(fleet, layout, moves))
    return broken


def _name(replica: Replica) -> str:
    return f"{replica.model}/{replica.index} on {replica.host}:{replica.first}-{replica.last}"


def _off_their_place(fleet: Fleet, placed: list[Replica]) -> list[str]:
    broken = []
    machines = {machine.name: machine for machine in fleet.machines}
    for replica in placed:
        machine = machines.get(replica.host)
        tp = fleet.by_name[replica.model].tp
        if machine is None:
            broken.append(f"{_name(replica)}: no such host")
            continue
        if replica.last - replica.first + 1 != tp:
            broken.append(f"{_name(replica)}: not {tp} cores")
        if replica.first < 0 or replica.last >= CORES[machine.instance]:
            broken.append(f"{_name(replica)}: outside the host")
        elif replica.first not in starts(machine.instance, tp):
            broken.append(f"{_name(replica)}: {tp} cores may not begin there")
        for core in range(replica.first, replica.last + 1):
            if core in machine.reserved:
                broken.append(f"{_name(replica)}: core {core} is reserved")
            if core in machine.quarantined:
                broken.append(f"{_name(replica)}: core {core} is quarantined")
    return broken


def _overlapping(placed: tuple[Replica, ...]) -> list[str]:
    broken = []
    holders: dict[tuple[str, int], Replica] = {}
    for replica in placed:
        for core in range(replica.first, replica.last + 1):
            other = holders.setdefault((replica.host, core), replica)
            if other is not replica:
                broken.append(f"{_name(replica)}: core {core} belongs to {_name(other)} too")
    return broken


def _off_their_pins(fleet: Fleet, placed: list[Replica]) -> list[str]:
    """Of a model's placed replicas only as many are off its pins as it wants beside them."""
    broken = []
    own: defaultdict[str, list[Replica]] = defaultdict(list)
    for replica in placed:
        own[replica.model].append(replica)
    for model in fleet.models:
        pins = {(pin.host, pin.first) for pin in model.pins}
        off = [replica for replica in own[model.name] if (replica.host, replica.first) not in pins]
        if len(off) > max(0, model.wanted - len(pins)):
            broken.append(f"{model.name}: {len(off)} replicas lie off its {len(pins)} pins, {model.wanted} are wanted")
    return broken


def _miscounted(fleet: Fleet, layout: Layout) -> list[str]:
    broken: list[str] = []
    decided = [(replica.model, replica.index) for replica in layout.placed] + list(layout.refused)
    broken.extend(f"{model}/{index} is told {n} times" for (model, index), n in Counter(decided).items() if n > 1)
    broken.extend(f"{model}/{index} has no such index" for model, index in decided if index < 0)
    counts = Counter(model for model, _ in decided)
    broken.extend(
        f"{model.name}: {counts[model.name]} replicas are told of, {model.wanted} are wanted"
        for model in fleet.models
        if counts[model.name] != model.wanted
    )
    return broken


def _crowded(fleet: Fleet, placed: list[Replica]) -> list[str]:
    broken = []
    together = Counter((replica.model, replica.host) for replica in placed)
    for (name, host), count in together.items():
        most = fleet.by_name[name].spread
        if most is not None and count > most:
            broken.append(f"{name}: {count} replicas on {host}, at most {most} may be")
    memory: Counter[str] = Counter()
    for replica in placed:
        memory[replica.host] += fleet.by_name[replica.model].memory_gib or 0
    for machine in fleet.machines:
        if memory[machine.name] > MEMORY_GIB[machine.instance]:
            has = MEMORY_GIB[machine.instance]
            broken.append(f"{machine.name}: {memory[machine.name]} GiB of host memory are taken, it has {has}")
    return broken


def _moved(fleet: Fleet, layout: Layout, moves: int | None) -> list[str]:
    broken = []
    before = {(replica.model, replica.index): replica for replica in fleet.running}
    after = {(replica.model, replica.index): replica for replica in layout.placed}
    moved = {(old.model, old.index): (old, new) for old, new in layout.moves}
    for key, (old, new) in moved.items():
        if before.get(key) != old or after.get(key) != new or old == new:
            broken.append(f"the move of {_name(old)} to {_name(new)} did not happen")
    if moves is not None and len(layout.moves) > moves:
        broken.append(f"{len(layout.moves)} replicas are moved, at most {moves} may be")
    for key, old in before.items():
        if key in after and after[key] != old and key not in moved:
            broken.append(f"{_name(old)} lies on {_name(after[key])} without a move")
    counts = Counter(replica.model for replica in fleet.running)
    for (name, index), old in before.items():
        surplus = name not in fleet.by_name or counts[name] > fleet.by_name[name].wanted
        if (name, index) not in after and (name, index) not in layout.refused and not surplus:
            broken.append(f"{_name(old)} ends though it is wanted")
    return broken
