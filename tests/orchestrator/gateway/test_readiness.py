"""A gateway is ready once it can tokenize for the models of the fleet that starts: no first request waits for that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from orchestrator.cluster.gateway_start import is_waiting, wait_for_gateway
from orchestrator.gateway.serving import model_queue, tokenizers
from orchestrator.messages.replica_states import ModelState
from orchestrator.messages.route_table import ModelRoutes
from tests.fleet import until
from tests.orchestrator.gateways import LiveGateway, routes
from tests.served import Served
from workers.messages.engine_protocol import EngineLoadError
from workers.text.tokenizer import PromptTokenizer
from workers.text.tokenizer_pool import TokenizerPool

Make = Callable[..., Served]


class SlowTokenizers:
    """Loads end when a test says so."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.failure: EngineLoadError | None = None
        self._load = tokenizers._load

    def __call__(self, pool: TokenizerPool, routes: ModelRoutes) -> PromptTokenizer:
        assert self.may_end.wait(20)
        if self.failure is not None:
            raise self.failure
        return self._load(pool, routes)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowTokenizers]:
    load = SlowTokenizers()
    monkeypatch.setattr(tokenizers, "_load", load)
    yield load
    load.may_end.set()


def test_a_gateway_is_not_ready_before_its_tokenizers(
    slow: SlowTokenizers, fresh_gateway: LiveGateway, replica: Make
) -> None:
    """Although every replica is: the first request would wait for seconds."""
    fresh_gateway.serve(routes("m", replica()))

    assert "m: its tokenizer is loading" in fresh_gateway.http.get("/readyz").text
    slow.may_end.set()
    until(lambda: fresh_gateway.http.get("/readyz").status_code == 200, 10, "it is ready")


def test_a_tokenizer_that_cannot_be_loaded_keeps_no_gateway_from_being_ready(
    slow: SlowTokenizers, fresh_gateway: LiveGateway, replica: Make
) -> None:
    """The requests of its model get the cause; other models are served."""
    slow.failure = EngineLoadError("bad-tokenizer", "it is damaged")
    fresh_gateway.serve(routes("m", replica()))
    slow.may_end.set()

    until(lambda: fresh_gateway.http.get("/readyz").status_code == 200, 10, "it is ready")


def test_the_tokenizer_of_a_later_model_leaves_a_gateway_ready(
    slow: SlowTokenizers, fresh_gateway: LiveGateway, replica: Make
) -> None:
    """Otherwise a load balancer would take the gateway away from the other models."""
    slow.may_end.set()
    fresh_gateway.serve(routes("m", replica()))
    until(lambda: fresh_gateway.http.get("/readyz").status_code == 200, 10, "it is ready")
    slow.may_end.clear()
    fresh_gateway.serve(routes("m", replica()), routes("n", replica(), engine="cpu", source="/models/n"))

    assert fresh_gateway.http.get("/readyz").status_code == 200


def test_a_fleet_that_starts_waits_for_its_gateways_tokenizers(
    slow: SlowTokenizers, fresh_gateway: LiveGateway, replica: Make
) -> None:
    """`up` reports it as ready after that."""
    fresh_gateway.serve(routes("m", replica()))
    assert is_waiting(fresh_gateway.url)

    wait_for_gateway(fresh_gateway.url, slow.may_end.set)

    assert fresh_gateway.http.get("/readyz").status_code == 200


def test_a_gateway_that_cannot_be_queried_is_not_waited_for() -> None:
    """Such as one that accepts certificates only."""
    assert not is_waiting("http://127.0.0.1:1")
    assert not is_waiting("https://127.0.0.1:1")


def test_a_model_that_should_always_have_a_replica_makes_the_gateway_unready_without_one(
    fresh_gateway: LiveGateway, replica: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a minute, or twice an expected start; a model that may have none, or that was unloaded, does not."""
    monkeypatch.setattr(model_queue, "MAX_BARE_S", 0.2)
    served = msgspec.structs.replace(routes("m", replica()), required=True)
    fresh_gateway.serve(served)
    until(lambda: fresh_gateway.http.get("/readyz").status_code == 200, 10, "it is ready")
    bare = msgspec.structs.replace(served, replicas=[], state=ModelState.FAILED)

    fresh_gateway.serve(bare)
    until(lambda: "m: no replica for 0 s" in fresh_gateway.http.get("/readyz").text, 10, "it reports the model")
    fresh_gateway.serve(msgspec.structs.replace(bare, start_s=60.0))
    assert fresh_gateway.http.get("/readyz").status_code == 200
    fresh_gateway.serve(msgspec.structs.replace(bare, required=False))
    assert fresh_gateway.http.get("/readyz").status_code == 200
