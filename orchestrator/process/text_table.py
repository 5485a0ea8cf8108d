"""Formats tables as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

Paint = Callable[[str, str], str]
"""Returns a cell, given its column's header and its text, with ANSI codes or without."""


def three_digits(value: float) -> str:
    """Returns a number with three significant digits and no exponent, like "3620" or "0.5"."""
    return f"{float(f'{value:.3g}'):.15g}"


def cells(row: Iterable[object]) -> list[str]:
    """Returns the text of each cell of a row; None is a dash."""
    return ["-" if cell is None else str(cell) for cell in row]


def columns(header: Sequence[str], rows: Iterable[Sequence[object]], paint: Paint | None = None) -> str:
    """Returns a plain table: two spaces between columns and no frame, readable by `awk` and `cut`."""
    lines = [cells(row) for row in rows]
    widths = [max(len(line[i]) for line in [list(header), *lines]) for i in range(len(header))]
    return "\n".join([aligned(header, header, widths), *(aligned(header, line, widths, paint) for line in lines)])


def aligned(header: Sequence[str], line: Sequence[str], widths: Sequence[int], paint: Paint | None = None) -> str:
    """Returns one line of a table. Cells that are wider than their column move the rest to the right."""
    padding = [" " * (width - len(cell)) for cell, width in zip(line, widths, strict=True)]
    shown = line if paint is None else [paint(name, cell) for name, cell in zip(header, line, strict=True)]
    return "  ".join(cell + space for cell, space in zip(shown, padding, strict=True)).rstrip()
