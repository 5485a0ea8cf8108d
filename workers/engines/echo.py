"""An engine without a model: each token proves that all tokens before it arrived unchanged and in order."""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from workers.batching.buckets import default_decode_buckets, default_prefill_buckets, smallest_bucket
from workers.engines.engine_setup import LoadableEngine
from workers.messages.engine_protocol import EngineSpec

VOCAB_SIZE = 257  # the bytes, and EOS
EOS_ID = 256
FIRST_PRINTABLE = 32  # space
PRINTABLE = 95  # space to tilde


def echo_tokens(prompt_ids: Sequence[int], n: int) -> list[int]:
    """Returns the ``n`` tokens that follow ``prompt_ids``, each a printable ASCII byte.

    The rule: a token is ``32 + crc32(all tokens before it, four little-endian bytes each) mod 95``. A lost, repeated,
    changed or foreign token therefore changes all that follow.
    """
    digest = _digest(prompt_ids)
    tokens = []
    for _ in range(n):
        token = _token(digest)
        tokens.append(token)
        digest = _digest([token], digest)
    return tokens


def _digest(token_ids: Sequence[int], before: int = 0) -> int:
    return zlib.crc32(struct.pack(f"<{len(token_ids)}I", *token_ids), before)


def _token(digest: int) -> int:
    return FIRST_PRINTABLE + digest % PRINTABLE


@dataclass
class _Row:
    """One slot's substitute for a KV cache: a digest of the tokens written to it."""

    digest: int
    length: int  # tokens written
    next_token: int  # the engine's last output, expected as the next input


@dataclass(eq=False)
class EchoEngine(LoadableEngine):
    """Implements ``GenerateEngine`` with ``echo_tokens``; raises where a Neuron engine would return wrong tokens.

    As on Neuron, a decode overwrites every slot that is not listed, so a live slot that was omitted is detected when it
    is listed again. It never returns EOS: an answer ends by its length or a stop string. It needs neither torch nor
    transformers.
    """

    slots: int
    max_len: int
    step_ms: float = 0.0  # the duration of each prefill and decode, for tests of timing
    _rows: dict[int, _Row] = field(default_factory=dict, init=False)

    def load(self) -> None:
        self._spec = EngineSpec(
            slots=self.slots,
            max_len=self.max_len,
            prefill_buckets=default_prefill_buckets(self.max_len),
            decode_buckets=default_decode_buckets(self.max_len),
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset({EOS_ID}),
            returns="tokens",
            keeps_idle_slots=False,
        )

    def prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[int]:
        """See ``GenerateEngine.prefill``. Raises ValueError for a call that would crash a Neuron engine."""
        if len(slots) != len(prompts) or len(set(slots)) != len(slots):
            raise ValueError(f"slots must be distinct, with one prompt each: {list(slots)}, {len(prompts)} prompts")
        self._check_slots(slots)
        for slot, prompt in zip(slots, prompts, strict=True):
            if not prompt:
                raise ValueError(f"the prompt of slot {slot} is empty")
            if not all(0 <= token < VOCAB_SIZE for token in prompt):
                raise ValueError(f"the prompt of slot {slot} has ids outside the vocabulary of {VOCAB_SIZE}")
            smallest_bucket(self.spec.prefill_buckets, len(prompt))
        self._take_time()
        for slot, prompt in zip(slots, prompts, strict=True):
            digest = _digest(prompt)
            self._rows[slot] = _Row(digest, len(prompt), _token(digest))
        return [self._rows[slot].next_token for slot in slots]

    def decode(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> list[int]:
        """See ``GenerateEngine.decode``. Raises ValueError for an invalid call."""
        if not len(slots) == len(tokens) == len(positions) or not slots:
            raise ValueError(f"decode of {len(slots)} slots, {len(tokens)} tokens, {len(positions)} positions")
        if any(a >= b for a, b in pairwise(slots)):
            raise ValueError(f"slots are not sorted: {list(slots)}")
        self._check_slots(slots)
        for slot, token, position in zip(slots, tokens, positions, strict=True):
            row = self._rows.get(slot)
            if row is None:
                raise ValueError(f"slot {slot} is empty: it was never filled, or omitted from a decode")
            if position != row.length:
                raise ValueError(f"slot {slot} holds {row.length} tokens, so position {position} is wrong")
            if position >= self.max_len:
                raise ValueError(f"slot {slot} is full: {position} of {self.max_len} tokens")
            if token != row.next_token:
                raise ValueError(f"slot {slot} got token {token}, expected {row.next_token}")
        self._take_time()
        listed = {}
        for slot in slots:
            row = self._rows[slot]
            digest = _digest([row.next_token], row.digest)
            listed[slot] = _Row(digest, row.length + 1, _token(digest))
        self._rows = listed
        return [row.next_token for row in listed.values()]

    def close(self) -> None:
        self._rows = {}
        self._spec = None

    def _check_slots(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if not 0 <= slot < self.spec.slots:
                raise ValueError(f"slot {slot} does not exist, there are {self.spec.slots}")

    def _take_time(self) -> None:
        if self.step_ms:
            time.sleep(self.step_ms / 1000)
