"""Measures the table of the optimum-neuron Llama page: prompts of 25, 50 and 75 % of a length, completed to the end."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import msgspec

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


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One share of one batch size, as `bench -o json` has it. Figures are medians over the successful rounds, None
    without one."""

    percent: int
    prompt_tokens: int  # of each request
    output_tokens: int  # requested of each
    batch: int
    rounds: int
    good_rounds: int
    counted_prompt_tokens: float | None  # per request
    counted_output_tokens: float | None
    latency_s: float | None  # of the whole batch, to reach the length
    output_tokens_per_s: float | None  # of the batch over its whole time
    page_tokens_per_s: float | None  # the definition of the page, which includes the prompt: batch x length / time
    errors: dict[str, int]  # failed requests by kind and message, the most frequent first

    @classmethod
    def of(cls, percent: int, prompt: int, output: int, batch: int, rounds: Sequence[Round]) -> Cell:
        """Returns the cell of rounds of so many requested tokens."""
        good = [run for run in rounds if not run.errors]

        def typical(figure: Callable[[Round], float]) -> float | None:
            return round(float(median(map(figure, good))), 4) if good else None

        return cls(
            percent=percent,
            prompt_tokens=prompt,
            output_tokens=output,
            batch=batch,
            rounds=len(rounds),
            good_rounds=len(good),
            counted_prompt_tokens=typical(lambda run: run.prompt_tokens / batch),
            counted_output_tokens=typical(lambda run: run.output_tokens / batch),
            latency_s=typical(lambda run: run.latency_s),
            output_tokens_per_s=typical(lambda run: run.output_tokens / run.latency_s),
            page_tokens_per_s=typical(lambda run: (run.prompt_tokens + run.output_tokens) / run.latency_s),
            errors=dict(Counter(error for run in rounds for error in run.errors).most_common()),
        )


class Sweep(msgspec.Struct, frozen=True):
    """The cells of one model, as `bench -o json` has them."""

    url: str
    model: str
    length: int
    rounds: int
    refused: tuple[str, ...]  # fields that the server does not support
    cells: tuple[Cell, ...]  # by batch size, then by share

    def text(self) -> str:
        """Returns the table, and below it the caveats of its figures."""
        rows = [
            (
                cell.batch,
                f"{cell.prompt_tokens} ({cell.percent} %)",
                cell.output_tokens,
                None if cell.latency_s is None else f"{cell.latency_s:.2f} s",
                *(rate and f"{rate:.1f}" for rate in (cell.output_tokens_per_s, cell.page_tokens_per_s)),
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
            measured = [await _round(server, words, output, batch) for _ in range(rounds)]
            cell = Cell.of(share, tokens, output, batch, measured)
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
    name, generated = f"batch of {cell.batch}, {cell.percent} %", cell.counted_output_tokens
    failed = cell.rounds - cell.good_rounds
    notes = [f"{name}: {failed} of {cell.rounds} rounds failed"] if failed else []
    notes += [f"  {error} ({count} times)" for error, count in cell.errors.items()]
    if generated is not None and generated != cell.output_tokens:
        notes.append(f"{name}: {generated:g} of the {cell.output_tokens} requested tokens were generated")
    return notes
