"""Formats the progress of fetches, and the reason for which a fleet is held, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from placements.spec.problems import Problem
from workers.artifacts.fetch.progress import size_text as size_text


def problem_text(problem: Problem) -> str:
    """Returns the problem on one line, in the form of replica failures."""
    return f"{problem.id}: {problem.what} ({problem.hint})"


def hold_text(status: Mapping[str, Any]) -> str:
    """Returns why the fleet is held until an operator confirms its revision; empty: it is not held."""
    conditions = status.get("conditions") or ()
    return next(
        (
            condition["message"]
            for condition in conditions
            if condition["type"] == "JournalIntact" and not condition["status"]
        ),
        "",
    )


def fetch_text(fetch: Mapping[str, Any]) -> str:
    """Returns a fetch's progress, such as "fetching s3://models/chat: 1.2 GB of 13.5 GB, 210.0 MB/s, 58 s left"."""
    numbers = fetch_numbers(fetch)
    return f"{fetch['phase']} {fetch['source']}" + (f": {numbers}" if numbers else "")


def fetch_numbers(fetch: Mapping[str, Any]) -> str:
    """Returns the numbers of a fetch's progress, such as "1.2 GB of 13.5 GB, 210.0 MB/s, 58 s left"."""
    parts = []
    if fetch["total"]:
        parts.append(f"{size_text(fetch['bytes'])} of {size_text(fetch['total'])}")
    if fetch["bytes_per_s"]:
        parts.append(f"{size_text(fetch['bytes_per_s'])}/s")
    if fetch["left_s"] is not None:
        parts.append(f"{fetch['left_s']:.0f} s left")
    if fetch.get("trouble"):  # absent in fleets of earlier versions
        parts.append(fetch["trouble"])
    return ", ".join(parts)


def tenths(fetch: Mapping[str, Any] | None) -> int | None:
    """Returns how many tenths of a fetch are done; None: unknown."""
    return int(10 * fetch["bytes"] / fetch["total"]) if fetch and fetch["total"] else None


def fetched_text(total: int, moved: int, seconds: float, warning: str = "") -> str:
    """Returns the result of a fetch, such as "13.5 GB in 12.3 s, 1100 MB/s"; ``moved`` bytes came over the network."""
    if moved:
        text = f"{size_text(moved)} in {seconds:.1f} s, {moved / max(seconds, 1e-3) / 1e6:.0f} MB/s"
        text += f"; {size_text(total - moved)} were here" if total > moved else ""
    else:
        text = f"0 bytes: {size_text(total)} were here"
    return f"{text}; {warning}" if warning else text
