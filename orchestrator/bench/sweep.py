"""Measures the table of the optimum-neuron Llama page: prompts of 25, 50 and 75 % of a length, completed to the end."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from orchestrator.bench.server import MeasuredServer, RequestFailed, TokenUsage
from orchestrator.process.text_table import columns

SHARES = (25, 50, 75)  # per cent of the length, as https://huggingface.co/blog/inferentia-llama2
HEADER = ("BATCH", "PROMPT", "OUTPUT", "LATENCY", "OUTPUT TOKENS/S", "ALL TOKENS/S")


@dataclass(frozen=True)
class Round:
    """A batch of equal requests, sent together: the tokens of the complete answers, and the errors of the others."""

    latency_s: float  # from before the first request until after the last answer
    prompt_tokens: int
    output_tokens: int
    errors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cell:
    """One share of one batch size. Its figures are medians over the successful rounds, None without one."""

    share: int  # per cent
    prompt: int  # tokens of each request
    output: int  # requested tokens of each
    batch: int
    rounds: tuple[Round, ...]

    @property
    def latency_s(self) -> float | None:
        """The time of the whole batch to reach the length."""
        return self._median(lambda run: run.latency_s)

    @property
    def output_rate(self) -> float | None:
        """Output tokens/s of the batch over its whole time."""
        return self._median(lambda run: run.output_tokens / run.latency_s)

    @property
    def page_rate(self) -> float | None:
        """The definition of the page, which includes the prompt: batch x length / time."""
        return self._median(lambda run: (run.prompt_tokens + run.output_tokens) / run.latency_s)

    @property
    def output_tokens(self) -> float | None:
        """The generated tokens per request."""
        return self._median(lambda run: run.output_tokens / self.batch)

    @property
    def good_rounds(self) -> int:
        return sum(not run.errors for run in self.rounds)

    @property
    def errors(self) -> dict[str, int]:
        """The number of failed requests by kind and message, the most frequent first."""
        return dict(Counter(error for run in self.rounds for error in run.errors).most_common())

    def as_dict(self) -> dict[str, object]:
        return {
            "percent": self.share,
            "prompt_tokens": self.prompt,
            "output_tokens": self.output,
            "batch": self.batch,
            "rounds": len(self.rounds),
            "good_rounds": self.good_rounds,
            "counted_prompt_tokens": self._median(lambda run: run.prompt_tokens / self.batch),
            "counted_output_tokens": self.output_tokens,
            "latency_s": _rounded(self.latency_s),
            "output_tokens_per_s": _rounded(self.output_rate),
            "page_tokens_per_s": _rounded(self.page_rate),
            "errors": self.errors,
        }

    def _median(self, figure: Callable[[Round], float]) -> float | None:
        values = [figure(run) for run in self.rounds if not run.errors]
        return float(median(values)) if values else None


@dataclass(frozen=True)
class Sweep:
    url: str
    model: str
    length: int
    rounds: int
    refused: tuple[str, ...]  # fields that the server does not support
    cells: tuple[Cell, ...]  # by batch size, then by share

    def as_dict(self) -> dict[str, object]:
        return {**vars(self), "refused": list(self.refused), "cells": [cell.as_dict() for cell in self.cells]}

    def text(self) -> str:
        """Returns the table, and below it the caveats of its figures."""
        rows = [
            (
                cell.batch,
                f"{cell.prompt} ({cell.share} %)",
                cell.output,
                None if cell.latency_s is None else f"{cell.latency_s:.2f} s",
                *(None if rate is None else f"{rate:.1f}" for rate in (cell.output_rate, cell.page_rate)),
            )
            for cell in self.cells
        ]
        title = f"{self.model} at {self.url}, {self.length} tokens, median of {self.rounds}"
        notes = [f"the server refuses {name}: answers may end early" for name in self.refused]
        notes += [note for cell in self.cells for note in _notes(cell)]
        return "\n\n".join([title, columns(HEADER, rows), *(["\n".join(notes)] if notes else [])])


async def sweep(
    server: MeasuredServer, length: int, batches: Sequence[int], rounds: int, say: Callable[[str], None]
) -> Sweep:
    """Measures every cell, one after the other. Raises Failed `bench-refused` if the server does not count tokens."""
    prompts = await server.prompts([max(1, length * share // 100) for share in SHARES])
    cells = []
    for batch in batches:
        for share, (words, tokens) in zip(SHARES, prompts, strict=True):
            output = max(1, length - tokens)
            measured = tuple([await _round(server, words, output, batch) for _ in range(rounds)])
            cell = Cell(share, tokens, output, batch, measured)
            result = "failed" if cell.latency_s is None else f"{cell.latency_s:.2f} s"
            say(f"batch of {batch}, prompt of {tokens}, {output} output tokens: {result}")
            cells.append(cell)
    return Sweep(server.connection.url, server.model, length, rounds, server.refused, tuple(cells))


async def _round(server: MeasuredServer, words: int, output: int, batch: int) -> Round:
    began = time.monotonic()
    answers = await asyncio.gather(*(_answer(server, words, output) for _ in range(batch)))
    latency_s = time.monotonic() - began
    complete = [answer for answer in answers if isinstance(answer, TokenUsage)]
    errors = tuple(answer for answer in answers if isinstance(answer, str))
    prompt_tokens = sum(usage.prompt_tokens for usage in complete)
    return Round(latency_s, prompt_tokens, sum(usage.completion_tokens for usage in complete), errors)


async def _answer(server: MeasuredServer, words: int, output: int) -> TokenUsage | str:
    try:
        return await server.complete(words, output)
    except RequestFailed as failed:
        return failed.error


def _notes(cell: Cell) -> list[str]:
    name, generated = f"batch of {cell.batch}, {cell.share} %", cell.output_tokens
    failed = len(cell.rounds) - cell.good_rounds
    notes = [f"{name}: {failed} of {len(cell.rounds)} rounds failed"] if failed else []
    notes += [f"  {error} ({count} times)" for error, count in cell.errors.items()]
    if generated is not None and generated != cell.output:
        notes.append(f"{name}: {generated:g} of the {cell.output} requested tokens were generated")
    return notes


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
