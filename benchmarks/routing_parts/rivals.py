"""Other routers, from their definitions. All but the oracle see what production's sees. All but the last bind a request
to a replica when it arrives, and it waits there."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from random import Random

from benchmarks.routing_parts.fixed_replicas import Router
from orchestrator.simulate.simulated_replica import SimReplica, SimRequest


def random_router(seed: int) -> Router:
    """Any replica, with the same probability."""
    random = Random(f"random {seed}")
    return lambda replicas, request: random.choice(replicas)


def round_robin(seed: int) -> Router:
    """One replica after the other."""
    count = -1

    def route(replicas: Sequence[SimReplica], request: SimRequest) -> SimReplica:
        nonlocal count
        count += 1
        return replicas[count % len(replicas)]

    return route


def power_of_two(seed: int) -> Router:
    """Two different replicas at random; of these the one with fewer requests, waiting and live (Mitzenmacher, "The
    power of two choices in randomized load balancing"). Ray Serve routes like that."""
    random = Random(f"power of two {seed}")

    def route(replicas: Sequence[SimReplica], request: SimRequest) -> SimReplica:
        first, other = random.sample(replicas, 2)
        return first if first.live <= other.live else other

    return route


def shortest_queue(seed: int) -> Router:
    """Of all replicas the one with the fewest requests, waiting and live; a random one of several."""
    random = Random(f"shortest queue {seed}")

    def route(replicas: Sequence[SimReplica], request: SimRequest) -> SimReplica:
        fewest = min(replica.live for replica in replicas)
        return random.choice([replica for replica in replicas if replica.live == fewest])

    return route


def oracle(seed: int) -> Router:
    """Where the first token of the request comes soonest. It knows how long every answer will be, those that wait
    included, and plays every replica on until the request has its token."""
    return lambda replicas, request: min(replicas, key=lambda replica: first_token_at(replica, request))


def first_token_at(replica: SimReplica, request: SimRequest) -> float:
    """When it would come, if the request were sent there now."""
    played = copy.copy(replica)
    played._waiting = deque(replica._waiting)
    played.prefill = list(replica.prefill)
    played._ends = list(replica._ends)
    played.send(request, request.arrived_at)
    while request not in played.began:
        played.advance(played.due)
    return played.base
