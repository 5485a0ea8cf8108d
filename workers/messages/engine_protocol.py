"""The protocols that every engine keeps, so that one batcher drives all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

LOADS_ARRIVING: frozenset[str] = frozenset({"cpu"})
"""The engines whose ``load`` may be called while the checkpoint is still being fetched into its folder: they wait for
each file before they read it, and return when all is there (`workers.artifacts.fetch.arrival`). Of checkpoints whose
own code is run none does, since that reads what it likes. Neuron's packages open files by themselves, so they do
not."""


@dataclass(frozen=True)
class EngineSpec:
    """What the batcher must know of an engine. Fixed once it is loaded, since Neuron compiles shapes ahead of time."""

    slots: int  # batch rows; the compiled batch size on Neuron
    max_len: int  # tokens a slot's KV cache holds: prompt + generated
    prefill_buckets: tuple[int, ...]  # compiled prompt lengths, ascending; the last is the longest prompt
    decode_buckets: tuple[int, ...]  # compiled KV lengths, ascending; the last equals max_len
    vocab_size: int
    eos_token_ids: frozenset[int]  # from generation_config.json, else config.json; never from the tokenizer
    continuous: bool = True  # a prompt may join while others decode
    returns: Literal["logits", "tokens"] = "logits"  # "tokens": the engine samples, greedily or on the device
    keeps_idle_slots: bool = True  # False: decode overwrites the KV cache of every slot that is not listed
    draft_k: int = 0  # tokens that it drafts ahead of a step, where it is a ``DraftingEngine``; 0: it is none
    device_top_k: int = 0  # the largest top_k of a ``SamplingEngine``; 0: it is none, and returns logits or is greedy
    run_k: int = 0  # tokens that it guesses within a step, where it is a ``RunEngine``; 0: it is none
    prefix_block: int = 0  # tokens of a block of its prefix cache, where it is a ``PrefixEngine``; 0: it is none


class GenerateEngine(Protocol):
    """One loaded causal language model with ``spec.slots`` independent KV caches.

    The hard rule of the Neuron engines, which callers keep for all: a step is a prefill or a decode, never both, and
    every live slot is in every decode, sorted ascending. Calls come from one thread.
    """

    @property
    def spec(self) -> EngineSpec:
        """Raises RuntimeError before ``load``."""
        ...

    def load(self) -> None:
        """Read the weights and warm up every bucket. Raises ``EngineLoadError`` with the cause and its remedy."""
        ...

    def prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> Any:
        """Process whole prompts into free slots, one prompt a slot.

        Returns float32 logits ``[len(slots), vocab_size]`` of the token after each prompt, in the order of ``slots``;
        or, where ``spec.returns == "tokens"``, a list of that many token ids.
        """
        ...

    def decode(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> Any:
        """One more token for each live slot: ``tokens[i]`` is written at ``positions[i]`` of ``slots[i]``.

        Returns as ``prefill`` does. ``positions[i]`` is the number of tokens already in the slot.
        """
        ...

    def close(self) -> None:
        """Let go of everything. On Neuron only the end of the process frees the cores."""
        ...


class VerifyingEngine(GenerateEngine, Protocol):
    """An engine that takes several tokens a slot in one step, and returns logits."""

    def verify(self, slots: Sequence[int], tokens: Sequence[Sequence[int]], positions: Sequence[int]) -> Any:
        """As ``decode``, with ``q`` tokens for each slot, written from ``positions[i]`` on.

        Returns float32 logits ``[len(slots), q, vocab_size]``, each of the token that follows. What stands behind the
        last written position of a slot is never read, so a caller takes tokens back by writing over them.
        ``positions[i] + q`` is at most ``spec.max_len``.
        """
        ...


class PrefixEngine(GenerateEngine, Protocol):
    """An engine whose prompts may begin with what a slot holds already. ``spec.keeps_idle_slots`` is True.

    A free slot keeps what its last owner left; a slot's cache has the tokens that were prefilled, and each that was
    decoded, at their positions. What stands behind the last of them is never read.
    """

    def copy_prefix(self, source: int, slot: int, count: int) -> None:
        """The first ``count`` positions of the slot ``source``, live or free, come to be those of ``slot`` too."""
        ...

    def prefill_from(self, slots: Sequence[int], prompts: Sequence[Sequence[int]], starts: Sequence[int]) -> Any:
        """As ``prefill``, where ``slots[i]`` holds the first ``starts[i]`` tokens of ``prompts[i]``, but never all."""
        ...


class DraftingEngine(VerifyingEngine, Protocol):
    """An engine that also guesses what its next tokens will be, for less than a step of its own costs."""

    def draft(
        self, slots: Sequence[int], tokens: Sequence[tuple[int, int]], positions: Sequence[int], k: int
    ) -> list[list[int]]:
        """``k`` guesses for each of ``slots``, sorted, which may be some of the live ones.

        ``tokens[i]`` are the last two of the slot; the second of them will be written at ``positions[i]``. A slot is
        drafted for either before each of its steps or never, since the draft sees no other tokens. Where
        ``spec.keeps_idle_slots`` is False, all live slots are drafted for.
        """
        ...


@dataclass(frozen=True)
class DeviceSampling:
    """How a slot's next tokens are drawn on the device. Greedy is ``top_k`` 1.

    On NxD Inference ``top_k`` 0 and -1 draw one token uniformly from the vocabulary, so "no top_k" is the largest.
    """

    top_k: int = 1  # 1 to ``EngineSpec.device_top_k``
    top_p: float = 1.0  # above 0, at most 1
    temperature: float = 1.0  # above 0


class SamplingEngine(GenerateEngine, Protocol):
    """An engine that draws the tokens itself, by what it was last told for the slot. ``spec.returns`` is "tokens"."""

    def sample_by(self, slots: Sequence[int], how: Sequence[DeviceSampling]) -> None:
        """From now on ``slots[i]`` is sampled by ``how[i]``. Called before the prefill into the slot."""
        ...


class RunEngine(GenerateEngine, Protocol):
    """An engine that speculates within its own step and tells what came of it. Greedy; ``spec.returns`` is "tokens"."""

    def decode_runs(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> list[list[int]]:
        """As ``decode``, with 1 to ``spec.run_k + 1`` tokens for each slot, all of them the model's own choice.

        ``positions[i] + spec.run_k + 1`` is at most ``spec.max_len``; where there is less room, callers ``decode``.
        """
        ...


class OneOffEngine(GenerateEngine, Protocol):
    """An engine whose package has a generate loop of its own, for one answer without a batcher."""

    def generate(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        *,
        temperature: float,
        top_k: int | None,
        top_p: float,
        on_token: Callable[[int], None],
    ) -> list[int]:
        """One answer to one prompt; ``temperature`` 0 is greedy. ``on_token`` gets each id as it comes, an EOS too.

        Raises ValueError, before any token, where that loop cannot be used for the model as it was loaded: callers then
        ``prefill`` and ``decode``.
        """
        ...


class EngineLoadError(Exception):
    """A model that cannot be loaded: a stable id, the cause in one sentence, and what mends it."""

    def __init__(self, id: str, what: str, hint: str = "") -> None:
        super().__init__(f"{id}: {what}" + (f" ({hint})" if hint else ""))
        self.id = id
        self.what = what
        self.hint = hint
