"""One HTML page about runs of the simulator, with SVG plots."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from orchestrator.simulate.report import MODEL_COLUMNS, model_rows, timeline
from orchestrator.simulate.run import Outcome

BINS = 240  # of the plot
MOST_MODELS = 12  # models with a distribution plot
MOST_DECISIONS = 200
WIDTH, HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 52, WIDTH - 14, 12, HEIGHT - 38  # of the axes
MAX_POINTS = 400  # of a curve: more cannot be distinguished
STYLE = """
:root { color-scheme: light dark; --back: #fdfdfc; --text: #1c1e21; --dim: #686d74; --line: #d9dbde;
  --one: #2563a8; --two: #b4530a; --card: #f4f4f2; }
@media (prefers-color-scheme: dark) { :root { --back: #17191c; --text: #e6e7e9; --dim: #9aa0a8; --line: #3a3e44;
  --one: #6ea8e8; --two: #e59a52; --card: #202327; } }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 3rem; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.35rem; margin: 0 0 .2rem; } h2 { font-size: 1rem; margin: 1.8rem 0 .6rem; }
p { margin: .2rem 0; } .dim { color: var(--dim); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .7rem; margin-top: 1.1rem; }
.card { background: var(--card); border-radius: .5rem; padding: .6rem .8rem; }
.card b { display: block; font-size: 1.3rem; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .9rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--dim); font-weight: 500; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1.2rem; }
figure { margin: 0; } figcaption { font-weight: 600; margin-bottom: .2rem; } svg { width: 100%; height: auto; }
svg text { fill: var(--dim); font-size: 11px; } .axis { stroke: var(--line); fill: none; }
.curve { stroke: var(--one); stroke-width: 1.8; fill: none; }
.key { display: inline-block; width: .8em; height: .8em; border-radius: .15em; margin: 0 .35em 0 .9em; }
.bound { stroke: var(--two); stroke-width: 1.4; stroke-dasharray: 5 4; } svg text.slo { fill: var(--two); }
"""
SMALLEST = 1e-300  # below this, fractions can underflow to 0
Scale = Callable[[float], float]  # from a value to its coordinate
HUES = 137.5  # degrees between consecutive series, so that the colours differ for any number of series


def page(runs: Sequence[dict[str, Any]], outcomes: Sequence[Outcome], load: str) -> str:
    """Returns the HTML; ``runs`` is the data of ``outcomes`` (`report.run_data`)."""
    parts = [f'<h1>{escape(" against ".join(run["spec"] for run in runs))}</h1><p class="dim">{escape(load)}</p>']
    for run, outcome in zip(runs, outcomes, strict=True):
        if len(runs) > 1:
            parts.append(f"<h2>{escape(run['spec'])}</h2>")
        parts.append(_section(run, outcome))
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>simulate {escape(runs[0]['spec'])}</title><style>{STYLE}</style></head><body>\n"
        f"{body}\n</body></html>\n"
    )


def _section(run: dict[str, Any], outcome: Outcome) -> str:
    numbers = (
        (f"{run['attainment']:.1%}", f"of {run['requests']} requests within objectives"),
        (run["refused"], "refused"),
        (run["starts"], "starts of replicas"),
        (f"{run['core_hours']:.1f}", f"core-hours on {run['cores']} cores"),
    )
    cards = "".join(
        f'<div class="card"><b>{value}</b><span class="dim">{label}</span></div>' for value, label in numbers
    )
    names = [model.name for model in outcome.scenario.models]
    cores = timeline(outcome.changes, names, outcome.seconds, BINS)
    charts = {"Cores by model over time": areas(cores, outcome.seconds / BINS, "cores", run["cores"])}
    for model in run["models"][:MOST_MODELS]:
        values = [value * 1000 for value in outcome.measured[model["model"]].ttfts]
        title = f"{model['model']}: time to first token"
        charts[title] = distribution(values, model["objectives"].get("ttft_ms"))
    plots = "".join(f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>" for title, svg in charts.items())
    return (
        f'<div class="cards">{cards}</div>\n<h2>By model</h2>{_table(MODEL_COLUMNS, model_rows(run))}\n'
        f'<h2>Plots</h2><div class="plots">{plots}</div>\n<h2>Decisions</h2>{_decisions(run)}'
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table; cells are escaped."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _decisions(run: dict[str, Any]) -> str:
    listed = run["decisions"][:MOST_DECISIONS]
    if not listed:
        return '<p class="dim">none</p>'
    lines = "".join(
        f'<p><span class="dim">{item["at"]:.0f} s</span> {escape(item["model"])}: {escape(item["reason"])}</p>'
        for item in listed
    )
    more = len(run["decisions"]) - len(listed)
    return lines + (f'<p class="dim">and {more} more</p>' if more else "")


# Plots


def areas(series: Mapping[str, Sequence[float]], width_s: float, label: str, most: float) -> str:
    """Returns a stacked area plot, each value for ``width_s`` seconds, with a line at ``most`` and a legend below."""
    count = max((len(values) for values in series.values()), default=0)
    end = width_s * count or 1.0
    top = max(most, *(sum(values) for values in zip(*series.values(), strict=True)), 1e-9) * 1.05
    x, y = _scales(end, top)
    drawn, keys, sums = "", "", [0.0] * count
    for number, (name, values) in enumerate(series.items()):
        before, sums = sums, [old + value for old, value in zip(sums, values, strict=True)]
        edges = [(i * width_s, value) for at, value in enumerate(sums) for i in (at, at + 1)]
        edges += [(i * width_s, value) for at, value in reversed(list(enumerate(before))) for i in (at + 1, at)]
        color = f"hsl({number * HUES % 360:.0f} 55% 55%)"
        drawn += f'<polygon points="{_path(edges, x, y)}" style="fill:{color}"/>'
        keys += f'<span class="key" style="background:{color}"></span>{escape(name)}'
    drawn += _line("bound", (LEFT, y(most)), (RIGHT, y(most)))
    return _frame(drawn, end, top, "s", label) + f'<p class="dim">{keys}</p>'


def distribution(values: Sequence[float], bound: float | None) -> str:
    """Plots the cumulative distribution of milliseconds up to the 99.5th percentile; ``bound`` is an SLO."""
    if not values:
        return _frame("", 1.0, 1.0, "ms", "")
    ordered = sorted(values)
    plotted = ordered[: max(1, math.ceil(len(ordered) * 0.995))]
    top = max(plotted[-1], bound or 0.0) * 1.03 or 1.0
    step = max(1, len(plotted) // MAX_POINTS)
    points = [(0.0, 0.0), (plotted[0], 0.0)]
    points += [(plotted[i], (i + 1) / len(ordered)) for i in [*range(0, len(plotted), step), len(plotted) - 1]]
    x, y = _scales(top, 1.0)
    drawn = f'<polyline class="curve" points="{_path(points, x, y)}"/>'
    if bound is not None:
        drawn += _line("bound", (x(bound), TOP), (x(bound), BOTTOM)) + _text(
            "SLO", x(bound) - 4, BOTTOM - 6, "end", "slo"
        )
    return _frame(drawn, top, 1.0, "ms", "share")


def ticks(top: float) -> list[float]:
    """Returns four to seven round numbers from 0 to ``top``."""
    if not (top > SMALLEST and math.isfinite(top)):
        return [0.0]
    step = 10.0 ** math.floor(math.log10(top))
    for divisor in (1, 2, 4, 5, 10):
        if top / (step / divisor) >= 4:
            step /= divisor
            break
    return [i * step for i in range(int(top / step + 1e-9) + 1)]


def _frame(drawn: str, end: float, top: float, unit: str, label: str) -> str:
    """Returns the plot ``drawn`` with axes from 0 to ``end`` and ``top``, and ``unit`` below."""
    x, y = _scales(end, top)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for value in ticks(top):
        parts.append(_line("axis", (LEFT, y(value)), (RIGHT, y(value))))
        parts.append(_text(f"{value:g}", LEFT - 6, y(value) + 4, "end"))
    parts += [_text(f"{value:g}", x(value), BOTTOM + 15, "middle") for value in ticks(end)]
    parts.append(_text(unit, RIGHT, HEIGHT - 6, "end"))
    if label:
        parts.append(_text(f"{label} (upwards)", LEFT, HEIGHT - 6, "start"))
    if not drawn:
        parts.append(_text("no data", WIDTH / 2, HEIGHT / 2, "middle"))
    return "".join([*parts, drawn, "</svg>"])


def _scales(end: float, top: float) -> tuple[Scale, Scale]:
    """Returns the scales of a plot with values from 0 to ``end`` (x) and from 0 to ``top`` (y)."""
    return (lambda x: LEFT + x / end * (RIGHT - LEFT)), (lambda y: BOTTOM - y / top * (BOTTOM - TOP))


def _path(points: Iterable[tuple[float, float]], x: Scale, y: Scale) -> str:
    return " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)


def _line(kind: str, begin: tuple[float, float], end: tuple[float, float]) -> str:
    return f'<line class="{kind}" x1="{begin[0]:.1f}" y1="{begin[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"/>'


def _text(text: str, x: float, y: float, anchor: str, kind: str = "label") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
