"""Batches of transformers-neuronx: converts slots to the package's tensors, with rows, positions and padding.

There are three kinds, by the abilities of the model's class. Inputs and outputs are in the order of ``slots``: logits
``[rows, vocab]`` or ids ``[rows, 1]``; of ``verify``, logits ``[rows, len(tokens[0]), vocab]`` from the graph of
``length`` tokens, at least as long, which writes ``length`` positions of each slot from ``positions[i]`` on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(eq=False)
class ContinuousRows:
    """Continuous batching: ``start_ids`` are the slots, ``cache_ids`` ``[rows, tokens]`` each row's own positions.

    Positions are int64 like the tokens, since 0.13 scatters a decode's into a tensor of the tokens' dtype. A decode
    runs all slots. Unlisted ones get token 0 at position 0, so callers list every slot whose KV cache is still needed
    (transformers-neuronx `base._prepare_for_continuous_batching`).
    """

    model: Any
    slots: int
    longest: int  # the largest decode bucket, in tokens

    def prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Right-padded, at least two tokens wide: a width of 1 would be treated as a decode and overwrite other slots.

        The package derives a prompt's length from the largest of its ``cache_ids``, so padding has 0 there.
        """
        import torch

        width = max(2, *(len(prompt) for prompt in prompts))
        ids = torch.tensor([self._padded(list(prompt), width) for prompt in prompts])
        positions = [self._padded(list(range(len(prompt))), width) for prompt in prompts]
        return self._forward(ids, torch.tensor(positions), slots)

    def decode(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        import torch

        check_sorted(slots)
        check_within(max(positions), self.longest)
        return self._forward(torch.tensor(tokens)[:, None], torch.tensor(positions)[:, None], slots)

    def verify(
        self, slots: Sequence[int], tokens: Sequence[Sequence[int]], positions: Sequence[int], length: int
    ) -> torch.Tensor:
        """Pass all slots, since the speculative graph has the compiled batch and scatters no rows.

        The package decides by the very first position whether a call speculates or begins prompts, so a free slot
        writes from 1 on, and no listed one may be at 0.
        """
        import torch

        check_sorted(slots)
        starts = [1] * self.slots
        ids = torch.zeros(self.slots, length, dtype=torch.long)
        for slot, row, position in zip(slots, tokens, positions, strict=True):
            starts[slot] = position
            ids[slot, : len(row)] = torch.tensor(row)
        cells = torch.tensor(starts)[:, None] + torch.arange(length)
        every = torch.arange(self.slots, dtype=torch.int32)
        logits = self.model.speculative_forward(
            input_ids=ids, cache_ids=cells, start_ids=every, speculation_length=length
        )
        return by_row(logits, len(tokens[0]))[list(slots)]

    def _padded(self, row: list[int], width: int) -> list[int]:
        return row + [0] * (width - len(row))

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
        import torch

        starts = torch.tensor(list(slots), dtype=torch.int32)
        output: torch.Tensor = self.model.forward(input_ids=ids, cache_ids=positions, start_ids=starts)
        return output


@dataclass(eq=False)
class LockStepRows:
    """Static batching: row i is slot i, prompts are left-padded, and all rows share one position.

    ``start_ids`` ``[batch]`` are the numbers of padding tokens. Rows without a request run a prompt of zeros without
    padding: a row of only padding would attend to nothing and produce NaN.
    """

    model: Any
    slots: int
    longest: int  # the largest decode bucket, in tokens

    def __post_init__(self) -> None:
        self._starts = [0] * self.slots

    def prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Begin a new batch, which discards the contents of all slots.

        Nothing is reset: positions beyond a row's own are masked, and ``reset`` of the package writes the whole KV
        cache from the host.
        """
        import torch

        width = max(len(prompt) for prompt in prompts)
        rows = [[0] * width for _ in range(self.slots)]
        self._starts = [0] * self.slots
        for slot, prompt in zip(slots, prompts, strict=True):
            self._starts[slot] = width - len(prompt)
            rows[slot] = self._padded(list(prompt), width)
        return self._begin(torch.tensor(rows))[list(slots)]

    def decode(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        import torch

        ids = torch.zeros(self.slots, 1, dtype=torch.long)
        ids[list(slots), 0] = torch.tensor(tokens)
        cells = torch.tensor([self._shared(slots, positions)], dtype=torch.int32)
        return self._step(ids, cells)[list(slots)]

    def verify(
        self, slots: Sequence[int], tokens: Sequence[Sequence[int]], positions: Sequence[int], length: int
    ) -> torch.Tensor:
        """For one slot only: rows that share a position cannot accept different numbers of tokens."""
        import torch

        row = list(tokens[0])
        ids = torch.tensor([row + [0] * (length - len(row))])
        cells = torch.arange(length, dtype=torch.int32) + self._shared(slots, positions)
        logits = self.model.speculative_forward(
            input_ids=ids, cache_ids=cells, start_ids=self._start_ids(), speculation_length=length
        )
        return by_row(logits, len(row))

    def _padded(self, row: list[int], width: int) -> list[int]:
        return [0] * (width - len(row)) + row

    def _begin(self, ids: torch.Tensor) -> torch.Tensor:
        """Run a batch of prompts ``[batch, width]``; the package pads it to a context bucket, on the right."""
        output: torch.Tensor = self.model.forward(input_ids=ids, cache_ids=None, start_ids=self._start_ids())
        return output

    def _step(self, ids: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.model.forward(input_ids=ids, cache_ids=cells, start_ids=self._start_ids())
        return output

    def _start_ids(self) -> torch.Tensor:
        import torch

        return torch.tensor(self._starts, dtype=torch.int32)

    def _shared(self, slots: Sequence[int], positions: Sequence[int]) -> int:
        """Returns the position of all rows, including padding. Raises ValueError if they differ or it is too large."""
        shared = {position + self._starts[slot] for slot, position in zip(slots, positions, strict=True)}
        if len(shared) != 1:
            raise ValueError(f"the rows of a static batch must share one position, not {sorted(shared)}")
        position = shared.pop()
        check_within(position, self.longest)
        return position


class SerialRows(LockStepRows):
    """GPT-NeoX: the position is named ``cache_offset``, and a prompt needs that of each token.

    There is no context graph: the package slices a prompt and runs it token by token, as its own ``sample`` does.
    """

    def _begin(self, ids: torch.Tensor) -> torch.Tensor:
        import torch

        return self._step(ids, torch.arange(ids.shape[1], dtype=torch.int32))

    def _step(self, ids: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.model.forward(input_ids=ids, cache_offset=cells, start_ids=self._start_ids())
        return output


Rows = ContinuousRows | LockStepRows


def by_row(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Returns ``[rows, count, vocab]`` from ``speculative_forward``'s ``[tokens, vocab, rows]``."""
    return logits.permute(2, 0, 1)[:, :count].float()


def check_within(position: int, longest: int) -> None:
    """Raises ValueError unless a decode bucket holds ``position``. The package itself raises StopIteration."""
    if position >= longest:
        raise ValueError(f"position {position} is beyond the {longest} tokens of a slot")


def check_sorted(slots: Sequence[int]) -> None:
    """Raises ValueError unless ``slots`` are ascending, each once."""
    if any(a >= b for a, b in pairwise(slots)):
        raise ValueError(f"slots are not sorted: {list(slots)}")
