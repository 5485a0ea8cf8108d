"""Continuous batching: each row names its line of the KV cache."""

from __future__ import annotations

from typing import Any

import torch
from neuron_double.runtime import runtime

from transformers_neuronx.static import FamilyModel


class LinesModel(FamilyModel):
    """The three classes that have ``context_batch_sizes``."""

    context_batch_sizes = (1,)
    quantizes_kv = True

    @property
    def _batches_continuously(self) -> bool:
        return True

    def _context_batches(self) -> list[int]:
        return [1] if self.neuron_config.continuous_batching is not None else self.batch_sizes

    def forward(self, input_ids: torch.Tensor, cache_ids: Any = None, start_ids: Any = None) -> torch.Tensor:
        return self._step(input_ids, cache_ids, start_ids)

    def _step(self, input_ids: torch.Tensor, cache_ids: Any, start_ids: Any) -> torch.Tensor:
        """``forward`` of all three."""
        if self.neuron_config.continuous_batching is None:
            return self._static(input_ids, cache_ids, start_ids)
        self._ready()
        rows, width = input_ids.shape
        if cache_ids is None:
            cache_ids = torch.arange(width).expand(rows, width)
        if cache_ids.dim() == 1:
            cache_ids = cache_ids.expand(rows, -1)
        if tuple(cache_ids.shape) != (rows, width):
            raise RuntimeError(f"cache_ids {list(cache_ids.shape)} do not fit input_ids {list(input_ids.shape)}")
        lines = [0] * rows if start_ids is None else [int(line) for line in start_ids.flatten()]
        if len(lines) != rows or max(lines) >= self.batch or min(lines) < 0:
            raise IndexError(f"lines {lines} for {rows} rows of a batch of {self.batch}")
        if width > 1 and int(cache_ids[0, 0]) == 0:
            return self._output(self._prompts(input_ids, cache_ids, lines), lines)
        if width > 1:
            return self._speculate(input_ids, cache_ids, lines, width)
        return self._output(self._tokens(input_ids, cache_ids, lines), lines)

    def _prompts(self, input_ids: torch.Tensor, cache_ids: torch.Tensor, lines: list[int]) -> torch.Tensor:
        """One after the other; a prompt ends at its highest position, and the padding after it is written too."""
        width, largest = input_ids.shape[1], self.context_buckets[-1]
        assert width <= largest, f"invalid input prompt length ({width} <= {largest})"
        outputs = []
        for row, line in enumerate(lines):
            runtime().execute()
            length = int(cache_ids[row].max()) + 1
            outputs.append(self._run(line, [int(token) for token in input_ids[row]], 0)[min(length, width) - 1])
        return torch.stack(outputs)

    def _tokens(self, input_ids: torch.Tensor, cache_ids: torch.Tensor, lines: list[int]) -> torch.Tensor:
        """All lines run: those without a row with token 0 at position 0."""
        # The package documents no order but serves only sorted callers; this stand-in holds them to it.
        assert lines == sorted(set(lines)), f"rows are not sorted by line: {lines}"
        if cache_ids.dtype != input_ids.dtype:
            raise RuntimeError("scatter(): Expected self.dtype to be equal to src.dtype")
        runtime().execute()
        for line in range(self.batch):
            if line not in lines:
                self._run(line, [0], 0)
        rows = [self._run(line, [int(input_ids[row, 0])], int(cache_ids[row, 0]))[0] for row, line in enumerate(lines)]
        return torch.stack(rows)

    def _speculate(
        self, input_ids: torch.Tensor, cache_ids: torch.Tensor, lines: list[int], length: int
    ) -> torch.Tensor:
        """``[length, vocab, rows]``: the tokens that follow each of the last ``length`` tokens of every row."""
        rows = input_ids.shape[0]
        compiled = [batch for _, batch in self._speculation]
        assert rows in compiled, f"invalid batch size for speculative forward ({rows} not in {compiled})"
        if (length, rows) not in self._speculation:
            raise KeyError((length, rows))
        if self.neuron_config.continuous_batching is not None:
            largest = self.context_buckets[-1]
            assert length <= largest, f"invalid input prompt length ({length} <= {largest})"
            # One number for each row is cut as if there were one for each token.
            assert length >= rows, f"buffer ([{rows}]) and tensor ([{length}]) have different shapes!"
        runtime().execute()
        outputs = []
        for row, line in enumerate(lines):
            tokens = [int(token) for token in input_ids[row, :length]]
            outputs.append(self._run(line, tokens, int(cache_ids[row, 0])))
        return torch.stack(outputs, dim=-1)

    def _speculative(
        self, input_ids: torch.Tensor, cache_ids: Any, start_ids: Any, speculation_length: int | None
    ) -> torch.Tensor:
        """``speculative_forward``, of static batches too."""
        self._ready()
        rows, width = input_ids.shape
        length = width if speculation_length is None else speculation_length
        if cache_ids is None:
            cache_ids = torch.arange(width)
        if cache_ids.dim() == 1:
            cache_ids = cache_ids.expand(rows, -1)
        if self.neuron_config.continuous_batching is None:
            lines = list(range(rows))
        else:
            lines = [int(line) for line in start_ids.flatten()]
            if width > 1 and int(cache_ids[0, 0]) == 0:  # of a prompt, whoever calls
                return self._prompts(input_ids, cache_ids, lines).to(torch.float32)
        return self._speculate(input_ids, cache_ids, lines, length).to(torch.float32)
