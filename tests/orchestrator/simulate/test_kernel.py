"""The simulator's kernel: replicas, queues, the virtual clock."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.routing_parts.fixed_replicas import serve_fixed
from benchmarks.scaling_parts.scenarios import sim_model
from orchestrator.simulate.scenario import Arrival, SimModel
from orchestrator.simulate.simulated_queue import Measured
from orchestrator.simulate.simulated_replica import SimReplica, SimRequest
from orchestrator.simulate.virtual_clock import Clock
from tests.searches import search
from workers.batching.batcher import Batcher
from workers.engines.echo.engine import EchoEngine
from workers.messages.requests import GenerateRequest, TokenEvent
from workers.text.tokenizer import ByteTokenizer

MODEL = sim_model("m", slots=2, step_s=0.1, prefill_base_s=0.05, max_queue=10**6)


def served(
    arrivals: Sequence[tuple[float, int]], model: SimModel = MODEL, replicas: int = 1, gateways: int = 1
) -> Measured:
    """Returns the measurements of requests, each given as (time, output tokens)."""
    requests = [Arrival(at, model.name, 10, tokens) for at, tokens in arrivals]
    return serve_fixed([model], requests, replicas={model.name: replicas}, gateways=gateways)[model.name]


def times(measured: Measured) -> list[tuple[float, float]]:
    """Returns (TTFT, latency) of each request, in the order in which they ended."""
    return [(round(a, 6), round(b, 6)) for a, b in zip(measured.ttfts, measured.latencies, strict=True)]


def test_a_single_request_takes_its_prefill_and_a_step_for_each_further_token() -> None:
    """Without other load."""
    assert times(served([(1.0, 3)])) == [(0.05, 0.25)]


def test_a_request_of_one_token_ends_with_its_prefill() -> None:
    """The prefill gives the first token."""
    assert times(served([(0.0, 1)])) == [(0.05, 0.05)]


def test_a_prompt_waits_for_the_step_that_runs() -> None:
    """Steps run from 0.05 on; one that comes at 0.2 is read at 0.25."""
    assert times(served([(0.0, 11), (0.2, 1)]))[0] == (0.1, 0.1)


def test_a_prefill_stalls_the_decodes_of_its_replica() -> None:
    """The running request ends later by the prefill of the other."""
    assert times(served([(0.0, 11), (0.2, 1)]))[1] == (0.05, 1.1)


def test_a_prefill_does_not_stall_another_replica() -> None:
    """Each replica has separate steps."""
    model = sim_model("m", slots=1, step_s=0.1, prefill_base_s=0.05)
    assert times(served([(0.0, 11), (0.2, 1)], model, replicas=2)) == [(0.05, 0.05), (0.05, 1.05)]


def test_after_a_prefill_live_requests_get_a_decode_before_the_next() -> None:
    """Step 2a of the batcher: the third prompt is read one decode after the second."""
    model = sim_model("m", slots=3, step_s=0.1, prefill_base_s=0.05)
    measured = times(served([(0.0, 100), (0.06, 50), (0.07, 50)], model))
    assert sorted(ttft for ttft, _ in measured) == pytest.approx([0.05, 0.14, 0.28])


def test_prompts_that_wait_are_read_together_where_they_fit() -> None:
    """Step 2c: two of 10 tokens within 32."""
    model = sim_model("m", slots=3, step_s=0.1, prefill_base_s=0.05, prefill_tokens=32)
    measured = times(served([(0.0, 100), (0.06, 50), (0.07, 50)], model))
    assert sorted(ttft for ttft, _ in measured) == pytest.approx([0.05, 0.13, 0.14])


def test_prompts_are_padded_to_their_bucket() -> None:
    """10 tokens cost 16."""
    model = sim_model("m", prefill_base_s=0.0, prefill_token_s=0.01, buckets=(16, 32))
    assert times(served([(0.0, 1)], model)) == [(0.16, 0.16)]


def test_the_attention_of_a_prompt_grows_with_its_square() -> None:
    """Of each of the prompts that are prefilled together, with its padding; replicas and estimates agree."""
    model = sim_model("m", slots=3, prefill_base_s=0.0, prefill_square_s=0.001, buckets=(16, 32), prefill_tokens=32)
    measured = times(served([(0.0, 1), (0.1, 1), (0.2, 1)], model))
    assert sorted(ttft for ttft, _ in measured) == pytest.approx([0.256, 0.568, 0.668])
    assert model.prefill_s((10, 16)) == pytest.approx(2 * 0.256)


def test_a_request_for_a_full_model_waits_for_a_slot() -> None:
    """It leaves when the first ends."""
    model = sim_model("m", slots=1, step_s=0.1, prefill_base_s=0.05)
    measured = served([(0.0, 11), (0.5, 1)], model)
    assert list(measured.queued) == pytest.approx([0.0, 0.55])


def test_more_than_the_queue_holds_is_refused() -> None:
    """One is served, one waits, one is refused."""
    model = sim_model("m", slots=1, max_queue=1)
    measured = served([(0.0, 5), (0.01, 5), (0.02, 5)], model)
    assert (measured.answered, measured.refused, measured.open) == (2, 1, 0)


def test_a_request_that_would_wait_too_long_is_rejected() -> None:
    """Its deadline cannot be kept: the one before it uses the only slot for far longer."""
    model = sim_model("m", slots=1, step_s=0.1, max_wait_s=0.3)
    measured = served([(0.0, 100), (1.0, 5)], model)
    assert (measured.answered, measured.refused) == (1, 1)


def test_other_routers_may_send_more_requests_than_slots() -> None:
    """The replica queues them in their order."""
    model = sim_model("m", slots=1, step_s=0.1, prefill_base_s=0.05)
    arrivals = [Arrival(0.0, "m", 10, 2), Arrival(0.01, "m", 10, 2)]
    measured = serve_fixed([model], arrivals, replicas={"m": 1}, choice=lambda replicas, _: replicas[0])["m"]
    assert times(measured) == [(0.05, 0.15), (0.19, 0.29)]


def test_the_clock_calls_in_the_order_of_times_then_of_registration() -> None:
    clock, calls = Clock(), list[tuple[float, str]]()
    for at, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        clock.at(at, lambda name: calls.append((clock.now, name)), name)
    clock.run([], lambda _: None)
    assert calls == [(1.0, "a"), (1.0, "b"), (2.0, "c")]


def test_arrivals_out_of_order_are_an_error() -> None:
    """Time does not run backwards."""
    with pytest.raises(ValueError, match="comes after"):
        served([(2.0, 1), (1.0, 1)])


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 30)), max_size=60),
    slots=st.integers(1, 4),
    replicas=st.integers(1, 3),
    gateways=st.integers(1, 3),
    max_queue=st.integers(0, 8),
    together=st.sampled_from((0, 40)),
)
@search(40)
def test_every_request_is_answered_or_rejected_exactly_once(
    arrivals: list[tuple[int, int]], slots: int, replicas: int, gateways: int, max_queue: int, together: int
) -> None:
    """And no answer is faster than on an idle replica."""
    model = sim_model("m", slots=slots, step_s=0.1, prefill_base_s=0.03, max_queue=max_queue, prefill_tokens=together)
    requests = [(at / 20, tokens) for at, tokens in sorted(arrivals)]
    measured = served(requests, model, replicas, gateways)
    assert (measured.answered + measured.refused, measured.open) == (len(requests), 0)
    assert measured.output_tokens <= sum(tokens for _, tokens in requests)
    assert all(ttft >= 0.03 - 1e-9 for ttft in measured.ttfts)


@given(
    sends=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20), st.integers(1, 60)), min_size=1, max_size=30),
    slots=st.integers(1, 4),
)
@search(30)
def test_a_replica_takes_its_steps_as_the_batcher_does(sends: list[tuple[int, int, int]], slots: int) -> None:
    """The product's batcher, with an engine whose steps take virtual time, starts and ends each request when the
    simulator does, also prompts that are prefilled together.
    """
    model = sim_model(
        "m", slots=slots, step_s=0.125, prefill_base_s=0.0625, buckets=BUCKETS, prefill_tokens=BUCKETS[-1]
    )
    requests = [
        SimRequest.of(Arrival(0.0, "m", prompt, tokens), i, at / 16 + i / 1024)  # none comes just as a step ends
        for i, (at, tokens, prompt) in enumerate(sorted(sends))
    ]
    assert simulated(model, requests) == batched(model, requests)


BUCKETS = (16, 32, 64, 128)


def simulated(model: SimModel, requests: Sequence[SimRequest]) -> list[tuple[float, float]]:
    """Returns when each request has its first token, and its last."""
    replica, ends, at = SimReplica(model), dict[int, float](), 0
    while at < len(requests) or replica.due != math.inf:
        if at < len(requests) and requests[at].arrived_at <= replica.due:
            replica.send(requests[at], requests[at].arrived_at)
            at += 1
        else:
            now = replica.due
            replica.advance(now)
            ends |= {request.number: now for request in replica.ended}
    return [(request.first_at, ends[request.number]) for request in requests]


class TimedEngine(EchoEngine):
    """An engine whose steps take virtual time."""

    def __init__(self, model: SimModel) -> None:
        super().__init__(model.slots, BUCKETS[-1])
        self.now = 0.0
        self._model = model

    def prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[int]:
        self.now += self._model.speed.prefill_base_s
        return super().prefill(slots, prompts)

    def decode(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> list[int]:
        self.now += self._model.speed.step_s
        return super().decode(slots, tokens, positions)


def batched(model: SimModel, requests: Sequence[SimRequest]) -> list[tuple[float, float]]:
    """Returns the same for the batcher of the product."""
    engine = TimedEngine(model)
    engine.load()
    firsts, ends = dict[str, float](), dict[str, float]()

    def emit(events: list[TokenEvent]) -> None:
        for event in events:
            firsts.setdefault(event.id, engine.now)
            if event.finish is not None:
                ends[event.id] = engine.now

    batcher = Batcher(engine, ByteTokenizer(), emit, clock=lambda: engine.now)
    coming = list(requests)
    while coming or len(ends) < len(requests):
        while coming and coming[0].arrived_at <= engine.now:
            request = coming.pop(0)
            prompt = [1] * request.tokens
            batcher.submit(GenerateRequest(id=str(request.number), prompt_ids=prompt, max_tokens=request.output_tokens))
        if not batcher.step():
            engine.now = coming[0].arrived_at
    return [(firsts[str(request.number)], ends[str(request.number)]) for request in requests]


# Agreement with theory


def exponential(rate: float, mean_steps: float, count: int, seed: int) -> Iterator[Arrival]:
    """Poisson arrivals whose service is exponential, in steps."""
    draw, at = Random(seed), 0.0
    for _ in range(count):
        at += draw.expovariate(rate)
        yield Arrival(at, "m", 1, 1 + round(draw.expovariate(1.0 / mean_steps)))


def erlang_c(servers: int, load: float) -> float:
    """The probability of waiting in M/M/c with ``load`` Erlangs."""
    terms = [load**k / math.factorial(k) for k in range(servers)]
    last = load**servers / math.factorial(servers) * servers / (servers - load)
    return last / (sum(terms) + last)


@pytest.mark.slow
@pytest.mark.parametrize(("servers", "load"), [(1, 0.7), (4, 3.2), (12, 10.0)])
def test_single_slots_wait_as_in_queueing_theory(servers: int, load: float) -> None:
    """M/M/c: the mean wait is C(c, a) / (c mu - lambda), within 8 %."""
    model = sim_model("m", slots=1, step_s=0.001, prefill_base_s=1e-9, max_queue=10**6)
    arrivals = exponential(load, 1000.0, 120_000, 5)
    measured = serve_fixed([model], arrivals, replicas={"m": servers}, since=100.0)["m"]
    expected = erlang_c(servers, load) / (servers - load)
    assert sum(measured.queued) / len(measured.queued) == pytest.approx(expected, rel=0.08)


def test_fixed_lengths_wait_as_in_queueing_theory() -> None:
    """M/D/1: the mean wait is rho / (2 (1 - rho)) of a service, within 8 %."""
    draw, at, arrivals = Random(3), 0.0, list[Arrival]()
    for _ in range(20_000):
        at += draw.expovariate(0.6)
        arrivals.append(Arrival(at, "m", 1, 101))
    model = sim_model("m", slots=1, step_s=0.01, prefill_base_s=1e-9, max_queue=10**6)
    measured = serve_fixed([model], arrivals, replicas={"m": 1})["m"]
    assert sum(measured.queued) / len(measured.queued) == pytest.approx(0.75, rel=0.08)


def test_late_binding_has_shorter_tails_than_two_choices() -> None:
    """At 85 % load; `benchmarks/routing.py` measures more."""
    model = sim_model("m", slots=4, step_s=0.03, prefill_base_s=0.02, max_queue=10**6)
    arrivals = list(exponential(16.0, 100.0, 6_000, 1))
    draw = Random(2)

    def two(replicas: Sequence[SimReplica], _: SimRequest) -> SimReplica:
        first, second = draw.sample(range(len(replicas)), 2)
        return min(replicas[first], replicas[second], key=lambda replica: replica.live)

    ours = serve_fixed([model], arrivals, replicas={"m": 16})["m"]
    theirs = serve_fixed([model], arrivals, replicas={"m": 16}, choice=two)["m"]
    assert np.percentile(ours.ttfts, 99) < 0.5 * np.percentile(theirs.ttfts, 99)


def test_gateways_share_the_slots_of_a_replica() -> None:
    """No slot is used twice, and none stays free: three gateways take as long as one."""
    arrivals = [(0.0, 10)] * 12
    alone, shared = served(arrivals, MODEL), served(arrivals, MODEL, gateways=3)
    assert sorted(shared.latencies) == pytest.approx(sorted(alone.latencies))


def test_a_wait_beyond_the_queue_objective_misses_it() -> None:
    """The second request waits for 0.55 s."""
    model = sim_model("m", slots=1, step_s=0.1, prefill_base_s=0.05, objectives={"queue_ms": 500.0})
    assert served([(0.0, 11), (0.5, 1)], model).attainment == 0.5


def test_tokens_slower_than_the_objective_miss_it() -> None:
    """A prefill stalls the first request for half a step in ten; an answer of one token has nothing to measure."""
    model = sim_model("m", slots=2, step_s=0.1, prefill_base_s=0.05, objectives={"tpot_ms": 102.0})
    assert served([(0.0, 11), (0.2, 1)], model).attainment == 0.5


def test_a_flood_of_one_key_does_not_keep_others_out_of_a_full_queue() -> None:
    """As in the gateway: its last request is rejected."""
    model = sim_model("m", slots=1, step_s=0.1, prefill_base_s=0.05, max_queue=2)
    flood = [Arrival(0.01 * i, "m", 10, 1, "flood") for i in range(4)]
    measured = serve_fixed([model], [*flood, Arrival(0.045, "m", 10, 30, "other")], replicas={"m": 1})["m"]
    assert (measured.answered, measured.refused) == (3, 2)
    assert measured.output_tokens == 1 + 1 + 30
