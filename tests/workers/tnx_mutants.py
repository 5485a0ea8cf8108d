"""The adapter of transformers-neuronx with one fault each, which the tests of equal answers must find."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from workers.engines.transformers_neuronx.engine import TransformersNeuronxEngine
from workers.engines.transformers_neuronx.rows import ContinuousRows, LockStepRows
from workers.messages.engine_protocol import DeviceSampling

Ints = Sequence[int]


class SwappedRows(ContinuousRows):
    """The answers of two slots are exchanged."""

    def decode(self, slots: Ints, tokens: Ints, positions: Ints) -> torch.Tensor:
        return super().decode(slots, tokens, positions).flip(0)


class SwappedLockStepRows(LockStepRows):
    """As ``SwappedRows``, of a static batch."""

    def decode(self, slots: Ints, tokens: Ints, positions: Ints) -> torch.Tensor:
        return super().decode(slots, tokens, positions).flip(0)


class OneAhead(ContinuousRows):
    """Every token is written one position too far."""

    def decode(self, slots: Ints, tokens: Ints, positions: Ints) -> torch.Tensor:
        return super().decode(slots, tokens, [position + 1 for position in positions])


class OneBehind(ContinuousRows):
    """Every token is written over the one before it."""

    def decode(self, slots: Ints, tokens: Ints, positions: Ints) -> torch.Tensor:
        return super().decode(slots, tokens, [position - 1 for position in positions])


class LockStepOneAhead(LockStepRows):
    """The shared position is one too far."""

    def _shared(self, slots: Ints, positions: Ints) -> int:
        return super()._shared(slots, positions) + 1


class MissingSlot(ContinuousRows):
    """The last live slot has a step of its own, and meanwhile the others are idle to the device."""

    def decode(self, slots: Ints, tokens: Ints, positions: Ints) -> torch.Tensor:
        if len(slots) == 1:
            return super().decode(slots, tokens, positions)
        first = super().decode(slots[:-1], tokens[:-1], positions[:-1])
        return torch.cat([first, super().decode(slots[-1:], tokens[-1:], positions[-1:])])


class UnsortedSlots(ContinuousRows):
    """Slots go from the last to the first, with all that is theirs."""

    def decode(self, slots: Ints, tokens: Ints, positions: Ints) -> torch.Tensor:
        starts = torch.tensor(list(slots)[::-1], dtype=torch.int32)
        ids, column = torch.tensor(tokens).flip(0)[:, None], torch.tensor(positions).flip(0)[:, None]
        output: torch.Tensor = self.model.forward(input_ids=ids, cache_ids=column.int(), start_ids=starts)
        return output.flip(0)


class PromptsIntoOtherSlots(ContinuousRows):
    """Each prompt goes into the slot after its own."""

    def prefill(self, slots: Ints, prompts: Sequence[Ints]) -> torch.Tensor:
        return super().prefill([(slot + 1) % self.slots for slot in slots], prompts)


class OneTokenPromptAsDecode(ContinuousRows):
    """A prompt of one token is not padded: the package runs a decode, with all other slots idle at position 0."""

    def prefill(self, slots: Ints, prompts: Sequence[Ints]) -> torch.Tensor:
        rows = []
        for slot, prompt in zip(slots, prompts, strict=True):
            arguments = [slot], [prompt]
            rows.append(self.decode([slot], prompt, [0]) if len(prompt) == 1 else super().prefill(*arguments))
        return torch.cat(rows)


class LiveRowsAlone(ContinuousRows):
    """Only rows that are listed are verified, though the graph has the compiled batch."""

    def verify(self, slots: Ints, tokens: Sequence[Ints], positions: Ints, length: int) -> torch.Tensor:
        cells = torch.tensor(positions, dtype=torch.int32)[:, None] + torch.arange(length, dtype=torch.int32)
        logits = self.model.speculative_forward(
            input_ids=torch.tensor(tokens),
            cache_ids=cells,
            start_ids=torch.tensor(list(slots), dtype=torch.int32),
            speculation_length=length,
        )
        return logits.permute(2, 0, 1)


class VerifiedOneAhead(ContinuousRows):
    """What is verified is written one position too far."""

    def verify(self, slots: Ints, tokens: Sequence[Ints], positions: Ints, length: int) -> torch.Tensor:
        return super().verify(slots, tokens, [position + 1 for position in positions], length)


class IdleSlotsAtPosition0(ContinuousRows):
    """Idle slots of a verification write from position 0 on, as in a decode: the package takes them for prompts."""

    def verify(self, slots: Ints, tokens: Sequence[Ints], positions: Ints, length: int) -> torch.Tensor:
        forward = self.model.speculative_forward
        idle = [slot for slot in range(self.slots) if slot not in slots]

        def moved(**call: Any) -> torch.Tensor:
            call["cache_ids"][idle] -= 1
            cells: torch.Tensor = forward(**call)
            return cells

        self.model.speculative_forward = moved
        try:
            return super().verify(slots, tokens, positions, length)
        finally:
            del self.model.speculative_forward


class NarrowPositions(ContinuousRows):
    """Positions are int32, as 0.10 took them beside int64 tokens."""

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, slots: Ints) -> torch.Tensor:
        return super()._forward(ids, positions.int(), slots)


class ResetsForEachBatch(LockStepRows):
    """A new batch begins with zeros for the whole KV cache, from the host."""

    def prefill(self, slots: Ints, prompts: Sequence[Ints]) -> torch.Tensor:
        self.model.reset()
        return super().prefill(slots, prompts)


class LeftPadded(ContinuousRows):
    """Prompts are padded on the left, their positions with them."""

    def _padded(self, row: list[int], width: int) -> list[int]:
        return [0] * (width - len(row)) + row


class RightPaddedLockStep(LockStepRows):
    """Prompts of a static batch are padded on the right."""

    def _padded(self, row: list[int], width: int) -> list[int]:
        return row + [0] * (width - len(row))


class PositionsInThePadding(ContinuousRows):
    """Positions go on into the padding, which becomes a part of the prompt."""

    def _padded(self, row: list[int], width: int) -> list[int]:
        is_places = row == list(range(len(row)))
        return list(range(width)) if is_places else super()._padded(row, width)


class AbsentRowsLeftOut(LockStepRows):
    """A static batch has only the rows with a request."""

    def decode(self, slots: Ints, tokens: Ints, positions: Ints) -> torch.Tensor:
        cells = torch.tensor([self._shared(slots, positions)], dtype=torch.int32)
        starts = self._start_ids()[list(slots)]
        output: torch.Tensor = self.model.forward(
            input_ids=torch.tensor(tokens)[:, None], cache_ids=cells, start_ids=starts
        )
        return output


class TopKZero(TransformersNeuronxEngine):
    """Greedy requests have top_k 0 on the device."""

    def _update_sampling(self) -> None:
        sampling = self._sampling
        self._sampling = [DeviceSampling(0, parameters.top_p, parameters.temperature) for parameters in sampling]
        super()._update_sampling()
        self._sampling = sampling


class VerifiesAtPosition0(TransformersNeuronxEngine):
    """Runs that begin at position 0 go into the graph for verifying as well."""

    def verify(self, slots: Ints, tokens: Sequence[Ints], positions: Ints) -> torch.Tensor:
        return self._loaded.verify(slots, tokens, positions, self._length)


def with_rows(kind: type[Any]) -> type[TransformersNeuronxEngine]:
    """The engine with other rows."""

    class Mutant(TransformersNeuronxEngine):
        def _make_rows(self, model: Any, family: Any, continuous: bool) -> Any:
            rows = super()._make_rows(model, family, continuous)
            assert isinstance(rows, kind.__mro__[1])
            return kind(model, self._config.model.max_batch, self._config.max_len)

    Mutant.__name__ = kind.__name__
    return Mutant


CONTINUOUS_ROWS = (
    SwappedRows,
    OneAhead,
    OneBehind,
    MissingSlot,
    UnsortedSlots,
    PromptsIntoOtherSlots,
    OneTokenPromptAsDecode,
    LeftPadded,
    PositionsInThePadding,
    NarrowPositions,
)
VERIFYING_ROWS = (LiveRowsAlone, VerifiedOneAhead, IdleSlotsAtPosition0)
LOCK_STEP_ROWS = (SwappedLockStepRows, LockStepOneAhead, RightPaddedLockStep, AbsentRowsLeftOut)
