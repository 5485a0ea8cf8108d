"""The simulator's serving loop with a fixed set of replicas: without the planner and the autoscaler."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.simulate.scenario import Arrival, SimModel
from orchestrator.simulate.simulated_queue import Measured, SimLinks, SimulatedQueue
from orchestrator.simulate.simulated_replica import SimLink, SimReplica, SimRequest
from orchestrator.simulate.virtual_clock import Clock

Router = Callable[[Sequence[SimReplica], SimRequest], "SimReplica | None"]
"""An alternative router: returns the replica for a request; None: it waits in the queue until a request has ended."""


class RoutedQueue(SimulatedQueue):
    """The requests of one gateway to one model, sent by an alternative router, also to replicas without free slots."""

    binds_late = False

    def __init__(self, model: SimModel, clock: Clock, router: Router, *, since: float) -> None:
        self._router = router
        super().__init__(model, clock, since=since)

    def new_dispatcher(self, links: SimLinks) -> Dispatcher[SimRequest, SimLink]:
        return _RoutedDispatcher(self, links, self._router)


class _RoutedDispatcher(Dispatcher[SimRequest, SimLink]):
    def __init__(self, queue: RoutedQueue, links: SimLinks, router: Router) -> None:
        super().__init__(queue.model.queue, links, queue)
        self._replicas, self._all_links, self._router = queue.replicas, links, router

    def link_for(self, entry: SimRequest, now: float) -> SimLink | None:
        replica = self._router(self._replicas, entry)
        return next((link for link in self._all_links if link.replica is replica), None)


class _Over(Exception):
    """The run has reached its end."""


def _stop(_: object) -> None:
    raise _Over


def serve_fixed(
    models: Iterable[SimModel],
    arrivals: Iterable[Arrival],
    *,
    replicas: Mapping[str, Sequence[SimReplica] | int],
    gateways: int = 1,
    choice: Router | None = None,
    seed: int = 0,
    since: float = 0.0,
    until: float = math.inf,
) -> dict[str, Measured]:
    """Simulates replicas that are ready from the start and stay, until all requests have ended, or ``until``.

    ``replicas`` are those of each model, or their number. ``choice`` replaces production's router, and there is only
    one gateway then. Requests before ``since`` are not measured.
    """
    clock = Clock()
    queues: dict[str, SimulatedQueue] = {}
    for model in models:
        if choice is None:
            queue = SimulatedQueue(model, clock, gateways=gateways, seed=seed, since=since)
        else:
            queue = RoutedQueue(model, clock, choice, since=since)
        queues[model.name] = queue
        own = replicas[model.name]
        for replica in [SimReplica(model, i) for i in range(own)] if isinstance(own, int) else own:
            queue.add(replica)
    clock.at(until, _stop)
    with contextlib.suppress(_Over):
        clock.run(arrivals, lambda arrival: queues[arrival.model].arrive(arrival))
    return {name: queue.measured for name, queue in queues.items()}
