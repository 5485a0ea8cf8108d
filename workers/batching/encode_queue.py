"""The inputs that wait for an encoder, and which of them form the next batch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from workers.batching.buckets import smallest_bucket
from workers.messages.encoder_protocol import EncodeInput, EncoderSpec

SLOTS_PER_ROW = 2  # requests at a replica for each row of a batch: the next batch fills while one is encoded
MAX_PADDING = 0.2  # of a batch's tokens, where it is padded to its longest input


@dataclass(frozen=True, order=True)
class WaitingInput:
    """One waiting input. Ordered by length."""

    length: int
    number: int  # of the request, in the order of arrival
    index: int  # of the input in its request
    request: str = field(compare=False)
    input: EncodeInput = field(compare=False)


def shares(spec: EncoderSpec, batch: Sequence[WaitingInput]) -> list[float]:
    """Returns the share of each input in the work of its batch. Where empty rows take as long as others, they belong to
    no input."""
    if not spec.pads_to_longest:
        return [1 / spec.filled(len(batch))] * len(batch)
    tokens = sum(place.length for place in batch)
    return [place.length / tokens for place in batch]


@dataclass
class _Share:
    arrived_at: float  # seconds of the batcher's clock
    number: int
    waiting: list[WaitingInput]  # by length
    served_s: float = 0.0

    @property
    def rank(self) -> float:
        return self.arrived_at + self.served_s


class EncodeQueue:
    """Forms batches of inputs of about the same length, from all requests.

    The request with the lowest rank leads: its time of arrival, later by the seconds that the engine has spent on it.
    So a request of one input does not wait for one of a thousand, and none waits for ever.
    """

    def __init__(self, spec: EncoderSpec) -> None:
        self.spec = spec
        self._shares: dict[str, _Share] = {}
        self._places: list[WaitingInput] = []  # of all requests, by length
        self._number = 0

    def __len__(self) -> int:
        """The number of waiting inputs."""
        return len(self._places)

    def add(self, request: str, inputs: Sequence[EncodeInput], now: float) -> None:
        """Adds the inputs of a request, at least one, none longer than the last bucket."""
        self._number += 1
        waiting = sorted(
            WaitingInput(len(input.ids), self._number, index, request, input) for index, input in enumerate(inputs)
        )
        self._shares[request] = _Share(now, self._number, waiting)
        for place in waiting:
            insort(self._places, place)

    def remove(self, request: str) -> None:
        """Removes the waiting inputs of a request."""
        if request in self._shares:
            del self._shares[request]
            self._places = [place for place in self._places if place.request != request]

    def oldest_at(self) -> float | None:
        """Returns when the first of the waiting requests arrived; None without any."""
        return min((share.arrived_at for share in self._shares.values()), default=None)

    def take(self) -> list[WaitingInput]:
        """Removes and returns the next batch, shortest input first; empty if nothing waits.

        1. It contains the longest input of the leading request.
        2. It grows by the waiting input whose length is nearest, up to the engine's rows.
        3. It stays within the bucket of 1; or, where batches are padded to their longest input, within MAX_PADDING.
        """
        if not self._shares:
            return []
        lead = min(self._shares.values(), key=lambda share: (share.rank, share.number)).waiting[-1]
        first = bisect_left(self._places, lead)
        end = first + 1
        tokens, longest = lead.length, smallest_bucket(self.spec.buckets, lead.length)
        while end - first < self.spec.rows:
            below = self._places[first - 1] if first else None
            above = self._places[end] if end < len(self._places) else None
            if above is not None and above.length > longest:
                above = None
            if above is not None and (below is None or above.length - lead.length <= lead.length - below.length):
                grown, shortest = above, self._places[first].length
                top = above.length
            elif below is not None:
                grown, shortest = below, below.length
                top = self._places[end - 1].length
            else:
                break
            padded = top * (end - first + 1)
            if self.spec.pads_to_longest and padded - tokens - grown.length > MAX_PADDING * padded and shortest < top:
                break
            tokens += grown.length
            first, end = (first, end + 1) if grown is above else (first - 1, end)
        batch = self._places[first:end]
        del self._places[first:end]
        for place in batch:
            share = self._shares[place.request]
            share.waiting.remove(place)
        return batch

    def charge(self, batch: Sequence[WaitingInput], seconds: float) -> None:
        """Divides the seconds of a batch among its requests, by tokens, and forgets those of which nothing waits."""
        tokens = sum(place.length for place in batch)
        for place in batch:
            share = self._shares.get(place.request)
            if share is not None:
                share.served_s += seconds * place.length / tokens
                if not share.waiting:
                    del self._shares[place.request]
