"""What one request showed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise


@dataclass(frozen=True)
class Measured:
    """Times are seconds of the client's monotonic clock, read when the bytes came out of the socket.

    ``chunks`` are the events that brought text; the one that only names the role, the one that only ends the answer and
    the one with the usage are none. A chunk may bring several tokens.
    """

    prompt_wanted: int
    output_wanted: int
    due: float  # when it was to be sent
    sent: float  # when it was begun; a connection that had to be made first counts
    chunks: tuple[float, ...] = ()
    ended: float | None = None  # when its last byte came
    prompt_tokens: int | None = None  # the server's `usage`
    output_tokens: int | None = None  # likewise; without it the number of chunks
    error: str | None = None  # what kind: `timeout`, `http-429`, ...; None when the answer is whole
    what: str = ""  # the error in the server's or the system's words

    @property
    def ok(self) -> bool:
        return self.error is None

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
        """Inter-token latencies: between consecutive chunks. A chunk of several tokens gives one gap, as in vLLM."""
        return tuple(later - earlier for earlier, later in pairwise(self.chunks))

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: the mean of the request, whatever the chunks are. None for one token.

        vLLM calls it TPOT; guidellm and aiperf call it ITL.
        """
        if not self.chunks or self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.output_tokens - 1)

    def since(self, began: float) -> Measured:
        """With times that begin at ``began``."""
        return replace(
            self,
            due=self.due - began,
            sent=self.sent - began,
            chunks=tuple(at - began for at in self.chunks),
            ended=None if self.ended is None else self.ended - began,
        )


def kinds(measured: Sequence[Measured]) -> dict[str, int]:
    """How many failed in which way, the most frequent first."""
    counts: dict[str, int] = {}
    for one in measured:
        if one.error is not None:
            counts[one.error] = counts.get(one.error, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
