"""The serving loop of the simulator with a fixed set of replicas."""

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
    """Simulates replicas that are ready from the start and stay, without the planner and the autoscaler.

    ``replicas`` are those of each model, or their number. ``choice`` replaces production's router; it may send more
    requests to a replica than it has slots, and supports one gateway only. Requests before ``since`` are not measured.
    The run ends when all requests have ended, or at ``until``.
    """
    clock = Clock()
    queues: dict[str, SimulatedQueue] = {}
    for model in models:
        queue = queues[model.name] = SimulatedQueue(model, clock, gateways=gateways, seed=seed, choice=choice)
        queue.since = since
        own = replicas[model.name]
        for replica in [SimReplica(model, i) for i in range(own)] if isinstance(own, int) else own:
            queue.add(replica)
    clock.run(arrivals, lambda arrival: queues[arrival.model].arrive(arrival), until)
    return {name: queue.measured for name, queue in queues.items()}
