"""Renders runs of the simulator as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from orchestrator.simulate.plots import areas, cards, distribution, document, plots, table
from orchestrator.simulate.run import Outcome
from orchestrator.simulate.timeline import timeline

BINS = 240  # of the plot
MOST_MODELS = 12  # models with a distribution plot
MOST_DECISIONS = 200


def page(runs: Sequence[dict[str, Any]], outcomes: Sequence[Outcome], load: str) -> str:
    """Returns the HTML; ``runs`` is the data of ``outcomes`` (`report.run_data`)."""
    parts = [f'<h1>{escape(" against ".join(run["spec"] for run in runs))}</h1><p class="dim">{escape(load)}</p>']
    for run, outcome in zip(runs, outcomes, strict=True):
        if len(runs) > 1:
            parts.append(f"<h2>{escape(run['spec'])}</h2>")
        parts.append(_section(run, outcome))
    return document(f"simulate {runs[0]['spec']}", "\n".join(parts))


def _section(run: dict[str, Any], outcome: Outcome) -> str:
    numbers = [
        (f"{run['attainment']:.1%}", f"of {run['requests']} requests within objectives"),
        (f"{run['refused']}", "refused"),
        (f"{run['starts']}", "starts of replicas"),
        (f"{run['core_hours']:.1f}", f"core-hours on {run['cores']} cores"),
    ]
    names = [model.name for model in outcome.scenario.models]
    usage = timeline(outcome.changes, names, outcome.seconds, BINS)
    charts = [("Cores by model over time", areas(usage.cores, usage.width_s, "cores", run["cores"]))]
    for model in run["models"][:MOST_MODELS]:
        values = [value * 1000 for value in outcome.measured[model["model"]].ttfts]
        charts.append(
            (f"{model['model']}: time to first token", distribution(values, model["objectives"].get("ttft_ms")))
        )
    return (
        f"{cards(numbers)}\n<h2>By model</h2>{_models(run)}\n"
        f"<h2>Plots</h2>{plots(charts)}\n<h2>Decisions</h2>{_decisions(run)}"
    )


def _models(run: dict[str, Any]) -> str:
    header = ("", "requests", "within", "TTFT p50", "p99", "latency p50", "p99", "refused", "starts", "core-hours")
    rows = []
    for model in run["models"]:
        times = [
            "-" if model[key] is None else f"{model[key][percent]:.0f} ms"
            for key in ("ttft_ms", "latency_ms")
            for percent in ("p50", "p99")
        ]
        rows.append(
            (
                model["model"],
                str(model["requests"]),
                f"{model['attainment']:.1%}",
                *times,
                str(model["refused"]),
                str(model["starts"]),
                f"{model['core_hours']:.1f}",
            )
        )
    return table(header, rows)


def _decisions(run: dict[str, Any]) -> str:
    shown = run["decisions"][:MOST_DECISIONS]
    if not shown:
        return '<p class="dim">none</p>'
    lines = "".join(
        f'<p><span class="dim">{item["at"]:.0f} s</span> {escape(item["model"])}: {escape(item["reason"])}</p>'
        for item in shown
    )
    more = len(run["decisions"]) - len(shown)
    return lines + (f'<p class="dim">and {more} more</p>' if more else "")
