"""Which replica a request goes to for what it has read, and how often another one is tried."""

from __future__ import annotations

from collections.abc import Callable

from tests.fleet import until
from tests.orchestrator.gateway.test_routing import Asked, filled
from tests.orchestrator.gateways import LiveGateway, routes
from tests.served import Served

Make = Callable[..., Served]
EXPLAINED = {"x-corewright-explain": "1"}


def replica_of(request: Asked) -> str:
    return request.answer().headers["x-corewright-replica"]


def test_a_prompt_prefers_the_replica_with_its_prefix(gateway: LiveGateway, replica: Make) -> None:
    """It does not wait for a full replica, and a small common part does not count."""
    first, second = replica(slots=1, stepped=True, prefix_block=4), replica(slots=1, prefix_block=4)
    gateway.serve(routes("m", first, second))
    with filled(gateway, first, prompt="nothing in common"):
        assert replica_of(Asked(gateway, prompt="once upon a time there was")) == "m/1"
    again = Asked(gateway, prompt="once upon a time there were two", headers=EXPLAINED)
    assert replica_of(again) == "m/1"
    assert "affinity=prefix" in again.answer().headers["x-corewright-decision"]
    short = Asked(gateway, prompt="once" + " another tale altogether" * 4, headers=EXPLAINED)
    assert "affinity" not in short.answer().headers["x-corewright-decision"]
    other = Asked(gateway, prompt="nothing in common with that", headers=EXPLAINED)
    assert replica_of(other) == "m/0"


def test_a_request_is_tried_on_at_most_three_replicas(gateway: LiveGateway, replica: Make) -> None:
    """After two retries its client gets the error that the replica was lost."""
    left = [replica(slots=1, stepped=True) for _ in range(4)]
    gateway.serve(routes("m", *left))
    until(lambda: gateway.queue("m").links.slots == 4, 10, "all are reached")
    request = Asked(gateway)
    for attempt in range(3):
        until(lambda: any(served.in_step for served in left), 10, f"attempt {attempt}")
        taken = next(served for served in left if served.in_step)
        left.remove(taken)
        taken.kill()
    assert request.answer().status_code == 503
    assert request.code() == "replica_lost"
    assert not left[0].in_step
