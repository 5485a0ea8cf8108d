"""A run of the simulator."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from orchestrator.simulate.simulated_model import SimModel
from orchestrator.simulate.simulated_queue import Choice, Measured, SimulatedQueue
from orchestrator.simulate.simulated_replica import SimReplica
from orchestrator.simulate.simulated_request import Arrival
from orchestrator.simulate.virtual_clock import Clock


def serve_fixed(
    models: Iterable[SimModel],
    arrivals: Iterable[Arrival],
    *,
    replicas: Mapping[str, Sequence[SimReplica] | int],
    gateways: int = 1,
    choice: Choice | None = None,
    seed: int = 0,
    since: float = 0.0,
    until: float = math.inf,
) -> dict[str, Measured]:
    """Requests to replicas that are ready from the beginning and stay, without planner and autoscaler.

    ``replicas`` are those of each model, or how many; ``choice`` is another router than production's, which may send
    more requests to a replica than it has slots, and knows one gateway only; ``since``: requests that come earlier are
    not measured. The run ends when all requests have, or at ``until``.
    """
    clock = Clock()
    desks: dict[str, SimulatedQueue] = {}
    for model in models:
        desk = desks[model.name] = SimulatedQueue(model, clock, gateways=gateways, seed=seed, choice=choice)
        desk.since = since
        given = replicas[model.name]
        for replica in [SimReplica(model, i) for i in range(given)] if isinstance(given, int) else given:
            desk.add(replica)
    clock.run(arrivals, lambda arrival: desks[arrival.model].arrive(arrival), until)
    return {name: desk.measured for name, desk in desks.items()}
