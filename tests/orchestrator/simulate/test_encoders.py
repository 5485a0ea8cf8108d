"""The simulated encoder ends each request when the real batcher does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.routing_parts.fixed_replicas import serve_fixed
from benchmarks.scaling_parts.scenarios import sim_model
from orchestrator.simulate.scenario import Arrival, SimModel
from orchestrator.simulate.simulated_replica import SimEncoder
from tests.searches import search
from workers.batching.encode_batcher import EncodeBatcher
from workers.messages.encoder_protocol import EncodeInput, EncoderSpec
from workers.messages.requests import GenerateRequest, TokenEvent

np = pytest.importorskip("numpy")

BUCKETS = (4, 8, 16)


def model(*, ragged: bool, rows: int = 4, gather_s: float = 0.0) -> SimModel:
    encoder = EncoderSpec(rows=rows, buckets=BUCKETS, vocab_size=10, width=1, pads_to_longest=ragged)
    return sim_model(
        "m",
        slots=50,
        prefill_base_s=0.01,
        prefill_token_s=0.001,
        buckets=BUCKETS,
        encoder=encoder,
        max_wait_ms=gather_s * 1000,
    )


class RealBatcher:
    """The real batcher, with an engine that takes the model's time; requests arrive meanwhile."""

    def __init__(self, model: SimModel, arrivals: Sequence[Arrival]) -> None:
        self.model, self.arrivals = model, list(arrivals)
        assert model.encoder is not None
        self.spec = model.encoder
        self.now, self.ends = 0.0, dict[int, float]()
        self.batcher = EncodeBatcher(self, self._emit, max_wait_s=model.gather_s, clock=lambda: self.now)

    def load(self) -> None: ...

    def close(self) -> None: ...

    def encode(self, inputs: Sequence[EncodeInput]) -> Any:
        end = self.now + self.model.batch_s([len(input.ids) for input in inputs])
        while self.arrivals and self.arrivals[0].at < end:
            self._arrive()
        self.now = end
        return np.zeros((len(inputs), 1), dtype=np.float32)

    def run(self) -> RealBatcher:
        while True:
            wait_s = self.batcher._wait_s()
            if self.arrivals and (wait_s is None or self.arrivals[0].at < self.now + wait_s):
                self._arrive()
            elif wait_s is None:
                return self
            else:
                self.now += wait_s
                self.batcher.step()

    def _arrive(self) -> None:
        arrival = self.arrivals.pop(0)
        self.now = arrival.at
        inputs = [EncodeInput([1] * length) for length in self.model.inputs(arrival.prompt_tokens)]
        number = str(len(self.ends) + len(self.batcher._accepted))
        self.batcher.submit(GenerateRequest(id=number, prompt_ids=[], max_tokens=1, inputs=inputs))

    def _emit(self, events: list[TokenEvent]) -> None:
        for event in events:
            self.ends[int(event.id)] = self.now


gaps = st.lists(st.tuples(st.integers(1, 500), st.integers(1, 70)), min_size=1, max_size=40)
TICK_S = 1.0037e-4  # no arrival is at the end of a batch


@given(gaps, st.booleans(), st.sampled_from([0.0, 0.02]))
@search(30)
def test_requests_end_when_the_real_batcher_ends_them(
    given: list[tuple[int, int]], ragged: bool, gather_s: float
) -> None:
    """Inputs of all lengths, full batches and those that have waited."""
    simulated, arrivals, at = model(ragged=ragged, gather_s=gather_s), list[Arrival](), 0.0
    for gap, tokens in given:
        at += gap * TICK_S
        arrivals.append(Arrival(at, "m", tokens, 1))
    real = RealBatcher(simulated, arrivals).run()
    replica = SimEncoder(simulated)
    measured = serve_fixed([simulated], arrivals, replicas={"m": [replica]})["m"]
    expected = sorted(real.ends[i] - arrival.at for i, arrival in enumerate(arrivals))
    assert sorted(measured.latencies) == pytest.approx(expected)


def test_a_replica_of_an_encoder_serves_more_requests_at_once_than_its_batch_has_rows() -> None:
    """While a batch runs, the next one fills."""
    simulated = model(ragged=False)
    arrivals = [Arrival(0.001 * i, "m", 4, 1) for i in range(9)]
    measured = serve_fixed([simulated], arrivals, replicas={"m": [SimEncoder(simulated)]})["m"]
    batch_s = 0.01 + 0.001 * 16
    ends = [arrival.at + latency for arrival, latency in zip(arrivals, measured.latencies, strict=True)]
    assert ends == pytest.approx([batch_s] + [2 * batch_s] * 4 + [3 * batch_s] * 4)
