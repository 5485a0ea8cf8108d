"""Finds the moves that free a given number of contiguous cores: the JSON of `corewright plan --defrag`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from orchestrator.control.decisions.relocation import move_costs
from orchestrator.control.decisions.rollout_step import cores_by_host, merged
from placements.facts.checkpoints import Checkpoint
from placements.facts.core_range import CoreRange, ranges
from placements.facts.topology import Host
from placements.planner.ledger import ledger
from placements.planner.plan import Move, Placement, Plan, Running, Window, defragment
from placements.resources.environ import threads
from placements.spec.problems import Problem
from placements.spec.schema import Spec

_NONE: Mapping[str, Any] = MappingProxyType({})


def defragmentation(
    spec: Spec,
    hosts: Sequence[Host],
    checkpoints: Mapping[str, Checkpoint],
    running: Sequence[Running],
    cores: int,
    *,
    quarantined: Mapping[str, frozenset[int]] = _NONE,
    cordoned: Mapping[str, frozenset[int]] = _NONE,
    load_s: Mapping[str, float] = _NONE,
    traffic: Mapping[str, float] = _NONE,
) -> dict[str, Any]:
    """Returns the window and its moves; a window of None and a problem if there is none.

    ``load_s`` and ``traffic`` are those of `relocation.move_costs`.
    """
    costs = move_costs(spec, load_s, traffic)
    blocked = merged(quarantined, cordoned)
    window = defragment(spec, hosts, checkpoints, running, blocked, cores=cores, costs=costs)
    moves = window.moves if window is not None else ()
    placements = _after(spec, hosts, running, moves)
    book = ledger(spec, hosts, Plan(placements), checkpoints, {}, quarantined, cordoned)
    measured = [load_s[move.after.model] for move in moves if move.after.model in load_s]
    return {
        "cores": cores,
        "window": None if window is None else {"host": window.host, "cores": str(window.cores)},
        "moves": [{**move.as_dict(), "load_s": load_s.get(move.after.model)} for move in moves],
        "load_s": round(float(sum(measured)), 3) if len(measured) == len(moves) else None,
        "placements": [placement.as_dict() for placement in placements],
        "hosts": [host.as_dict() for host in book.hosts],
        "problems": [problem.as_dict() for problem in _problems(window, hosts, placements, blocked, cores)],
    }


def _after(
    spec: Spec, hosts: Sequence[Host], running: Sequence[Running], moves: Sequence[Move]
) -> tuple[Placement, ...]:
    """Returns the running placements after the moves."""
    machines = {host.name: host for host in hosts}
    models = {model.name: model for model in spec.models}
    moved = {move.before: move.after for move in moves}
    placements = []
    for replica in running:
        host, model = machines.get(replica.host), models.get(replica.model)
        if replica in moved:
            placements.append(moved[replica])
        elif host is not None and model is not None:
            count = threads(model.threads, model.tp_degree, host)
            placements.append(
                Placement(replica.model, replica.replica, replica.host, replica.cores, count, host, model)
            )
    return tuple(placements)


def _problems(
    window: Window | None,
    hosts: Sequence[Host],
    placed: Sequence[Placement],
    blocked: Mapping[str, frozenset[int]],
    cores: int,
) -> list[Problem]:
    if window is not None:
        return []
    occupied, none = cores_by_host(placed), frozenset[int]()
    usable = {host.name: set(range(host.cores)) - host.reserved_cores - blocked.get(host.name, none) for host in hosts}
    free = {name: len(cores - occupied.get(name, none)) for name, cores in usable.items()}
    name = max(free, key=lambda name: free[name], default=None)
    if name is None:
        return [Problem("no-window", "error", "", "there is no host", "")]
    runs = [CoreRange.parse(run) for run in ranges(usable[name])]
    longest = max(runs, key=len, default=None)
    allowed = "none of its cores may be used" if longest is None else f"replicas may use {longest} there"
    fact = f"no moves open a window of {cores} cores: most are free on {name}, {free[name]}, and {allowed}"
    return [Problem("no-window", "error", "", fact, "request fewer cores, or remove replicas, or add a host")]
