"""An encoder without a model: each vector proves that all tokens of its input arrived unchanged and in order."""

from __future__ import annotations

import array
import struct
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workers.batching.buckets import default_prefill_buckets
from workers.engines.echo import VOCAB_SIZE
from workers.messages.encoder_protocol import EncodeInput, EncoderSpec

WIDTH = 8


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
