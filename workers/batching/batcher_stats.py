"""The counters of a batcher or of a relay to a server."""

from __future__ import annotations

from dataclasses import dataclass

from workers.messages.status import ServerLoad


@dataclass(frozen=True)
class BatcherStats:
    """A snapshot of the batcher. Times are those of its clock, in seconds."""

    slots: int
    live: int  # requests that own a slot
    waiting: int  # accepted requests without a slot
    prefilling: int  # live requests whose prompt is in the current step
    steps: int  # prefills and decodes since the start
    tokens: int  # tokens produced since the start
    step_started_at: float | None  # start of the current step; None between steps
    draining: bool
    failed: str | None  # why the engine cannot go on
    drafted: int = 0  # tokens proposed by a draft model since the start
    accepted: int = 0  # of these, those that the model agreed with
    prefix_queries: int = 0  # prompt tokens looked up in the slots' KV caches since the start
    prefix_hits: int = 0  # of these, those found there and not processed again
    server: ServerLoad | None = None  # of an engine that is a server
