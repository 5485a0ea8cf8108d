"""The measurement of one benchmark request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise


@dataclass(frozen=True)
class Measured:
    """One measured request. Times are in seconds of the client's monotonic clock, taken when the bytes were received.

    ``chunks`` are the events with text: not those with only the role, the end of the answer or the usage. A chunk may
    contain several tokens.
    """

    prompt_wanted: int
    output_wanted: int
    due: float  # the scheduled time of sending
    sent: float  # the start of sending, before the connection if a new one is needed
    chunks: tuple[float, ...] = ()
    ended: float | None = None  # the time of the last byte
    prompt_tokens: int | None = None  # the server's `usage`
    output_tokens: int | None = None  # likewise; the number of chunks without it
    error: str | None = None  # kind of error: `timeout`, `http-429`, ...; None for a complete answer
    what: str = ""  # the message of the server or the system

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def prompt(self) -> int:
        """The prompt tokens: the server's count; the requested number without one."""
        return self.prompt_wanted if self.prompt_tokens is None else self.prompt_tokens

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: from sending to the first chunk."""
        return self.chunks[0] - self.sent if self.chunks else None

    @property
    def e2e_s(self) -> float | None:
        """From sending to the last chunk, as vLLM's; guidellm and aiperf wait for the end of the stream."""
        return self.chunks[-1] - self.sent if self.chunks else None

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Inter-token latencies: the gaps between consecutive chunks, whatever their number of tokens, as in vLLM."""
        return tuple(later - earlier for earlier, later in pairwise(self.chunks))

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: the mean of the request, independent of chunks. None for one token.

        vLLM calls it TPOT; guidellm and aiperf call it ITL.
        """
        if not self.chunks or self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.output_tokens - 1)

    def since(self, began: float) -> Measured:
        """Returns the measurement with times relative to ``began``."""
        return replace(
            self,
            due=self.due - began,
            sent=self.sent - began,
            chunks=tuple(at - began for at in self.chunks),
            ended=None if self.ended is None else self.ended - began,
        )


def kinds(measured: Sequence[Measured]) -> dict[str, int]:
    """Returns the number of failures by kind, the most frequent first."""
    counts = Counter(request.error for request in measured if request.error is not None)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def error_messages(measured: Sequence[Measured]) -> dict[str, str]:
    """Returns the first message of each kind of error."""
    messages: dict[str, str] = {}
    for request in measured:
        if request.error is not None:
            messages.setdefault(request.error, request.what)
    return messages
