"""The protocols that engines implement, so that one batcher drives all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol


@dataclass(frozen=True)
class EngineSpec:
    """The properties of an engine that the batcher depends on. Fixed after ``load``: Neuron compiles shapes."""

    slots: int  # batch rows; the compiled batch size on Neuron
    max_len: int  # tokens a slot's KV cache holds: prompt + generated
    prefill_buckets: tuple[int, ...]  # compiled prompt lengths, ascending; the last is the longest prompt
    decode_buckets: tuple[int, ...]  # compiled KV lengths, ascending; the last equals max_len
    vocab_size: int
    eos_token_ids: frozenset[int]  # from generation_config.json, else config.json; never from the tokenizer
    continuous: bool = True  # a prompt may join while others decode
    returns: Literal["logits", "tokens"] = "logits"  # "tokens": the engine samples, greedily or on the device
    keeps_idle_slots: bool = True  # False: decode overwrites the KV cache of every slot that is not listed
    draft_k: int = 0  # tokens drafted ahead of a step by a ``DraftingEngine``; 0: it does not draft
    device_top_k: int = 0  # the largest top_k of a ``SamplingEngine``; 0: it returns logits, or is greedy
    run_k: int = 0  # tokens that a ``RunEngine`` guesses within a step; 0: it is not one
    prefix_block: int = (
        0  # tokens in a prefix-cache block of a ``PrefixEngine``, ``BlockEngine`` or server; 0: it has none
    )
    shares_blocks: bool = False  # it is a ``BlockEngine``
    scores_prompts: bool = False  # it is a ``ScoringEngine``, or a server that computes the logprobs of prompts
    width: int = 0  # numbers that an input gives, of an encoder; 0: it generates
    labels: tuple[str, ...] = ()  # of a classification


class GenerateEngine(Protocol):
    """One loaded causal language model with ``spec.slots`` independent KV caches.

    The Neuron engines require, and callers ensure for all: a step is a prefill or a decode, never both, and every
    live slot is in every decode, sorted ascending. Calls come from one thread.
    """

    @property
    def spec(self) -> EngineSpec:
        """Raises RuntimeError before ``load``."""
        ...

    def load(self) -> None:
        """Read the weights and warm up every bucket that has code of its own. Raises ``EngineLoadError`` with the cause
        and a hint."""
        ...

    def prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> Any:
        """Process whole prompts into free slots, one prompt a slot.

        Returns float32 logits ``[len(slots), vocab_size]`` of the token after each prompt, in the order of ``slots``;
        or, where ``spec.returns == "tokens"``, a list of that many token ids.
        """
        ...

    def decode(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> Any:
        """Generate one more token for each live slot: ``tokens[i]`` is written at ``positions[i]`` of ``slots[i]``.

        Returns the same as ``prefill``. ``positions[i]`` is the number of tokens already in the slot.
        """
        ...

    def close(self) -> None:
        """Release all resources. On Neuron, cores are freed only when the process exits."""
        ...


class VerifyingEngine(GenerateEngine, Protocol):
    """An engine that takes several tokens a slot in one step, and returns logits."""

    def verify(self, slots: Sequence[int], tokens: Sequence[Sequence[int]], positions: Sequence[int]) -> Any:
        """Like ``decode``, with ``q`` tokens for each slot, written from ``positions[i]`` on.

        Returns float32 logits ``[len(slots), q, vocab_size]``, each of the token that follows. Positions after the
        last written one of a slot are never read, so a caller takes tokens back by overwriting them.
        ``positions[i] + q`` is at most ``spec.max_len``.
        """
        ...


class ScoringEngine(GenerateEngine, Protocol):
    """An engine that also returns the logits of the prompt's own tokens. ``spec.returns`` is "logits"."""

    def score(
        self,
        slots: Sequence[int],
        prompts: Sequence[Sequence[int]],
        read: Callable[[int, Sequence[int], Any], None],
    ) -> Any:
        """Like ``prefill``. Calls ``read`` with the row, some of its prompt's tokens, and the float32 logits
        ``[tokens, vocab_size]`` that predict them; in their order, from the second token of a prompt to its last."""
        ...


