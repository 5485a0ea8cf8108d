"""Reads vLLM's metrics of its KV cache and its queue."""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import dataclass

from workers.messages.status import ServerLoad

NAMES = {
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:prompt_tokens_total": "tokens",
    "vllm:generation_tokens_total": "tokens",
}

_BLOCK_SIZE = re.compile(r'^vllm:cache_config_info{(?:.*,)?block_size="(\d+)"', re.MULTILINE)


def block_size(text: str) -> int | None:
    """Returns the tokens of a block of vLLM's KV cache by its metrics, which its back end may have changed."""
    match = _BLOCK_SIZE.search(text)
    return None if match is None else int(match[1])


@dataclass(frozen=True)
class ServerMetrics:
    """One reading of vLLM's `/metrics`, summed over its engines. Zero where it has no such metric."""

    kv_usage: float = 0.0  # share of the KV cache's blocks in use, 0 to 1
    waiting: float = 0.0  # requests that it has queued
    preemptions: float = 0.0  # requests whose KV cache it has dropped to continue others, since its start
    prefix_queries: float = 0.0  # prompt tokens looked up in its prefix cache
    prefix_hits: float = 0.0  # of these, those found there
    tokens: float | None = None  # read and generated since its start; None: it does not count them

    def load(self, before: ServerMetrics | None) -> ServerLoad:
        """Returns what the replica reports; ``before`` is the last reading."""
        queues = before is not None and before.waiting > 0 and self.waiting > 0
        return ServerLoad(round(self.kv_usage, 3), int(self.waiting), int(self.preemptions), queues)

    @classmethod
    def read(cls, text: str) -> ServerMetrics:
        """Reads Prometheus' text format. Lines of other metrics, and malformed ones, are skipped."""
        sums: dict[str, float] = {}
        for line in text.splitlines():
            name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
            field = NAMES.get(name)
            if field is not None:
                with contextlib.suppress(IndexError, ValueError):
                    value = float(rest.rpartition("}")[2].split()[0])
                    sums[field] = sums.get(field, 0.0) + (value if math.isfinite(value) else 0.0)
        return cls(**sums)


class TokenProgress:
    """How long the server's count of tokens has not changed, by its readings: the only sign of a hang while answers
    come in one piece."""

    def __init__(self) -> None:
        self._tokens: float | None = None
        self._changed_at = self._read_at = 0.0

    def begin(self, now: float) -> None:
        """The server has work from now on."""
        self._changed_at = self._read_at = now

    def read(self, tokens: float | None, now: float) -> None:
        """``tokens`` is the count; None: the server has none."""
        self._read_at = now
        if tokens is None or tokens != self._tokens:
            self._tokens, self._changed_at = tokens, now

    def fail(self, now: float) -> None:
        """The count could not be read: the server does not answer."""
        self.read(self._tokens, now)

    @property
    def stalled_s(self) -> float:
        """Seconds between the last change and the last reading; 0 for a server that does not count."""
        return self._read_at - self._changed_at
