"""The table of the optimum-neuron Llama page: from a prompt of a quarter, a half and three quarters of a length to the
whole of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from orchestrator.bench.measurement import Measured, kinds
from orchestrator.bench.target import Target
from orchestrator.bench.timed_http import clock

SHARES = (25, 50, 75)  # per cent of the length, as https://huggingface.co/blog/inferentia-llama2


@dataclass(frozen=True)
class Round:
    """A batch of equal requests that were sent together."""

    measured: tuple[Measured, ...]
    latency_s: float  # from the first request sent to the last answer's end

    @property
    def output_tokens(self) -> int:
        return sum(one.output_tokens or 0 for one in self.measured if one.ok)

    @property
    def prompt_tokens(self) -> int:
        """As the server counted; as sent where it did not."""
        counted = (
            one.prompt_wanted if one.prompt_tokens is None else one.prompt_tokens for one in self.measured if one.ok
        )
        return sum(counted)

    @property
    def ok(self) -> bool:
        return all(one.ok for one in self.measured)


@dataclass(frozen=True)
class Cell:
    """One share of one batch size. Its figures are medians over the rounds that went well, None without one."""

    share: int  # per cent
    prompt: int  # tokens sent to each request
    output: int  # tokens asked for
    batch: int
    rounds: tuple[Round, ...]

    @property
    def good(self) -> tuple[Round, ...]:
        return tuple(one for one in self.rounds if one.ok)

    @property
    def latency_s(self) -> float | None:
        """To reach the length: of the whole batch."""
        return _median([one.latency_s for one in self.good])

    @property
    def ttft_s(self) -> float | None:
        """Of the requests of a batch, the median; at a batch of one this is the time to encode the prompt."""
        return _median([found for one in self.good for each in one.measured if (found := each.ttft_s) is not None])

    @property
    def output_tokens(self) -> float | None:
        """That really came, each request."""
        return _median([one.output_tokens / self.batch for one in self.good])

    @property
    def prompt_tokens(self) -> float | None:
        """That the server counted, each request."""
        return _median([one.prompt_tokens / self.batch for one in self.good])

    @property
    def throughput(self) -> float | None:
        """Output tokens/s of the batch, its whole time counted."""
        return _median([one.output_tokens / one.latency_s for one in self.good])

    @property
    def page_throughput(self) -> float | None:
        """The page's own definition, which counts the prompt too: batch x length / time."""
        return _median([(one.prompt_tokens + one.output_tokens) / one.latency_s for one in self.good])

    @property
    def errors(self) -> dict[str, int]:
        return kinds([each for one in self.rounds for each in one.measured])

    def as_dict(self) -> dict[str, object]:
        return {
            "percent": self.share,
            "prompt_tokens": self.prompt,
            "output_tokens": self.output,
            "batch": self.batch,
            "rounds": len(self.rounds),
            "good_rounds": len(self.good),
            "counted_prompt_tokens": self.prompt_tokens,
            "counted_output_tokens": self.output_tokens,
            "ttft_s": _rounded(self.ttft_s),
            "latency_s": _rounded(self.latency_s),
            "output_tokens_per_s": _rounded(self.throughput),
            "page_tokens_per_s": _rounded(self.page_throughput),
            "errors": self.errors,
        }


@dataclass(frozen=True)
class Sweep:
    url: str
    model: str
    length: int
    rounds: int
    refused: tuple[str, ...]
    cells: tuple[Cell, ...]  # by batch size, then by share

    def of(self, batch: int) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.batch == batch)

    @property
    def batches(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(cell.batch for cell in self.cells))

    def as_dict(self) -> dict[str, object]:
        return {
            "url": self.url,
            "model": self.model,
            "length": self.length,
            "rounds": self.rounds,
            "refused": list(self.refused),
            "cells": [cell.as_dict() for cell in self.cells],
        }


async def sweep(target: Target, length: int, batches: Sequence[int], rounds: int, say: Callable[[str], None]) -> Sweep:
    """Measure every cell, one after the other; each request has its deadline, so this ends."""
    cells = []
    number = 0
    for batch in batches:
        for share in SHARES:
            wanted = max(1, length * share // 100)
            found = []
            for _ in range(rounds):
                prompts = [await target.exact_prompt(number + i, wanted) for i in range(batch)]
                number += batch
                output = max(1, length - max(tokens for _, tokens in prompts))
                bodies = [target.body(prompt, output) for prompt, _ in prompts]
                began = clock()
                asking = [target.ask(body, due=began, prompt=prompts[0][1], output=output) for body in bodies]
                answers = await asyncio.gather(*asking)
                ends = [one.ended for one in answers if one.ended is not None]
                found.append(Round(tuple(answers), max(ends, default=clock()) - began))
            cell = Cell(share, prompts[0][1], output, batch, tuple(found))
            took = "failed" if cell.latency_s is None else f"{cell.latency_s:.2f} s"
            say(f"batch of {batch}, prompt of {cell.prompt}, {cell.output} tokens more: {took}")
            cells.append(cell)
    return Sweep(target.client.origin.url, target.model, length, rounds, target.dialect.refused, tuple(cells))


def _median(values: Sequence[float]) -> float | None:
    return float(median(values)) if values else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
