"""What the simulator knows of a model: how fast its replicas are, and how many there may be."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from orchestrator.dispatch.fair_queue import Order
from orchestrator.scaling.autoscaler import Objectives

TYPICAL_PROMPT = 512  # tokens


@dataclass(frozen=True)
class SimModel:
    """A model as static slots. Times in seconds.

    ``buckets`` are the lengths to which prompts are padded, ascending (empty: none is padded). ``prefill_tokens`` is
    how many tokens are read together at most when several prompts wait (`workers.batching.batcher`, step 2c); 0: one
    prompt at a time.
    """

    name: str
    slots: int = 4
    step_s: float = 0.05  # of one decode of all slots
    prefill_base_s: float = 0.016
    prefill_token_s: float = 0.0  # for each token, padding counted
    cores: int = 1  # of one replica
    load_s: float = 60.0  # from the start of a replica until it is ready
    min: int = 1
    max: int = 1
    priority: int = 0
    max_queue: int = 256
    max_queue_bytes: int = 1 << 40
    max_wait_s: float | None = None  # a request whose first token cannot come in that time is refused
    queue_order: Order = "fair"
    hold_s: float = math.inf  # how long requests wait while no replica is ready
    idle_s: float = 600.0  # without requests, until a model of min 0 goes to zero
    worth_per_1000: float | None = None
    ttft_s: float | None = None  # the objectives; None: not asked for
    tpot_s: float | None = None
    queue_s: float | None = None
    judged_ttft_s: float | None = None  # by which requests are judged where there are no objectives
    auto: bool = True  # whether the policy may give it more than min
    buckets: tuple[int, ...] = ()
    prefill_tokens: int = 0

    @cached_property
    def objectives(self) -> Objectives:
        """As the autoscaler wants them."""
        return Objectives(self.ttft_s, self.tpot_s, self.queue_s)

    @property
    def typical_prefill_s(self) -> float:
        """Of one prompt of TYPICAL_PROMPT tokens."""
        return self.prefill_s((TYPICAL_PROMPT,))

    def padded(self, tokens: int) -> int:
        """To the smallest bucket that holds so many; those beyond the largest stay."""
        at = bisect_left(self.buckets, tokens)
        return self.buckets[at] if at < len(self.buckets) else tokens

    def prefill_s(self, prompts: Sequence[int]) -> float:
        """Of prompts that are read together: each is padded to the bucket of the longest."""
        return self.prefill_base_s + self.prefill_token_s * self.padded(max(prompts)) * len(prompts)

    def service_s(self, prompt_tokens: int, output_tokens: int) -> float:
        """How long a request holds its slot when it meets no other."""
        return self.prefill_s((prompt_tokens,)) + self.step_s * (output_tokens - 1)
