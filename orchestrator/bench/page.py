"""Renders a serving benchmark as one self-contained HTML page with figures and plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from orchestrator.bench.measurement import Measured
from orchestrator.bench.plots import MAX_BARS, bars, cards, distribution, document, plots, scatter, table
from orchestrator.bench.report import FIGURES, figures, load_text, remarks
from orchestrator.bench.serving import Serving
from orchestrator.bench.statistics import PERCENTILES


def page(run: Serving, data: dict[str, Any]) -> str:
    """Returns the HTML; ``data`` is the ``serving_data`` of ``run``."""
    return document(
        f"{data['model']} at {data['url']}",
        f'<h1>{escape(data["model"])}</h1><p class="dim">{_subtitle(data)}</p>\n'
        f"{_cards(data)}\n<h2>Latencies in milliseconds</h2>{_table(data)}\n"
        f"<h2>Plots</h2>{plots(_plots(run))}\n<h2>Remarks</h2>{_remarks(data)}",
    )


def _subtitle(data: dict[str, Any]) -> str:
    load = data["load"]
    return escape(f"{data['url']} · {load_text(load)} · lengths {data['lengths']['name']} · seed {load['seed']}")


def _cards(data: dict[str, Any]) -> str:
    failed = data["sent"] - data["ok"]
    numbers = [
        (f"{data['ok']}", f"answered in {data['duration_s']:.1f} s"),
        (f"{failed}", "failed"),
        (f"{data['output_tokens_per_s']:.1f}", "output tokens/s"),
        (f"{data['requests_per_s']:.2f}", "requests/s"),
    ]
    if data["goodput"] is not None:
        numbers.append((f"{data['goodput']['share']:.1%}", f"good, {data['goodput']['requests_per_s']:.2f} requests/s"))
    return cards(numbers)


def _table(data: dict[str, Any]) -> str:
    keys = ("mean", *(f"p{percent}" for percent in PERCENTILES))
    rows = []
    for name, label in FIGURES.items():
        summary = data[name]
        rows.append((label, *("-" if summary is None else format(summary[key], ".1f") for key in keys)))
    return table(("", *keys), rows)


def _remarks(data: dict[str, Any]) -> str:
    return "".join(f"<p>{escape(line.strip())}</p>" for line in remarks(data, data["client"]))


def _plots(run: Serving) -> list[tuple[str, str]]:
    values = figures(run.measured)
    slo = run.slo
    bounds = {"ttft_ms": slo.ttft, "tpot_ms": slo.itl, "e2e_ms": slo.e2e} if slo is not None else {}
    answers = [
        (answer.sent, answer.ttft_s * 1000) for answer in run.measured if answer.ok and answer.ttft_s is not None
    ]
    failures = [request.sent for request in run.measured if not request.ok]
    drawn = [
        (
            "Time to first token over the time of sending",
            scatter(answers, failures, run.duration_s, bounds.get("ttft_ms")),
        ),
        ("Output tokens/s over time", bars(*rates(run.measured, run.duration_s))),
    ]
    names = {"ttft_ms": "Time to first token", "tpot_ms": "Time per output token", "e2e_ms": "Whole request"}
    for key, title in names.items():
        drawn.append((f"{title}: share of requests", distribution(values[key], bounds.get(key))))
    drawn.append(("Between chunks (ITL): share of gaps", distribution(values["itl_ms"], None)))
    return drawn


def rates(measured: Sequence[Measured], duration_s: float) -> tuple[list[float], float]:
    """Returns output tokens/s in bars of equal width, and that width in seconds. The tokens of a request are spread
    evenly over its chunks."""
    width = max(duration_s / MAX_BARS, 0.25)
    counts = [0.0] * max(1, math.ceil(duration_s / width))
    for request in measured:
        if request.chunks and request.output_tokens is not None:
            for at in request.chunks:
                counts[min(max(int(at / width), 0), len(counts) - 1)] += request.output_tokens / len(request.chunks)
    return [count / width for count in counts], width
