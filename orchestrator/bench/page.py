"""A run of the serving benchmark as one page: figures and plots, nothing loaded from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from orchestrator.bench.measured import Measured
from orchestrator.bench.report import FIGURES, figures, remarks
from orchestrator.bench.serving import Serving
from orchestrator.bench.statistics import PERCENTILES

WIDTH, HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 38
MAX_POINTS = 400  # of a curve: more cannot be told apart
MAX_BARS = 60
STYLE = """
:root { color-scheme: light dark; --back: #fdfdfc; --text: #1c1e21; --dim: #686d74; --line: #d9dbde;
  --one: #2563a8; --two: #b4530a; --bad: #b3261e; --card: #f4f4f2; }
@media (prefers-color-scheme: dark) { :root { --back: #17191c; --text: #e6e7e9; --dim: #9aa0a8; --line: #3a3e44;
  --one: #6ea8e8; --two: #e59a52; --bad: #f0857d; --card: #202327; } }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 3rem; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.35rem; margin: 0 0 .2rem; } h2 { font-size: 1rem; margin: 1.8rem 0 .6rem; }
p { margin: .2rem 0; } .dim { color: var(--dim); } .bad { color: var(--bad); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .7rem; margin-top: 1.1rem; }
.card { background: var(--card); border-radius: .5rem; padding: .6rem .8rem; }
.card b { display: block; font-size: 1.3rem; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .9rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--dim); font-weight: 500; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1.2rem; }
figure { margin: 0; } figcaption { font-weight: 600; margin-bottom: .2rem; } svg { width: 100%; height: auto; }
svg text { fill: var(--dim); font-size: 11px; } .axis { stroke: var(--line); fill: none; }
.curve { stroke: var(--one); stroke-width: 1.8; fill: none; } .bar { fill: var(--one); }
.dot { fill: var(--one); fill-opacity: .55; } .cross { stroke: var(--bad); stroke-width: 1.6; }
.bound { stroke: var(--two); stroke-width: 1.4; stroke-dasharray: 5 4; } svg text.bound-text { fill: var(--two); }
"""


def page(run: Serving, data: dict[str, Any]) -> str:
    """The whole HTML; ``data`` is what ``serving_data`` gave of ``run``."""
    name = escape(f"{data['model']} at {data['url']}")
    plots = "".join(f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>" for title, svg in _plots(run))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}</title><style>{STYLE}</style></head><body>\n"
        f'<h1>{escape(data["model"])}</h1><p class="dim">{_subtitle(data)}</p>\n'
        f'<div class="cards">{_cards(data)}</div>\n<h2>Latencies in milliseconds</h2>{_table(data)}\n'
        f'<h2>How it went</h2><div class="plots">{plots}</div>\n<h2>Remarks</h2>{_remarks(data)}\n</body></html>\n'
    )


def _subtitle(data: dict[str, Any]) -> str:
    load = data["load"]
    loop = f"{load['concurrency']} at once" if load["rate"] is None else f"Poisson arrivals, {load['rate']:g}/s"
    return escape(f"{data['url']} · {loop} · lengths {data['lengths']['name']} · seed {load['seed']}")


def _cards(data: dict[str, Any]) -> str:
    failed = data["sent"] - data["ok"]
    cards = [
        (f"{data['ok']}", f"answered in {data['duration_s']:.1f} s"),
        (f"{failed}", "failed"),
        (f"{data['output_tokens_per_s']:.1f}", "output tokens/s"),
        (f"{data['requests_per_s']:.2f}", "requests/s"),
    ]
    if data["goodput"] is not None:
        cards.append((f"{data['goodput']['share']:.1%}", f"good, {data['goodput']['requests_per_s']:.2f} requests/s"))
    return "".join(f'<div class="card"><b>{value}</b><span class="dim">{label}</span></div>' for value, label in cards)


def _table(data: dict[str, Any]) -> str:
    keys = ("mean", *(f"p{percent}" for percent in PERCENTILES))
    head = "".join(f"<th>{key}</th>" for key in ("", *keys))
    rows = []
    for name, label in FIGURES.items():
        found = data[name]
        cells = "".join(f"<td>{'-' if found is None else format(found[key], '.1f')}</td>" for key in keys)
        rows.append(f"<tr><td>{label}</td>{cells}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _remarks(data: dict[str, Any]) -> str:
    return "".join(f"<p>{escape(line.strip())}</p>" for line in remarks(data, data["client"]))


def _plots(run: Serving) -> list[tuple[str, str]]:
    found = figures(run.measured)
    slo = run.slo
    bounds = {"ttft_ms": slo.ttft, "tpot_ms": slo.itl, "e2e_ms": slo.e2e} if slo is not None else {}
    plots = [
        ("Time to first token over the time of sending", scatter(run.measured, run.duration_s, bounds.get("ttft_ms"))),
        ("Output tokens/s over time", bars(*rates(run.measured, run.duration_s))),
    ]
    names = {"ttft_ms": "Time to first token", "tpot_ms": "Time per output token", "e2e_ms": "Whole request"}
    for key, title in names.items():
        plots.append((f"{title}: share of requests", distribution(found[key], bounds.get(key))))
    plots.append(("Between chunks (ITL): share of gaps", distribution(found["itl_ms"], None)))
    return plots


def distribution(values: Sequence[float], bound: float | None) -> str:
    """The cumulative distribution of milliseconds, up to its 99.5th percentile; ``bound`` is an SLO's."""
    if not values:
        return _frame("", (0.0, 1.0), (0.0, 1.0), "ms", "", empty=True)
    ordered = sorted(values)
    shown = ordered[: max(1, math.ceil(len(ordered) * 0.995))]
    top = max(shown[-1], bound or 0.0) * 1.03 or 1.0
    step = max(1, len(shown) // MAX_POINTS)
    points = [(0.0, 0.0), (shown[0], 0.0)]
    points += [(shown[i], (i + 1) / len(ordered)) for i in [*range(0, len(shown), step), len(shown) - 1]]
    x, y = _scale((0.0, top), LEFT, WIDTH - RIGHT), _scale((0.0, 1.0), HEIGHT - BOTTOM, TOP)
    path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
    drawn = f'<polyline class="curve" points="{path}"/>' + _vertical(bound, x)
    return _frame(drawn, (0.0, top), (0.0, 1.0), "ms", "share")


def scatter(measured: Sequence[Measured], duration_s: float, bound: float | None) -> str:
    """A dot for each answer, a cross at the foot for each that failed."""
    shown = [(one.sent, one.ttft_s * 1000) for one in measured if one.ok and one.ttft_s is not None]
    if not measured:
        return _frame("", (0.0, 1.0), (0.0, 1.0), "s", "", empty=True)
    top = max([value for _, value in shown] + [bound or 0.0]) * 1.05 or 1.0
    end = max(duration_s, 1e-3)
    x, y = _scale((0.0, end), LEFT, WIDTH - RIGHT), _scale((0.0, top), HEIGHT - BOTTOM, TOP)
    step = max(1, len(shown) // (4 * MAX_POINTS))
    dots = "".join(f'<circle class="dot" cx="{x(a):.1f}" cy="{y(b):.1f}" r="2.2"/>' for a, b in shown[::step])
    foot = y(0.0) - 6
    crosses = "".join(
        f'<path class="cross" d="M{x(one.sent) - 3:.1f} {foot - 3:.1f}l6 6m0 -6l-6 6"/>'
        for one in measured
        if not one.ok
    )
    line = ""
    if bound is not None:
        at = f"{y(bound):.1f}"
        line = f'<line class="bound" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>'
    return _frame(dots + crosses + line, (0.0, end), (0.0, top), "s", "ms")


def rates(measured: Sequence[Measured], duration_s: float) -> tuple[list[float], float]:
    """Output tokens/s in bars of equal width, and that width in seconds. The tokens of a request are spread evenly over
    its chunks."""
    width = max(duration_s / MAX_BARS, 0.25)
    counts = [0.0] * max(1, math.ceil(duration_s / width))
    for one in measured:
        if one.chunks and one.output_tokens is not None:
            for at in one.chunks:
                counts[min(max(int(at / width), 0), len(counts) - 1)] += one.output_tokens / len(one.chunks)
    return [count / width for count in counts], width


def bars(values: Sequence[float], width_s: float) -> str:
    """One bar for each value; the first begins at 0 s."""
    top = max(values, default=0.0) * 1.05 or 1.0
    end = width_s * len(values) or 1.0
    x, y = _scale((0.0, end), LEFT, WIDTH - RIGHT), _scale((0.0, top), HEIGHT - BOTTOM, TOP)
    foot = y(0.0)
    drawn = "".join(
        f'<rect class="bar" x="{x(i * width_s):.1f}" y="{y(value):.1f}" '
        f'width="{max(x((i + 1) * width_s) - x(i * width_s) - 1, 0.5):.1f}" height="{foot - y(value):.1f}"/>'
        for i, value in enumerate(values)
    )
    return _frame(drawn, (0.0, end), (0.0, top), "s", "tokens/s")


class _scale:
    """From a value to a place on the picture."""

    def __init__(self, values: tuple[float, float], low: float, high: float) -> None:
        self._first, self._span = values[0], (values[1] - values[0]) or 1.0
        self._low, self._high = low, high

    def __call__(self, value: float) -> float:
        return self._low + (value - self._first) / self._span * (self._high - self._low)


def ticks(top: float) -> list[float]:
    """Four to seven round numbers from 0 up to ``top``."""
    if not (top > 0 and math.isfinite(top)):
        return [0.0]
    step = 10.0 ** math.floor(math.log10(top))
    for divisor in (1, 2, 4, 5, 10):
        if top / (step / divisor) >= 4:
            step /= divisor
            break
    return [i * step for i in range(int(top / step + 1e-9) + 1)]


def _frame(
    drawn: str, xs: tuple[float, float], ys: tuple[float, float], unit: str, label: str, *, empty: bool = False
) -> str:
    x, y = _scale(xs, LEFT, WIDTH - RIGHT), _scale(ys, HEIGHT - BOTTOM, TOP)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for value in ticks(ys[1]):
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    foot = HEIGHT - BOTTOM + 15
    parts += [f'<text x="{x(value):.1f}" y="{foot}" text-anchor="middle">{value:g}</text>' for value in ticks(xs[1])]
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{escape(unit)}</text>')
    if label:
        parts.append(f'<text x="{LEFT}" y="{HEIGHT - 6}">{escape(label)} (upwards)</text>')
    if empty:
        parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">nothing was measured</text>')
    return "".join([*parts, drawn, "</svg>"])


def _vertical(bound: float | None, x: _scale) -> str:
    if bound is None:
        return ""
    at = f"{x(bound):.1f}"
    line = f'<line class="bound" x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
    return (
        f'{line}<text class="bound-text" x="{x(bound) - 4:.1f}" y="{HEIGHT - BOTTOM - 6}" text-anchor="end">SLO</text>'
    )
