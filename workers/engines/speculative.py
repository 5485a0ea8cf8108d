"""Speculative decoding: an engine with a smaller draft engine that guesses its next tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

from workers.compiled.host_sets import Buildable
from workers.engines.engine_setup import check_vocabularies
from workers.messages.engine_protocol import (
    EngineLoadError,
    EngineSpec,
    GenerateEngine,
    PrefixEngine,
    ScoringEngine,
    VerifyingEngine,
)


class SpeculativeEngine:
    """Implements ``DraftingEngine``: the target engine in everything but ``draft``.

    The draft engine has the same slots and lengths, and every prompt is prefilled in both. It lags behind the target by
    at most one token, the last of a fully accepted run. Each draft therefore begins with the slot's last two tokens;
    writing the first one again changes nothing.
    """

    def __init__(self, target: VerifyingEngine, draft: VerifyingEngine, k: int) -> None:
        self._target = target
        self._draft = draft
        self._k = k

    @property
    def spec(self) -> EngineSpec:
        return replace(self._target.spec, draft_k=self._k)

    def load(self) -> None:
        """Load both engines. Raises EngineLoadError, also where their vocabularies differ."""
        self._target.load()
        try:
            self._draft.load()
        except EngineLoadError as error:
            raise EngineLoadError(error.id, f"the draft model: {error.what}", error.hint) from error
        check_vocabularies(self._target.spec.vocab_size, self._draft.spec.vocab_size)

    def prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> Any:
        self._draft.prefill(slots, prompts)
        return self._target.prefill(slots, prompts)

    def copy_prefix(self, source: int, slot: int, count: int) -> None:
        cast(PrefixEngine, self._target).copy_prefix(source, slot, count)

    def prefill_from(self, slots: Sequence[int], prompts: Sequence[Sequence[int]], starts: Sequence[int]) -> Any:
        """The draft engine processes whole prompts: its KV cache lacks tokens of steps without a draft."""
        self._draft.prefill(slots, prompts)
        return cast(PrefixEngine, self._target).prefill_from(slots, prompts, starts)

    def score(
        self,
        slots: Sequence[int],
        prompts: Sequence[Sequence[int]],
        read: Callable[[int, Sequence[int], Any], None],
    ) -> Any:
        self._draft.prefill(slots, prompts)
        return cast(ScoringEngine, self._target).score(slots, prompts, read)

    def decode(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> Any:
        return self._target.decode(slots, tokens, positions)

    def verify(self, slots: Sequence[int], tokens: Sequence[Sequence[int]], positions: Sequence[int]) -> Any:
        return self._target.verify(slots, tokens, positions)

    def draft(
        self, slots: Sequence[int], tokens: Sequence[tuple[int, int]], positions: Sequence[int], k: int
    ) -> list[list[int]]:
        """See ``DraftingEngine.draft``: greedy, one step of the draft engine for each guess."""
        pairs = self._draft.verify(slots, tokens, [position - 1 for position in positions])
        columns = [pairs[:, -1].argmax(dim=-1).tolist()]
        for ahead in range(1, k):
            logits = self._draft.decode(slots, columns[-1], [position + ahead for position in positions])
            columns.append(logits.argmax(dim=-1).tolist())
        return [list(guesses) for guesses in zip(*columns, strict=True)]

    def close(self) -> None:
        self._draft.close()
        self._target.close()


class _Compiling(Protocol):
    def buildable(self) -> Buildable: ...


def with_draft(target: VerifyingEngine, draft: VerifyingEngine | None, k: int) -> GenerateEngine:
    """Returns the target engine, with its draft if there is one."""
    return target if draft is None else SpeculativeEngine(target, draft, k)


def buildables_of(target: _Compiling, draft: _Compiling | None) -> list[Buildable]:
    """Returns the compile units of the target and of its draft."""
    units = [target.buildable()]
    return units if draft is None else [*units, replace(draft.buildable(), role="draft")]
