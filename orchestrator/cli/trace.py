"""The command `trace export`: export recorded requests for the simulator."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli.app import FAILED, group, option
from orchestrator.cli.client import the_fleet
from orchestrator.cli.output import say, stdout, write
from orchestrator.process.durations import moment, span_s
from orchestrator.simulate.speeds import measured_speeds
from orchestrator.simulate.trace_file import write_trace

PAGE = 5000  # requests in one reply

trace = group("trace", help="Export recorded requests for `simulate`.")


@trace.command()
def export(
    out: Annotated[Path | None, option("FILE", "Output file.", "--out", default="stdout")] = None,
    speeds: Annotated[
        Path | None, option("FILE", "Write the measured speeds of replicas to FILE, for `simulate --speeds`.")
    ] = None,
    since: Annotated[
        str | None,
        option(
            "AGE|TIME",
            "Only requests since an age such as 90m, 12h or 3d, or an ISO 8601 time.",
            default="all requests",
        ),
    ] = None,
) -> None:
    """Export the fleet's recent requests as CSV: times, models, token counts and key IDs, but no texts."""
    oldest = float("-inf") if since is None else _since(since, time.time())
    client = the_fleet()
    requests: list[dict[str, Any]] = []
    reported: dict[str, dict[str, Any]] = {}
    after, more = "", True
    while more:
        page = client.get("trace", {"after": after, "limit": PAGE})
        requests += (request for request in page["requests"] if request["time"] >= oldest)
        reported, after, more = page["speeds"], page["next"], page["more"]
    lines = io.StringIO()
    count = write_trace(requests, lines)
    if out is None:
        stdout().write(lines.getvalue())
        stdout().flush()
    else:
        write(out, lines.getvalue())
    if speeds is not None:
        fitted = measured_speeds(_of_this_revision(requests, reported))
        write(speeds, json.dumps(_merged(reported, fitted), indent=2) + "\n")
        if unknown := sorted(name for name, model in fitted.items() if "prefill_token_ms" not in model):
            say(f"prefill of {', '.join(unknown)} will be estimated: too few prompts, or too similar lengths")
    say(f"{count} requests")
    if not count:
        raise typer.Exit(FAILED)


def _of_this_revision(
    requests: Iterable[dict[str, Any]], reported: Mapping[str, Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yields the requests since the running revision was applied: earlier replicas may have had other shapes."""
    for request in requests:
        if request["time"] >= reported.get(request["model"], {}).get("since", 0.0):
            yield request


def _merged(
    reported: Mapping[str, Mapping[str, Any]], fitted: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, Any]]:
    """Returns the speeds of each model with any, and the shape that they belong to, last."""
    merged: dict[str, dict[str, Any]] = {}
    for name in sorted({*reported, *fitted}):
        known = {field: value for field, value in reported.get(name, {}).items() if value and field != "since"}
        shape = known.pop("shape", None)
        if own := {**known, **fitted.get(name, {})}:
            merged[name] = own if shape is None else {**own, "shape": shape}
    return merged


def _since(text: str, now: float) -> float:
    """Returns the value of ``--since`` in seconds since the epoch."""
    age = span_s(text)
    if age is not None:
        return now - age
    try:
        return moment(text)
    except ValueError:
        rule = "neither an age such as 90m, 12h or 3d nor an ISO 8601 time"
        raise typer.BadParameter(f"{text!r} is {rule}", param_hint="--since") from None