class PrefixEngine(GenerateEngine, Protocol):
    """An engine that can reuse the beginning of a prompt from a slot. ``spec.keeps_idle_slots`` is True.

    A free slot keeps the KV cache of its last request: the prefilled tokens, and each decoded one, at their positions.
    Positions after the last of them are never read.
    """

    def copy_prefix(self, source: int, slot: int, count: int) -> None:
        """Copy the first ``count`` positions of the slot ``source``, live or free, to ``slot``."""
        ...

    def prefill_from(self, slots: Sequence[int], prompts: Sequence[Sequence[int]], starts: Sequence[int]) -> Any:
        """Like ``prefill``, where ``slots[i]`` holds the first ``starts[i]`` tokens of ``prompts[i]``, never all."""
        ...


@dataclass(frozen=True)
class Reuse:
    """The slot of a prompt, and the prefix that need not be processed again."""

    slot: int
    count: int = 0  # prompt tokens that the slot, or ``source``, holds already
    source: int | None = None  # the slot to copy the first ``count`` tokens from; None: no copy


class Prefixes(Protocol):
    """The tokens that the KV cache holds, and the slot in which a new prompt can reuse the most of them."""

    def place(self, prompt: Sequence[int], free: Collection[int]) -> Reuse:
        """Returns the best of the ``free`` slots, at least one, for a prompt. Changes nothing."""
        ...

    def take(self, reuse: Reuse, prompt: Sequence[int]) -> None:
        """Assign the slot that ``place`` has just returned for the prompt; its content is unknown until ``hold``."""
        ...

    def hold(self, slot: int, ids: Sequence[int]) -> None:
        """Record that the KV cache of a live slot holds these tokens, from its beginning on."""
        ...

    def leave(self, slot: int, ids: Sequence[int]) -> None:
        """Record that the slot is free, and holds these tokens; none: its content is unknown."""
        ...


class BlockEngine(GenerateEngine, Protocol):
    """An engine whose slots share the blocks of common prefixes. A free slot holds nothing of its own."""

    @property
    def prefixes(self) -> Prefixes:
        """The content of the blocks. ``prefill`` and ``prefill_from`` follow ``take``."""
        ...

    def prefill_from(self, slots: Sequence[int], prompts: Sequence[Sequence[int]], starts: Sequence[int]) -> Any:
        """See ``PrefixEngine.prefill_from``. ``starts`` are those of ``prefixes.place``."""
        ...


class DraftingEngine(VerifyingEngine, Protocol):
    """An engine that also guesses its next tokens, at a lower cost than a step of its own."""

    def draft(
        self, slots: Sequence[int], tokens: Sequence[tuple[int, int]], positions: Sequence[int], k: int
    ) -> list[list[int]]:
        """Returns ``k`` guesses for each of ``slots``, sorted, which may be a subset of the live ones.

        ``tokens[i]`` are the last two of the slot; the second of them will be written at ``positions[i]``. A slot is
        drafted for before each of its steps or never, since the draft sees no other tokens. Where
        ``spec.keeps_idle_slots`` is False, all live slots are drafted for.
        """
        ...


@dataclass(frozen=True)
class DeviceSampling:
    """How a slot's next tokens are drawn on the device. Greedy is ``top_k`` 1.

    Host or device is a property of the model, not of a request: a graph that samples returns no logits.

    On NxD Inference ``top_k`` -1 draws evenly from the ids that the device compares, and 0 does so or is rejected, by
    version. So "no top_k" is the largest.
    """

    top_k: int = 1  # 1 to ``EngineSpec.device_top_k``
    top_p: float = 1.0  # above 0, at most 1
    temperature: float = 1.0  # above 0


class SamplingEngine(GenerateEngine, Protocol):
    """An engine that samples tokens itself, by the parameters last set for the slot. ``spec.returns`` is "tokens"."""

    def sample_by(self, slots: Sequence[int], sampling: Sequence[DeviceSampling]) -> None:
        """Sample ``slots[i]`` by ``sampling[i]`` from now on. Called before the prefill into the slot."""
        ...


class RunEngine(GenerateEngine, Protocol):
    """An engine that speculates within its own step. Greedy; ``spec.returns`` is "tokens"."""

    def decode_runs(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> list[list[int]]:
        """Like ``decode``, with 1 to ``spec.run_k + 1`` tokens for each slot, all of them the model's own choice.

        ``positions[i] + spec.run_k + 1`` is at most ``spec.max_len``; with less room, callers use ``decode``.
        """
        ...


class EngineLoadError(Exception):
    """A model that cannot be loaded: a stable id, the cause in one sentence, and a hint."""

    def __init__(self, id: str, what: str, hint: str = "") -> None:
        super().__init__(f"{id}: {what}" + (f" ({hint})" if hint else ""))
        self.id = id
        self.what = what
        self.hint = hint
