"""Whether a layout is valid. Shares no code with the planner: rules and tables are written down anew."""

from __future__ import annotations

from collections import Counter, defaultdict

from benchmarks.placement_parts.fleet import Fleet, Layout, Replica
from benchmarks.placement_parts.rules import CORES, MEMORY_GIB, starts


class InvalidLayout(AssertionError):
    """A plan breaks a rule."""


def check(fleet: Fleet, layout: Layout, moves: int | None = 0) -> None:
    """Raise InvalidLayout with all that is wrong. ``moves`` is how many were allowed; None: any number."""
    found = violations(fleet, layout, moves)
    if found:
        raise InvalidLayout(f"{len(found)} violations: " + "; ".join(found[:10]))


def violations(fleet: Fleet, layout: Layout, moves: int | None = 0) -> list[str]:
    """One sentence for each rule that is broken, () when the layout is valid."""
    found: list[str] = []
    known = [replica for replica in layout.placed if replica.model in fleet.by_name]
    found.extend(f"{_name(replica)} is of no model" for replica in layout.placed if replica.model not in fleet.by_name)
    found.extend(_off_their_place(fleet, known))
    found.extend(_overlapping(layout.placed))
    found.extend(_off_their_pins(fleet, known))
    found.extend(_miscounted(fleet, layout))
    found.extend(_crowded(fleet, known))
    found.extend(_moved(fleet, layout, moves))
    return found


def _name(replica: Replica) -> str:
    return f"{replica.model}/{replica.index} on {replica.host}:{replica.first}-{replica.last}"


def _off_their_place(fleet: Fleet, placed: list[Replica]) -> list[str]:
    found = []
    machines = {machine.name: machine for machine in fleet.machines}
    for replica in placed:
        machine = machines.get(replica.host)
        tp = fleet.by_name[replica.model].tp
        if machine is None:
            found.append(f"{_name(replica)}: no such host")
            continue
        if replica.last - replica.first + 1 != tp:
            found.append(f"{_name(replica)}: not {tp} cores")
        if replica.first < 0 or replica.last >= CORES[machine.instance]:
            found.append(f"{_name(replica)}: outside the host")
        elif replica.first not in starts(machine.instance, tp):
            found.append(f"{_name(replica)}: {tp} cores may not begin there")
        for core in range(replica.first, replica.last + 1):
            if core in machine.reserved:
                found.append(f"{_name(replica)}: core {core} is reserved")
            if core in machine.quarantined:
                found.append(f"{_name(replica)}: core {core} is quarantined")
    return found


def _overlapping(placed: tuple[Replica, ...]) -> list[str]:
    found = []
    holders: dict[tuple[str, int], Replica] = {}
    for replica in placed:
        for core in range(replica.first, replica.last + 1):
            other = holders.setdefault((replica.host, core), replica)
            if other is not replica:
                found.append(f"{_name(replica)}: core {core} belongs to {_name(other)} too")
    return found


def _off_their_pins(fleet: Fleet, placed: list[Replica]) -> list[str]:
    """Of a model's placed replicas only as many are off its pins as it wants beside them."""
    found = []
    own: defaultdict[str, list[Replica]] = defaultdict(list)
    for replica in placed:
        own[replica.model].append(replica)
    for model in fleet.models:
        pins = {(pin.host, pin.first) for pin in model.pins}
        off = [replica for replica in own[model.name] if (replica.host, replica.first) not in pins]
        if len(off) > max(0, model.wanted - len(pins)):
            found.append(f"{model.name}: {len(off)} replicas lie off its {len(pins)} pins, {model.wanted} are wanted")
    return found


def _miscounted(fleet: Fleet, layout: Layout) -> list[str]:
    found: list[str] = []
    told = [(replica.model, replica.index) for replica in layout.placed] + list(layout.refused)
    found.extend(f"{model}/{index} is told {n} times" for (model, index), n in Counter(told).items() if n > 1)
    found.extend(f"{model}/{index} has no such index" for model, index in told if index < 0)
    counts = Counter(model for model, _ in told)
    found.extend(
        f"{model.name}: {counts[model.name]} replicas are told of, {model.wanted} are wanted"
        for model in fleet.models
        if counts[model.name] != model.wanted
    )
    return found


def _crowded(fleet: Fleet, placed: list[Replica]) -> list[str]:
    found = []
    together = Counter((replica.model, replica.host) for replica in placed)
    for (name, host), count in together.items():
        most = fleet.by_name[name].spread
        if most is not None and count > most:
            found.append(f"{name}: {count} replicas on {host}, at most {most} may be")
    memory: Counter[str] = Counter()
    for replica in placed:
        memory[replica.host] += fleet.by_name[replica.model].memory_gib or 0
    for machine in fleet.machines:
        if memory[machine.name] > MEMORY_GIB[machine.instance]:
            has = MEMORY_GIB[machine.instance]
            found.append(f"{machine.name}: {memory[machine.name]} GiB of host memory are taken, it has {has}")
    return found


def _moved(fleet: Fleet, layout: Layout, moves: int | None) -> list[str]:
    found = []
    before = {(replica.model, replica.index): replica for replica in fleet.running}
    after = {(replica.model, replica.index): replica for replica in layout.placed}
    told = {(old.model, old.index): (old, new) for old, new in layout.moves}
    for key, (old, new) in told.items():
        if before.get(key) != old or after.get(key) != new or old == new:
            found.append(f"the move of {_name(old)} to {_name(new)} did not happen")
    if moves is not None and len(layout.moves) > moves:
        found.append(f"{len(layout.moves)} replicas are moved, at most {moves} may be")
    for key, old in before.items():
        if key in after and after[key] != old and key not in told:
            found.append(f"{_name(old)} lies on {_name(after[key])} without a move")
    counts = Counter(replica.model for replica in fleet.running)
    for (name, index), old in before.items():
        surplus = name not in fleet.by_name or counts[name] > fleet.by_name[name].wanted
        if (name, index) not in after and (name, index) not in layout.refused and not surplus:
            found.append(f"{_name(old)} ends though it is wanted")
    return found
