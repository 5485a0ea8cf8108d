"""Formats tables as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def columns(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a plain table: two spaces between columns and no frame, readable by `awk` and `cut`."""
    lines = [tuple(header), *(tuple("-" if cell is None else str(cell) for cell in row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
