"""The protocol of engines that encode whole texts: embeddings, scores of pairs, and classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

EncoderKind = Literal["embedding", "rerank", "classification"]


class EncodeInput(msgspec.Struct, frozen=True, array_like=True):
    """One tokenized text, or a pair of them."""

    ids: list[int]  # with special tokens, not empty
    second: int = 0  # the position from which tokens are of the second text (`token_type_ids`); 0: one text
    prompt: int = 0  # leading tokens of a prompt, which some models leave out of their pooling


@dataclass(frozen=True)
class EncoderSpec:
    """The properties of an encoder that its batcher depends on. Fixed after ``load``: Neuron compiles shapes."""

    rows: int  # inputs in a batch, at most
    buckets: tuple[int, ...]  # lengths of a batch, ascending; the last is the longest input
    vocab_size: int
    width: int  # numbers that an input gives: the embedding's dimensions, or the labels
    labels: tuple[str, ...] = ()  # of a classification, in the order of its numbers
    pads_to_longest: bool = False  # a batch is as long as its longest input, not as its bucket, and has no empty rows
    compiled_rows: int = 0  # otherwise it is filled up to a multiple of so many rows; 0: to ``rows``

    def filled(self, count: int) -> int:
        """Returns the rows of a batch of ``count`` inputs, with empty ones."""
        if self.pads_to_longest:
            return count
        step = self.compiled_rows or self.rows
        return -(-count // step) * step


class EncodeEngine(Protocol):
    """One loaded encoder. Calls come from one thread."""

    @property
    def spec(self) -> EncoderSpec:
        """Raises RuntimeError before ``load``."""
        ...

    def load(self) -> None:
        """Read the weights and warm up every bucket. Raises ``EngineLoadError`` with the cause and a hint."""
        ...

    def encode(self, inputs: Sequence[EncodeInput]) -> Any:
        """Returns float32 ``[len(inputs), spec.width]`` as a numpy array. Takes at most ``spec.rows`` inputs, each no
        longer than the last bucket. The result of an input does not depend on the others."""
        ...

    def close(self) -> None:
        """Release all resources. On Neuron, cores are freed only when the process exits."""
        ...
