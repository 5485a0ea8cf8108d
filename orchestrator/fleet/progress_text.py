"""Formats the progress of fetches, and the reason for which a fleet is held, as text."""

from __future__ import annotations

from orchestrator.fleet.fleet_status import FetchProgress
from placements.spec.problems import Problem
from workers.artifacts.fetch.progress import size_text as size_text


def problem_text(problem: Problem) -> str:
    """Returns the problem on one line, in the form of replica failures."""
    return f"{problem.id}: {problem.what} ({problem.hint})"


def fetch_text(fetch: FetchProgress) -> str:
    """Returns a fetch's progress, such as "fetching s3://models/chat: 1.2 GB of 13.5 GB, 210.0 MB/s, 58 s left"."""
    numbers = fetch_numbers(fetch)
    return f"{fetch.phase} {fetch.source}" + (f": {numbers}" if numbers else "")


def fetch_numbers(fetch: FetchProgress, *, left: bool = True) -> str:
    """Returns the numbers of a fetch's progress, such as "1.2 GB of 13.5 GB, 210.0 MB/s, 58 s left".

    ``left``: with the time that is left.
    """
    parts = []
    if fetch.total:
        parts.append(f"{size_text(fetch.bytes)} of {size_text(fetch.total)}")
    if fetch.bytes_per_s:
        parts.append(f"{size_text(fetch.bytes_per_s)}/s")
    if fetch.left_s is not None and left:
        parts.append(f"{fetch.left_s:.0f} s left")
    if fetch.trouble:
        parts.append(fetch.trouble)
    return ", ".join(parts)


def fetched_text(total: int, moved: int, seconds: float, warning: str = "") -> str:
    """Returns the result of a fetch, such as "13.5 GB in 12.3 s, 1100 MB/s"; ``moved`` bytes came over the network."""
    if moved:
        text = f"{size_text(moved)} in {seconds:.1f} s, {moved / max(seconds, 1e-3) / 1e6:.0f} MB/s"
        text += f"; {size_text(total - moved)} were here" if total > moved else ""
    else:
        text = f"0 bytes: {size_text(total)} were here"
    return f"{text}; {warning}" if warning else text
