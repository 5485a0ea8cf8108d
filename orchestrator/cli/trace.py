"""Commands about what was asked: `trace export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli.app import FAILED, group, the_fleet
from orchestrator.cli.output import say, stdout, write
from orchestrator.process.durations import moment, span_s

PAGE = 5000  # requests that are asked for at once

trace = group("trace", help="What was asked of the models, in lengths: for `simulate`.")


@trace.command()
def export(
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write it there.", show_default="to stdout")
    ] = None,
    speeds: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write how fast the replicas were, for `simulate --speeds`.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="AGE|TIME", help="Only requests that came since: 90m, 12h, 3d, or a time of ISO 8601."),
    ] = None,
) -> None:
    """Write what the running fleet was asked lately as CSV: times, models, lengths and the ids of keys, no texts."""
    import io
    import json
    import time

    from orchestrator.simulate.speeds import measured_speeds
    from orchestrator.simulate.trace_file import write_trace

    oldest = float("-inf") if since is None else _since(since, time.time())
    client = the_fleet()
    requests: list[dict[str, Any]] = []
    measured: dict[str, dict[str, float]] = {}
    after, more = "", True
    while more:
        told = client.get("trace", {"after": after, "limit": PAGE})
        requests += (request for request in told["requests"] if request["time"] >= oldest)
        measured, after, more = told["speeds"], told["next"], told["more"]
    lines = io.StringIO()
    count = write_trace(requests, lines)
    if out is None:
        stdout().write(lines.getvalue())
        stdout().flush()
    else:
        write(out, lines.getvalue())
    if speeds is not None:
        fitted = measured_speeds(requests)
        known = {name: {field: value for field, value in one.items() if value} for name, one in measured.items()}
        each = {name: {**known.get(name, {}), **fitted.get(name, {})} for name in {*known, *fitted}}
        write(speeds, json.dumps({name: told for name, told in sorted(each.items()) if told}, indent=2) + "\n")
        if unknown := sorted(name for name, told in fitted.items() if "prefill_token_ms" not in told):
            say(f"prefill of {', '.join(unknown)} will be estimated: too few prompts, or all of about one length")
    say(f"{count} requests")
    if not count:
        raise typer.Exit(FAILED)


def _since(text: str, now: float) -> float:
    """In seconds since the epoch."""
    age = span_s(text)
    if age is not None:
        return now - age
    try:
        return moment(text)
    except ValueError:
        rule = "neither an age like 90m, 12h or 3d nor a time of ISO 8601"
        raise typer.BadParameter(f"{text!r} is {rule}", param_hint="--since") from None
