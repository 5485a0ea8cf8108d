"""The NxD Inference adapter with one mistake each, of those that its tests must not let pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.workers.nxdi_traffic import MAX_LEN
from workers.engines.nxd_inference.engine import NxdEngine

Rows = Sequence[Sequence[int]]


class Called(NxdEngine):
    """An engine whose calls of the model can be changed in one place."""

    def _forward(self, slots: Sequence[int], **inputs: Sequence[Sequence[int]]) -> Any:
        return self._call(slots, inputs["input_ids"], inputs["attention_mask"], inputs["position_ids"])

    def _call(self, slots: Sequence[int], ids: Rows, mask: Any, positions: Rows) -> Any:
        return super()._forward(slots, input_ids=ids, attention_mask=mask, position_ids=positions)


class SwappedRows(NxdEngine):
    """The first two answers of a call change places."""

    def _answers(self, output: Any, rows: int) -> Any:
        output_rows = super()._answers(output, rows)
        order = [1, 0, *range(2, rows)] if rows > 1 else [0]
        return [output_rows[row] for row in order] if isinstance(output_rows, list) else output_rows[order]


class PositionsOffByOne(Called):
    """A step writes one position further on, but for the slot's end, where that would be noticed."""

    def _call(self, slots: Sequence[int], ids: Rows, mask: Any, positions: Rows) -> Any:
        if len(ids[0]) == 1:
            positions = [[min(position + 1, MAX_LEN - 1) for position in row] for row in positions]
        return super()._call(slots, ids, mask, positions)


class PromptOffByOne(Called):
    """A prompt is counted from 1, except for its first token, which distinguishes a prompt from a step."""

    def _call(self, slots: Sequence[int], ids: Rows, mask: Any, positions: Rows) -> Any:
        if len(ids[0]) > 1:
            positions = [[position + 1 if position else 0 for position in row] for row in positions]
        return super()._call(slots, ids, mask, positions)


class MissingLiveSlot(NxdEngine):
    """Every other step leaves the last slot out, and answers for it what the first one got."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._steps = 0

    def decode(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> Any:
        self._steps += 1
        if self._steps % 2 or len(slots) < 2:
            return super().decode(slots, tokens, positions)
        import torch

        output = super().decode(slots[:-1], tokens[:-1], positions[:-1])
        return [*output, output[0]] if isinstance(output, list) else torch.cat([output, output[:1]])


class PausedSlot(NxdEngine):
    """A slot is left out of one step and gets its token in a call of its own: as other engines would allow."""

    def decode(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> Any:
        import torch

        if len(slots) < 2:
            return super().decode(slots, tokens, positions)
        some = super().decode(slots[:-1], tokens[:-1], positions[:-1])
        last = super().decode(slots[-1:], tokens[-1:], positions[-1:])
        return [*some, *last] if isinstance(some, list) else torch.cat([some, last])


class UnsortedSlots(NxdEngine):
    """The rows of a step come in falling order, and its answers are put back into order."""

    def decode(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> Any:
        import torch

        output = super().decode(list(slots)[::-1], list(tokens)[::-1], list(positions)[::-1])
        return output[::-1] if isinstance(output, list) else torch.flip(output, [0])


class IdleSlotAtPosition0(NxdEngine):
    """One slot waits while the others step, and is sent along with token 0 at position 0; then it steps alone so."""

    def decode(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> Any:
        import torch

        if len(slots) < 2:
            return super().decode(slots, tokens, positions)
        last = len(slots) - 1
        some = super().decode(slots, [*tokens[:last], 0], [*positions[:last], 0])
        alone = super().decode(slots, [*[0] * last, tokens[last]], [*[0] * last, positions[last]])
        return [*some[:last], alone[last]] if isinstance(some, list) else torch.cat([some[:last], alone[last:]])


class PaddingOnTheLeft(Called):
    """Shorter prompts of a call are moved to its right end."""

    def _call(self, slots: Sequence[int], ids: Rows, mask: Any, positions: Rows) -> Any:
        if len(ids[0]) > 1:
            lengths = [sum(row) for row in mask]

            def moved(rows: Rows) -> list[list[int]]:
                return [[*row[length:], *row[:length]] for row, length in zip(rows, lengths, strict=True)]

            ids, mask, positions = moved(ids), moved(mask), moved(positions)
        return super()._call(slots, ids, mask, positions)


class MaskWithTheNewToken(Called):
    """The mask of a step counts the step's own token, whose place in the cache holds what was there before."""

    def _call(self, slots: Sequence[int], ids: Rows, mask: Any, positions: Rows) -> Any:
        if len(ids[0]) == 1:
            mask = [[1, *row][: len(row)] if row[-1] == 0 else [*row, 1][: MAX_LEN - 1] for row in mask]
            width = max(map(len, mask))
            mask = [[*row, *[0] * (width - len(row))] for row in mask]
        return super()._call(slots, ids, mask, positions)


class WideMask(Called):
    """The mask of every step is as wide as a slot, as early versions of the package infer it."""

    def _call(self, slots: Sequence[int], ids: Rows, mask: Any, positions: Rows) -> Any:
        if len(ids[0]) == 1:
            width = self._model.config.neuron_config.n_positions
            mask = [[*row, *[0] * (width - len(row))] for row in mask]
        return super()._call(slots, ids, mask, positions)


class TopKOff(NxdEngine):
    """Greedy requests go to the device with top_k 0, which is "off" elsewhere."""

    def _sampling_params(self, slots: Sequence[int]) -> Any:
        parameters = super()._sampling_params(slots)
        parameters[:, 0] = 0
        return parameters


HOST: tuple[Callable[..., NxdEngine], ...] = (
    SwappedRows,
    PositionsOffByOne,
    PromptOffByOne,
    MissingLiveSlot,
    PausedSlot,
    UnsortedSlots,
    IdleSlotAtPosition0,
    PaddingOnTheLeft,
    MaskWithTheNewToken,
)
DEVICE: tuple[Callable[..., NxdEngine], ...] = (SwappedRows, TopKOff)
