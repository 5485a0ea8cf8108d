"""Measures the table of the optimum-neuron Llama page: prompts of 25, 50 and 75 % of a length, generated to the end."""

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
    """A batch of equal requests, sent together."""

    measured: tuple[Measured, ...]
    latency_s: float  # from the first request sent to the last answer's end

    @property
    def output_tokens(self) -> int:
        return sum(request.output_tokens or 0 for request in self.measured if request.ok)

    @property
    def prompt_tokens(self) -> int:
        return sum(request.prompt for request in self.measured if request.ok)

    @property
    def ok(self) -> bool:
        return all(request.ok for request in self.measured)


@dataclass(frozen=True)
class Cell:
    """One share of one batch size. Its figures are medians over the successful rounds, None without one."""

    share: int  # per cent
    prompt: int  # tokens per request
    output: int  # requested tokens
    batch: int
    rounds: tuple[Round, ...]

    @property
    def good(self) -> tuple[Round, ...]:
        return tuple(run for run in self.rounds if run.ok)

    @property
    def latency_s(self) -> float | None:
        """The time of the whole batch to reach the length."""
        return _median([run.latency_s for run in self.good])

    @property
    def ttft_s(self) -> float | None:
        """The median over the requests of a batch; for a batch of one this is the prefill time."""
        times = [request.ttft_s for run in self.good for request in run.measured]
        return _median([ttft_s for ttft_s in times if ttft_s is not None])

    @property
    def output_tokens(self) -> float | None:
        """The generated tokens per request."""
        return _median([run.output_tokens / self.batch for run in self.good])

    @property
    def prompt_tokens(self) -> float | None:
        """The prompt tokens per request, as the server counted them."""
        return _median([run.prompt_tokens / self.batch for run in self.good])

    @property
    def throughput(self) -> float | None:
        """Output tokens/s of the batch over its whole time."""
        return _median([run.output_tokens / run.latency_s for run in self.good])

    @property
    def page_throughput(self) -> float | None:
        """The definition of the page, which includes the prompt: batch x length / time."""
        return _median([(run.prompt_tokens + run.output_tokens) / run.latency_s for run in self.good])

    @property
    def errors(self) -> dict[str, int]:
        return kinds(self.measured)

    @property
    def measured(self) -> list[Measured]:
        return [request for run in self.rounds for request in run.measured]

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
        return {**vars(self), "refused": list(self.refused), "cells": [cell.as_dict() for cell in self.cells]}


async def sweep(target: Target, length: int, batches: Sequence[int], rounds: int, say: Callable[[str], None]) -> Sweep:
    """Measures every cell, one after the other; each request has a deadline."""
    cells = []
    number = 0
    for batch in batches:
        for share in SHARES:
            tokens_sent = max(1, length * share // 100)
            measured_rounds = []
            for _ in range(rounds):
                prompts = [await target.exact_prompt(number + i, tokens_sent) for i in range(batch)]
                number += batch
                output = max(1, length - max(tokens for _, tokens in prompts))
                bodies = [target.body(prompt, output) for prompt, _ in prompts]
                began = clock()
                asking = [target.ask(body, due=began, prompt=prompts[0][1], output=output) for body in bodies]
                answers = await asyncio.gather(*asking)
                ends = [answer.ended for answer in answers if answer.ended is not None]
                measured_rounds.append(Round(tuple(answers), max(ends, default=clock()) - began))
            cell = Cell(share, prompts[0][1], output, batch, tuple(measured_rounds))
            took = "failed" if cell.latency_s is None else f"{cell.latency_s:.2f} s"
            say(f"batch of {batch}, prompt of {cell.prompt}, {cell.output} output tokens: {took}")
            cells.append(cell)
    return Sweep(target.client.origin.url, target.model, length, rounds, target.dialect.refused, tuple(cells))


def _median(values: Sequence[float]) -> float | None:
    return float(median(values)) if values else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
