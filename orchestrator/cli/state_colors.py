"""Colors the states in tables on a terminal."""

from __future__ import annotations

from typing import TextIO

from orchestrator.cli.output import use_color
from orchestrator.process.text_table import Paint

GREEN, YELLOW, RED, FAINT = "32", "33", "31", "2"
COLORS = {
    **dict.fromkeys(("ready", "complete"), GREEN),
    **dict.fromkeys(("pending", "fetching", "compiling", "loading", "starting", "draining", "stopping"), YELLOW),
    **dict.fromkeys(("degraded", "progressing", "canary", "paused", "warning"), YELLOW),
    **dict.fromkeys(("failed", "lost", "rolled back", "rolled_back", "error"), RED),
    **dict.fromkeys(("unloaded", "superseded"), FAINT),
}
COLUMNS = ("STATE", "LEVEL")


def state_paint(stream: TextIO) -> Paint | None:
    """Returns the painter of tables on ``stream``; None if it shows no colors."""
    return paint_state if use_color(stream) else None


def paint_state(column: str, cell: str) -> str:
    """Returns the cell of a state in its color, and every other cell unchanged."""
    color = COLORS.get(cell) if column in COLUMNS else None
    return cell if color is None else f"\x1b[{color}m{cell}\x1b[0m"
