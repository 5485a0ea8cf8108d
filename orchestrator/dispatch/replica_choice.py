"""Chooses the replica of a request, and remembers which prompt prefixes and sessions each replica has served. Pure."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

PACE_SHARE = 0.05  # of the newest request in a pace
PACE_STEPS = 4  # a pace is rounded to a quarter power of two
LEAST_PREFIX = 0.25  # share of a prompt that must be cached for its replica to be preferred


class Candidate(Protocol):
    """What the choice depends on, counted by the gateway itself: reports from the replica would come too late."""

    @property
    def free_slots(self) -> int: ...
    @property
    def prefilling(self) -> int:
        """The requests that were sent there and have no token yet."""
        ...

    @property
    def pace(self) -> float:
        """The seconds per token there, as measured by Pace; 0.0 while unknown."""
        ...

    @property
    def stepped_at(self) -> float:
        """When it ended its last step, in seconds of the gateway's clock; minus infinity while it is idle."""
        ...


class Pace:
    """The speed of a replica: the decode time of its requests over their tokens, without the prompt and the first
    token. Newer requests weigh more.

    The value is rounded, so that noise does not separate equal replicas: otherwise the seemingly fastest one is filled
    up, and its prompts stop more decodes than they would elsewhere (benchmarks/routing.py: 3 % of the p99 of TTFT).
    """

    __slots__ = ("_seconds", "_tokens", "value")

    def __init__(self) -> None:
        self.value = 0.0  # seconds per token; 0.0 while unknown
        self._seconds = 0.0
        self._tokens = 0.0

    def ended(self, seconds: float, tokens: int) -> None:
        """Records a request that ended ``seconds`` after its first token, with ``tokens`` after that one."""
        if tokens <= 0 or seconds <= 0:
            return
        self._seconds += seconds - PACE_SHARE * self._seconds
        self._tokens += tokens - PACE_SHARE * self._tokens
        self.value = 2 ** (round(math.log2(self._seconds / self._tokens) * PACE_STEPS) / PACE_STEPS)


C = TypeVar("C", bound=Candidate)


def choose(candidates: Iterable[C], affinity: Callable[[C], float] | None = None) -> C | None:
    """Returns the replica of the next request; None while no slot is free (late binding: it waits in the queue).

    1. only replicas with a free slot
    2. the fewest prompts in prefill: a prefill stops all decodes of its replica
    3. the highest ``affinity`` (0 to 1): the replica has the prompt's prefix, or the request's session
    4. the fastest; an unmeasured replica counts as the fastest, so that it gets measured
    5. the earliest last step, ``stepped_at``: its current step ends soonest, and prompts are read between steps
    6. the most free slots; a tie goes to the first, and candidates of the gateway's own machine come first
    """
    ties: list[C] = []
    lowest = math.inf
    for candidate in candidates:
        if candidate.free_slots > 0:  # 1
            prefilling = candidate.prefilling
            if prefilling < lowest:  # 2
                ties, lowest = [candidate], prefilling
            elif prefilling == lowest:
                ties.append(candidate)
    if len(ties) < 2:
        return ties[0] if ties else None
    best, least = ties[0], (math.inf, 0.0, 0.0, 0)
    for candidate in ties:
        rank = (
            0.0 if affinity is None else -affinity(candidate),  # 3
            candidate.pace,  # 4
            candidate.stepped_at,  # 5
            -candidate.free_slots,  # 6
        )
        if rank < least:
            best, least = candidate, rank
    return best


Chain = Sequence[int]
"""A digest for each whole block of a prompt, each of the block and of all before it; see ``chain``."""


def chain(prompt_ids: Sequence[int], block: int) -> Chain:
    """Returns the digests of a prompt in blocks of ``block`` tokens; an incomplete last block has none.

    Two prompts that share a digest share all tokens up to it, except with a probability of about 2^-60. The digests are
    the same in every process: the hash of a tuple of integers has no seed. Takes 11 us for 1000 tokens in blocks of 16.
    """
    digest, digests = 0, []
    for tokens in zip(*[iter(prompt_ids)] * block, strict=False):  # drops an incomplete last block
        digest = hash((digest, tokens))
        digests.append(digest)
    return digests


class PrefixIndex:
    """The prompt prefixes that were sent to one replica: its latest ``blocks`` blocks.

    Of a prompt, the later blocks are forgotten first, so what is remembered is always a prefix, and a binary search
    finds its length. Takes about 100 bytes a block.
    """

    def __init__(self, blocks: int = 4096) -> None:
        self._blocks = blocks
        self._digests: OrderedDict[int, None] = OrderedDict()  # the next to be forgotten comes first

    def __len__(self) -> int:
        """Returns the number of remembered blocks."""
        return len(self._digests)

    def add(self, chain: Chain) -> None:
        """Records that a prompt with this chain was sent to the replica."""
        digests = self._digests
        for digest in reversed(chain):
            digests[digest] = None
            digests.move_to_end(digest)
        while len(digests) > self._blocks:
            digests.popitem(last=False)

    def share(self, chain: Chain) -> float:
        """Returns the share of a prompt's blocks that the replica has seen, 0 to 1; 0 for a prompt without blocks."""
        digests = self._digests
        if not chain or chain[0] not in digests:
            return 0.0
        matched, unmatched = 1, len(chain) + 1
        while unmatched - matched > 1:
            middle = (matched + unmatched) // 2
            if chain[middle - 1] in digests:
                matched = middle
            else:
                unmatched = middle
        return matched / len(chain)


R = TypeVar("R")


class Sessions(Generic[R]):
    """Maps a session to the replica of its last request: the ``most`` latest sessions, for ``ttl_s`` seconds each.

    The caller passes the time, from one monotonic clock.
    """

    def __init__(self, most: int = 100_000, ttl_s: float = 1800.0) -> None:
        self._most = most
        self._ttl_s = ttl_s
        self._held: OrderedDict[str, tuple[R, float]] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        """Returns the number of remembered sessions, including expired ones that have not been looked up."""
        return len(self._held)

    def put(self, session: str, replica: R, now: float) -> None:
        """Records that the session's request goes to ``replica``, and restarts its time to live."""
        held = self._held
        held[session] = replica, now
        held.move_to_end(session)
        while len(held) > self._most or now - next(iter(held.values()))[1] >= self._ttl_s:
            held.popitem(last=False)

    def get(self, session: str, now: float) -> R | None:
        """Returns the replica of the session's last request; None for a new or expired session."""
        entry = self._held.get(session)
        if entry is None:
            return None
        replica, since = entry
        if now - since >= self._ttl_s:
            del self._held[session]
            return None
        return replica
