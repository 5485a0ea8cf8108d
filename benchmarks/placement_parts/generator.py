"""Fleets made of a seed. The recorded results know them by their digest: a change here makes them void."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.placement_parts.firstfit import FirstFit, openings
from benchmarks.placement_parts.fleet import Fleet, Machine, Model, Pinned, Replica
from benchmarks.placement_parts.rules import FAMILY, MEMORY_GIB, STEP

KINDS: tuple[tuple[str, ...], ...] = (
    ("inf2.48xlarge",),
    ("inf2.48xlarge",),
    ("trn1.32xlarge",),
    ("inf2.48xlarge", "inf2.24xlarge"),
    ("trn2.48xlarge",),
    ("inf2.48xlarge",),
    ("inf2.48xlarge", "trn1.32xlarge"),
)
"""The hosts of a fresh fleet, by seed. Of two types the first is there more often."""

MODELS_OF_DEGREE: Mapping[int, int] = {1: 12, 2: 10, 4: 8, 8: 5, 12: 2, 24: 3}
"""The forty models of a running fleet."""

ARRIVING: Mapping[int, float] = {1: 0.37, 2: 0.31, 4: 0.19, 8: 0.10, 12: 0.01, 24: 0.02}
"""How often a replica of each degree arrives in the history of a running fleet."""

REPLACING: Mapping[int, float] = {1: 0.35, 2: 0.20, 4: 0.15, 8: 0.20, 12: 0.03, 24: 0.07}
"""The same for those that come for the ended ones: larger, so that many find no free range without moves."""

PEAK, EBB, WANTED = 0.98, 0.80, 0.95
"""Cores in use at the busiest, before the churn, and wanted after it: with these, some 8 replicas a host."""

PINNED_SHARE = 0.05
CHURNED_SHARE = 0.15


def fresh(seed: int, hosts: int, constrained: bool = False) -> Fleet:
    """An empty fleet that is asked for more than it has: 1.1 to 2 times its cores.

    In three priority classes, with replicas that are required and others that exceed ``min``; some cores are reserved
    or quarantined, some replicas pinned. ``constrained``: most models are spread, and all take host memory.
    """
    rng = random.Random(f"fresh {seed} {hosts} {constrained}")
    kinds = KINDS[seed % len(KINDS)]
    chosen = [kinds[0] if i == 0 or rng.random() < 0.6 else rng.choice(kinds) for i in range(hosts)]
    if len(kinds) > 1 and hosts > 1:
        chosen[-1] = kinds[1]
    machines = tuple(_machine(rng, i, instance) for i, instance in enumerate(chosen))
    degrees = sorted({tp for instance in chosen for tp in STEP[FAMILY[instance]]})
    cores = sum(machine.free.bit_count() for machine in machines)
    demanded = cores * rng.uniform(1.1, 2.0)
    count = rng.randint(max(3, len(degrees)), 14)
    models = []
    for i in range(count):
        tp = degrees[i] if i < len(degrees) and rng.random() < 0.8 else rng.choice(degrees)
        wanted = max(1, round(demanded / count / tp * rng.uniform(0.3, 1.7)))
        model = Model(f"m{i}", tp, min(wanted, 1000), rng.randint(0, min(wanted, 1000)), rng.choice((0, 0, 0, 1, 2)))
        if constrained:
            spread = rng.choice((None, 1, 2, 3))
            model = replace(model, spread=spread, memory_gib=max(1, round(tp * rng.uniform(4, 64))))
        models.append(model)
    return Fleet(machines, _with_some_pins(rng, machines, models))


def _machine(rng: random.Random, i: int, instance: str) -> Machine:
    free = range(Machine("", instance).free.bit_length())
    reserved = rng.sample(free, rng.choice((0, 0, 0, 1, 2)))
    quarantined = rng.sample(free, rng.choice((0, 0, 0, 0, 1, 2, 3)))
    return Machine(f"{instance}/{i}", instance, tuple(sorted(reserved)), tuple(sorted(quarantined)))


def _with_some_pins(rng: random.Random, machines: Sequence[Machine], models: Sequence[Model]) -> tuple[Model, ...]:
    """Pins that can all be met at once, spread and host memory included."""
    free = {machine.name: machine.free for machine in machines}
    memory = {machine.name: MEMORY_GIB[machine.instance] for machine in machines}
    result = []
    for model in models:
        pins: list[Pinned] = []
        for _ in range(min(model.min, rng.choice((0, 0, 0, 1, 2)))):
            machine = rng.choice(machines)
            places = openings(free[machine.name], machine.instance, model.tp)
            full = model.spread is not None and sum(pin.host == machine.name for pin in pins) >= model.spread
            if not places or full or memory[machine.name] < (model.memory_gib or 0):
                continue
            first = rng.choice([i for i in range(places.bit_length()) if places >> i & 1])
            free[machine.name] &= ~(((1 << model.tp) - 1) << first)
            memory[machine.name] -= model.memory_gib or 0
            pins.append(Pinned(machine.name, first))
        result.append(replace(model, pins=tuple(pins)))
    return tuple(result)


def churned(seed: int, hosts: int) -> Fleet:
    """A running fleet of inf2.48xlarge whose layout is what first fit left of a history of arrivals and departures.

    5 % of the replicas are pinned where they are; 15 % have just ended, and as many new ones of other degrees are
    wanted, up to 95 % of all cores. All that is wanted fits beside the pins: largest first packs it.
    """
    attempts = (_churned(random.Random(f"churned {seed} {hosts} {attempt}"), hosts) for attempt in range(100))
    return next(fleet for fleet in attempts if fleet is not None)


def _churned(rng: random.Random, hosts: int) -> Fleet | None:
    """None where largest first does not find room for what runs."""
    machines = tuple(Machine(f"inf2.48xlarge/{i}", "inf2.48xlarge") for i in range(hosts))
    held = _history(rng, machines, 8 * hosts)
    names = {tp: [f"tp{tp}-{i}" for i in range(n)] for tp, n in MODELS_OF_DEGREE.items()}
    indices: Counter[str] = Counter()
    replicas = []
    for i, first, tp in held:
        name = rng.choice(names[tp])
        replicas.append(Replica(name, indices[name], machines[i].name, first, first + tp - 1))
        indices[name] += 1
    order = rng.sample(replicas, len(replicas))
    pinned = order[: round(PINNED_SHARE * len(order))]
    ended = order[len(pinned) : len(pinned) + round(CHURNED_SHARE * len(order))]
    gone = set(ended)
    running = tuple(replica for replica in replicas if replica not in gone)
    new = _new_ones(rng, machines, running, pinned, len(ended))
    if new is None:
        return None
    wanted = Counter(replica.model for replica in running) + Counter(rng.choice(names[tp]) for tp in new)
    pins: defaultdict[str, list[Pinned]] = defaultdict(list)
    for replica in sorted(pinned, key=lambda replica: (replica.model, replica.index)):
        pins[replica.model].append(Pinned(replica.host, replica.first))
    models = [
        Model(name, tp, wanted[name], wanted[name], pins=tuple(pins[name]))
        for tp, own in names.items()
        for name in own
        if wanted[name]
    ]
    rng.shuffle(models)
    return Fleet(machines, tuple(models), running)


def _history(rng: random.Random, machines: Sequence[Machine], count: int) -> list[tuple[int, int, int]]:
    """What lies where, (host, first core, degree), when a fleet that was full has become less busy."""
    place = FirstFit(machines, tuple(ARRIVING))
    cores = 24 * len(machines)
    held: list[tuple[int, int, int]] = []
    used = 0

    def end_one() -> int:
        at = rng.randrange(len(held))
        held[at], held[-1] = held[-1], held[at]
        i, first, tp = held.pop()
        place.give(i, first, tp)
        return tp

    for _ in range(3 * count):
        tp = _draw(rng, ARRIVING)
        while used + tp > PEAK * cores:
            used -= end_one()
        spot = place.find(tp)
        if spot is not None:
            place.take(*spot, tp)
            held.append((*spot, tp))
            used += tp
    while used > EBB * cores:
        used -= end_one()
    return sorted(held)


def _draw(rng: random.Random, weights: Mapping[int, float]) -> int:
    return rng.choices(tuple(weights), tuple(weights.values()))[0]


def _new_ones(
    rng: random.Random,
    machines: Sequence[Machine],
    running: Sequence[Replica],
    pinned: Sequence[Replica],
    ended: int,
) -> list[int] | None:
    """The degrees of those that come for the ended ones, so that all of it fits. None: that was not found."""
    new = [_draw(rng, REPLACING) for _ in range(ended)]
    stay = [replica.last - replica.first + 1 for replica in running]
    room = WANTED * 24 * len(machines) - sum(stay)
    smaller = {2: 1, 4: 2, 8: 4, 12: 8, 24: 8}
    while (excess := sum(new) - room) > 0 or not _packs(machines, [*_unpinned(stay, pinned), *new], pinned):
        larger = sorted((i for i, tp in enumerate(new) if tp > 1), key=lambda i: (new[i] > 4, rng.random()))
        if not larger:
            return None
        for i in larger[: max(1, round(excess / 4))]:
            new[i] = smaller[new[i]]
    return new


def _unpinned(sizes: Sequence[int], pinned: Sequence[Replica]) -> list[int]:
    left = Counter(sizes) - Counter(replica.last - replica.first + 1 for replica in pinned)
    return list(left.elements())


def _packs(machines: Sequence[Machine], sizes: Sequence[int], pinned: Sequence[Replica]) -> bool:
    """Returns whether largest first finds room for all beside the pins."""
    place = FirstFit(machines, tuple(ARRIVING))
    number = {machine.name: i for i, machine in enumerate(machines)}
    for replica in pinned:
        place.take(number[replica.host], replica.first, replica.last - replica.first + 1)
    for tp in sorted(sizes, reverse=True):
        spot = place.find(tp)
        if spot is None:
            return False
        place.take(*spot, tp)
    return True
