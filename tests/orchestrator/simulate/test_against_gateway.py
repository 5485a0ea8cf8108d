"""The simulator against production: the gateway's queue and links, and the worker's batcher, in virtual time."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

import workers
from benchmarks.routing_parts.fixed_replicas import serve_fixed
from benchmarks.scaling_parts.scenarios import sim_model
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.serving import model_queue, replica_link, ticket
from orchestrator.gateway.serving.model_queue import ModelQueue
from orchestrator.gateway.serving.replica_link import ReplicaLink
from orchestrator.gateway.serving.replica_link_pool import LinkSettings
from orchestrator.gateway.serving.ticket import SchedulingParameters, Ticket
from orchestrator.messages.replica_states import ModelState
from orchestrator.messages.route_table import ModelRoutes, Route
from orchestrator.process.version import corewright_version
from orchestrator.simulate.scenario import Arrival, SimModel
from orchestrator.simulate.simulated_replica import SimReplica, SimRequest
from tests.orchestrator.simulate.test_kernel import BUCKETS, TimedEngine
from workers.batching.batcher import Batcher
from workers.messages.requests import GenerateRequest, TokenEvent
from workers.messages.wire import FrameReader, Step, Submit, Welcome, encode
from workers.text.tokenizer import ByteTokenizer

Sent = tuple[str, int, float]
"""One decision: a request is sent to a replica, at a time."""


class VirtualReplica:
    """A batcher with an engine whose steps take virtual time, at the other end of a gateway's link."""

    def __init__(self, model: SimModel, index: int, sent: list[Sent], clock: SimpleNamespace) -> None:
        self.engine = TimedEngine(model)
        self.engine.load()
        self.batcher = Batcher(self.engine, ByteTokenizer(), self._emit, clock=lambda: self.engine.now)
        self.link: ReplicaLink | None = None
        self.steps: list[tuple[float, list[TokenEvent]]] = []  # results of the current step, and when they come
        self._index, self._sent, self._clock = index, sent, clock
        self._reader = FrameReader()

    def write(self, data: bytes) -> None:
        """As the link's transport."""
        for message in self._reader.feed(data):
            if isinstance(message, Submit):
                self._sent.append((message.request.id, self._index, self._clock.now))
                self.batcher.submit(message.request)

    @property
    def due(self) -> float:
        return self.steps[0][0] if self.steps else math.inf

    def step(self) -> None:
        """Starts the next step, unless one is running."""
        if not self.steps:
            self.engine.now = self._clock.now
            self.batcher.step()

    def deliver(self) -> None:
        """Sends the results to the gateway; the next step begins before the gateway can reply."""
        assert self.link is not None
        _, events = self.steps.pop(0)
        self.step()
        self.link.data_received(encode(Step(events)))

    def _emit(self, events: list[TokenEvent]) -> None:
        self.steps.append((self.engine.now, events))


class Client:
    """A sink that notes when the first token came, as the gateway's replies do."""

    def __init__(self) -> None:
        self.failures: list[ApiError] = []

    def on_events(self, ticket: Ticket, now: float) -> None:
        ticket.stream.first_at = ticket.stream.first_at or now
        ticket.stream.take()

    def on_wait(self) -> None: ...
    def on_failure(self, ticket: Ticket, error: ApiError) -> None:
        self.failures.append(error)


