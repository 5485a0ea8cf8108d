"""The echo engines, which need no model: tokens and vectors that depend on the input only."""

from __future__ import annotations

import array
import struct
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from workers.batching.buckets import default_decode_buckets, default_prefill_buckets, smallest_bucket
from workers.engines.engine_setup import LoadableEngine
from workers.messages.encoder_protocol import EncodeInput, EncoderSpec
from workers.messages.engine_protocol import EngineSpec
from workers.messages.replica_config import ReplicaConfig

VOCAB_SIZE = 257  # the bytes, and EOS
EOS_ID = 256
FIRST_PRINTABLE = 32  # space
PRINTABLE = 95  # space to tilde
WIDTH = 8  # of a vector


def open_echo(config: ReplicaConfig) -> EchoEngine:
    """Returns the engine of a model that generates, not loaded yet."""
    return EchoEngine(config.model.max_batch, config.max_len, _step_ms(config))


def open_echo_encoder(config: ReplicaConfig) -> EchoEncoder:
    """Returns the engine of any other model, not loaded yet."""
    return EchoEncoder(
        config.model.max_batch, config.max_len, 1 if config.model.kind == "rerank" else WIDTH, _step_ms(config)
    )


def _step_ms(config: ReplicaConfig) -> float:
    return float(config.model.engine_options.get("step_ms", 0))


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
class EchoEngine(LoadableEngine[EngineSpec]):
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


def echo_vector(input: EncodeInput, width: int = WIDTH) -> tuple[float, ...]:
    """Returns the vector of an input, of length 1, or for a ``width`` of 1 its score, up to 1: numbers drawn from the
    CRC of its tokens, ``second`` and ``prompt``."""
    digest = zlib.crc32(struct.pack(f"<{len(input.ids)}I2I", *input.ids, input.second, input.prompt))
    numbers = [1 + zlib.crc32(bytes([place]), digest) % 1000 for place in range(width)]
    length = sum(number**2 for number in numbers) ** 0.5 if width > 1 else 1000.0
    return tuple(array.array("f", (number / length for number in numbers)))


@dataclass
class _VectorRow:
    """A row with the method of numpy's that the batcher calls: this engine needs no numpy."""

    numbers: tuple[float, ...]

    def tobytes(self) -> bytes:
        return array.array("f", self.numbers).tobytes()


@dataclass(eq=False)
class EchoEncoder:
    """Implements ``EncodeEngine`` with ``echo_vector``. It needs neither torch nor transformers."""

    rows: int
    max_len: int
    width: int = WIDTH  # of a vector; of a rerank model 1, the score of a pair
    step_ms: float = 0.0  # the duration of a batch, to simulate a slow engine

    @property
    def spec(self) -> EncoderSpec:
        labels = tuple(f"LABEL_{place}" for place in range(self.width))
        return EncoderSpec(self.rows, default_prefill_buckets(self.max_len), VOCAB_SIZE, self.width, labels)

    def load(self) -> None:
        """There is nothing to load."""

    def encode(self, inputs: Sequence[EncodeInput]) -> Any:
        if self.step_ms:
            time.sleep(self.step_ms / 1000)
        return [_VectorRow(echo_vector(input, self.width)) for input in inputs]

    def close(self) -> None:
        """There is nothing to release."""
