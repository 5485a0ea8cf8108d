"""The simulated model: the speeds of its replicas and the settings of its spec."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from orchestrator.dispatch.dispatcher import QueueSettings
from orchestrator.scaling.autoscaler import LatencyObjectives
from workers.messages.encoder_protocol import EncoderSpec

TYPICAL_PROMPT = 512  # tokens


@dataclass(frozen=True)
class SimModel(QueueSettings):
    """A model with static slots. Times are in seconds.

    ``buckets`` are the ascending lengths that prompts are padded to (empty: no padding). ``prefill_tokens`` is the
    largest number of tokens in one prefill of several prompts (`workers.batching.batcher`, step 2c); 0: one prompt per
    prefill.
    """

    name: str
    slots: int = 4
    step_s: float = 0.05  # of one decode of all slots
    prefill_base_s: float = 0.016
    prefill_token_s: float = 0.0  # per token, padding included
    prefill_square_s: float = 0.0  # per square of the tokens of each prompt, padding included
    cores: int = 1  # per replica
    load_s: float = 60.0  # from the start of a replica until it is ready
    min: int = 1
    max: int = 1
    priority: int = 0
    idle_s: float = 600.0  # time without requests until a model of min 0 scales to zero
    worth_per_1000: float | None = None
    ttft_s: float | None = None  # the objectives; None: no objective
    tpot_s: float | None = None
    queue_s: float | None = None
    items_per_second: float | None = None
    judged_ttft_s: float | None = None  # the objective of a model without objectives
    auto: bool = True  # whether the policy scales it
    buckets: tuple[int, ...] = ()
    prefill_tokens: int = 0
    encoder: EncoderSpec | None = None  # of a model that encodes; a prefill is then a batch
    gather_s: float = 0.0  # how long an idle encoder waits until a batch is full

    @cached_property
    def objectives(self) -> LatencyObjectives:
        """The objectives for the autoscaler."""
        return LatencyObjectives(self.ttft_s, self.tpot_s, self.queue_s, self.items_per_second)

    @property
    def typical_prefill_s(self) -> float:
        """The prefill time of one prompt of TYPICAL_PROMPT tokens."""
        if self.encoder is not None:
            return self.gather_s + self.batch_s(self.inputs(TYPICAL_PROMPT))
        return self.prefill_s((TYPICAL_PROMPT,))

    def inputs(self, tokens: int) -> list[int]:
        """Returns the lengths of an encoder's inputs in a request: one, or as few as its length allows, as equal as
        possible."""
        assert self.encoder is not None
        count = math.ceil(tokens / self.encoder.buckets[-1])
        return [tokens * (i + 1) // count - tokens * i // count for i in range(count)]

    def batch_s(self, lengths: Sequence[int]) -> float:
        """Returns the time of a batch of an encoder's inputs."""
        encoder, longest = self.encoder, max(lengths)
        assert encoder is not None
        length = longest if encoder.pads_to_longest else self.padded(longest)
        return self._base_and_rows(length, encoder.filled(len(lengths)))

    def padded(self, tokens: int) -> int:
        """Returns the smallest bucket that holds ``tokens``; ``tokens`` itself beyond the largest."""
        at = bisect_left(self.buckets, tokens)
        return self.buckets[at] if at < len(self.buckets) else tokens

    def prefill_s(self, prompts: Sequence[int]) -> float:
        """Returns the time of one prefill of several prompts, each padded to the bucket of the longest."""
        return self._base_and_rows(self.padded(max(prompts)), len(prompts))

    def service_s(self, prompt_tokens: int, output_tokens: int) -> float:
        """Returns how long a request holds its slot without other requests."""
        return self.prefill_s((prompt_tokens,)) + self.step_s * (output_tokens - 1)

    def _base_and_rows(self, length: int, rows: int) -> float:
        return self.prefill_base_s + (self.prefill_token_s + self.prefill_square_s * length) * length * rows