async def gateway_decisions(
    models: list[SimModel], arrivals: list[Arrival], clock: SimpleNamespace
) -> tuple[list[Sent], int]:
    """Returns what the gateway sends where and when, and how many requests it refuses. Each of the models is one
    replica's: they may have different speeds."""
    model = models[0]
    sent, clients, refused = list[Sent](), list[Client](), 0
    routes = ModelRoutes(
        name="m",
        state=ModelState.READY,
        reason=None,
        engine="echo",
        source=None,
        max_len=BUCKETS[-1],
        max_queue=model.spec.max_queue,
        queue_order=model.spec.queue_order,
        loads_on_request=False,
        replicas=[Route(f"m/{i}", 1, "/nowhere") for i in range(len(models))],
    )
    queue = ModelQueue(routes, LinkSettings("g", "t"), wake=lambda name: None)
    fleet = [VirtualReplica(own, i, sent, clock) for i, own in enumerate(models)]
    package = str(Path(workers.__file__).parent)
    welcome = encode(Welcome(corewright_version(), package, model.slots, BUCKETS[-1], BUCKETS[-1], 256))
    for replica, route in zip(fleet, routes.replicas, strict=True):
        replica.link = queue.links._links[route] = queue.links.new_link(route)
        replica.link.connection_made(cast(asyncio.Transport, replica))
        replica.link.data_received(welcome)
    coming = list(enumerate(arrivals, start=1))
    while coming or any(replica.steps for replica in fleet):
        due = min(fleet, key=lambda replica: replica.due)
        if coming and coming[0][1].at <= due.due:
            number, arrival = coming.pop(0)
            clock.now = arrival.at
            request = GenerateRequest(
                id=str(number), prompt_ids=[1] * arrival.prompt_tokens, max_tokens=arrival.output_tokens
            )
            terms = SchedulingParameters(arrival.key, priority=arrival.priority, session=arrival.session)
            clients.append(Client())
            try:
                queue.submit(request, clients[-1], None, terms)
            except ApiError:
                refused += 1
        else:
            clock.now = due.due
            due.deliver()
        await asyncio.sleep(0)  # the links write what this turn of the loop has sent
        for replica in fleet:
            replica.step()
    return sent, refused + sum(len(client.failures) for client in clients)


def simulator_decisions(models: list[SimModel], arrivals: list[Arrival]) -> tuple[list[Sent], int]:
    """Returns the same of the simulator."""
    sent = list[Sent]()

    class Recorded(SimReplica):
        def send(self, request: SimRequest, now: float) -> None:
            sent.append((str(request.number), self.index, now))
            super().send(request, now)

    replicas = [Recorded(own, i) for i, own in enumerate(models)]
    measured = serve_fixed(models[:1], arrivals, replicas={"m": replicas})["m"]
    return sent, measured.refused


def recorded(seed: int, count: int, rate: float, **columns: list[Any]) -> list[Arrival]:
    """Returns Poisson arrivals with random keys, priorities and sessions."""
    draw, at, arrivals = Random(seed), 0.0, list[Arrival]()
    for _ in range(count):
        at += draw.expovariate(rate)
        more = {name: draw.choice(values) for name, values in columns.items()}
        arrivals.append(Arrival(at, "m", draw.randint(1, 60), draw.randint(2, 40), **more))
    return arrivals


def replicas_of(order: Any) -> list[SimModel]:
    """Returns a model for each replica. No two have the same step: what ends at the same time ends in any order."""
    return [
        sim_model(
            "m",
            slots=3,
            step_s=step_s,
            prefill_base_s=2 * step_s,
            buckets=BUCKETS,
            prefill_tokens=BUCKETS[-1],
            max_queue=12,
            queue_order=order,
        )
        for step_s in (0.0313, 0.0327, 0.0341)
    ]


@pytest.mark.parametrize(
    ("columns", "order"),
    [
        ({}, "fair"),
        ({"key": ["a", "b", "c"]}, "fair"),
        ({"priority": [0, 0, 0, -1, 2]}, "fair"),
        ({"session": ["", "s", "t", "u"]}, "fair"),
        ({"key": ["a", "b"], "priority": [0, 1], "session": ["", "s"]}, "deadline"),
    ],
    ids=["plain", "keys", "priorities", "sessions", "deadline order"],
)
@pytest.mark.parametrize("rate", [10.0, 30.0], ids=["calm", "overloaded"])
async def test_simulator_and_gateway_take_the_same_decisions(
    columns: dict[str, list[Any]], order: Any, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request goes to the same replica at the same time, and as many are refused."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    for module in (model_queue, replica_link, ticket):
        monkeypatch.setattr(module, "time", clock)
    models = replicas_of(order)
    arrivals = recorded(7, 400, rate, **columns)
    sent, refused = await gateway_decisions(models, arrivals, clock)
    simulated, simulated_refused = simulator_decisions(models, arrivals)
    assert [(id, replica) for id, replica, _ in simulated] == [(id, replica) for id, replica, _ in sent]
    assert [at for _, _, at in simulated] == pytest.approx([at for _, _, at in sent])
    assert simulated_refused == refused > 0
