"""SVG plots and the style of a self-contained HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 38
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
.bound { stroke: var(--two); stroke-width: 1.4; stroke-dasharray: 5 4; } svg text.bound-text { fill: var(--two); }
"""


HUES = 137.5  # degrees between consecutive series, so that the colours differ for any number of series


def document(title: str, body: str) -> str:
    """Returns a complete page; ``title`` is escaped, ``body`` is HTML."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def cards(numbers: Iterable[tuple[str, str]]) -> str:
    """Returns cards with values and their labels."""
    each = (f'<div class="card"><b>{value}</b><span class="dim">{label}</span></div>' for value, label in numbers)
    return f'<div class="cards">{"".join(each)}</div>'


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table; cells are escaped."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def plots(drawn: Iterable[tuple[str, str]]) -> str:
    """Returns titles and SVG plots in a grid."""
    each = (f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>" for title, svg in drawn)
    return f'<div class="plots">{"".join(each)}</div>'


def color(number: int) -> str:
    """Returns the colour of the series with that number."""
    return f"hsl({number * HUES % 360:.0f} 55% 55%)"


def areas(series: Mapping[str, Sequence[float]], width_s: float, label: str, most: float) -> str:
    """Returns a stacked area plot, each value for ``width_s`` seconds, with a line at ``most`` and a legend below."""
    count = max((len(values) for values in series.values()), default=0)
    end = width_s * count or 1.0
    sums = [0.0] * count
    top = max(most, *(sum(values) for values in zip(*series.values(), strict=True)), 1e-9) * 1.05
    x, y = scales(end, top)
    drawn = []
    for number, values in enumerate(series.values()):
        before, sums = sums, [old + value for old, value in zip(sums, values, strict=True)]
        edges = [(i * width_s, value) for at, value in enumerate(sums) for i in (at, at + 1)]
        edges += [(i * width_s, value) for at, value in reversed(list(enumerate(before))) for i in (at + 1, at)]
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in edges)
        drawn.append(f'<polygon points="{path}" style="fill:{color(number)}"/>')
    drawn.append(horizontal(most, y))
    keys = "".join(
        f'<span class="key" style="background:{color(number)}"></span>{escape(name)}'
        for number, name in enumerate(series)
    )
    return frame("".join(drawn), end, top, "s", label) + f'<p class="dim">{keys}</p>'


def distribution(values: Sequence[float], bound: float | None) -> str:
    """Plots the cumulative distribution of milliseconds up to the 99.5th percentile; ``bound`` is an SLO."""
    if not values:
        return frame("", 1.0, 1.0, "ms", "")
    ordered = sorted(values)
    shown = ordered[: max(1, math.ceil(len(ordered) * 0.995))]
    top = max(shown[-1], bound or 0.0) * 1.03 or 1.0
    step = max(1, len(shown) // MAX_POINTS)
    points = [(0.0, 0.0), (shown[0], 0.0)]
    points += [(shown[i], (i + 1) / len(ordered)) for i in [*range(0, len(shown), step), len(shown) - 1]]
    x, y = scales(top, 1.0)
    path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
    drawn = f'<polyline class="curve" points="{path}"/>' + vertical(bound, x)
    return frame(drawn, top, 1.0, "ms", "share")


Scale = Callable[[float], float]  # from a value to its coordinate


def scales(end: float, top: float) -> tuple[Scale, Scale]:
    """Returns the scales of a plot with values from 0 to ``end`` (x) and from 0 to ``top`` (y)."""
    width, height = WIDTH - RIGHT - LEFT, HEIGHT - BOTTOM - TOP
    return (lambda x: LEFT + x / end * width), (lambda y: HEIGHT - BOTTOM - y / top * height)


SMALLEST = 1e-300  # below this, fractions can underflow to 0


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


def frame(drawn: str, end: float, top: float, unit: str, label: str) -> str:
    """Returns the plot ``drawn`` with axes from 0 to ``end`` and ``top``, and ``unit`` below."""
    x, y = scales(end, top)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for value in ticks(top):
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    foot = HEIGHT - BOTTOM + 15
    parts += [f'<text x="{x(value):.1f}" y="{foot}" text-anchor="middle">{value:g}</text>' for value in ticks(end)]
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{escape(unit)}</text>')
    if label:
        parts.append(f'<text x="{LEFT}" y="{HEIGHT - 6}">{escape(label)} (upwards)</text>')
    if not drawn:
        parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">no data</text>')
    return "".join([*parts, drawn, "</svg>"])


def horizontal(bound: float, y: Scale) -> str:
    """Returns a horizontal line at a bound."""
    return f'<line class="bound" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(bound):.1f}" y2="{y(bound):.1f}"/>'


def vertical(bound: float | None, x: Scale) -> str:
    """Returns a vertical line at an SLO."""
    if bound is None:
        return ""
    at = f"{x(bound):.1f}"
    line = f'<line class="bound" x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
    return (
        f'{line}<text class="bound-text" x="{x(bound) - 4:.1f}" y="{HEIGHT - BOTTOM - 6}" text-anchor="end">SLO</text>'
    )
