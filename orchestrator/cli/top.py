"""The command `top`: the live state of the fleet on one screen."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from orchestrator.cli.app import app
from orchestrator.cli.client import AdminClient, FleetRefused, the_fleet
from orchestrator.cli.follow import events_after, latest
from orchestrator.cli.listing import EVENT, event_row, replica_row
from orchestrator.cli.live_map import LEGEND, cells, host_line, letters
from orchestrator.cli.output import Format, can_redraw, show, stdout, use_color
from orchestrator.cli.state_colors import paint_state
from orchestrator.cli.tables import rollout_line
from orchestrator.fleet.progress_text import fetch_text, hold_text
from orchestrator.process.failure import Failed
from orchestrator.process.text_table import Paint, columns

MODELS = ("", "MODEL", "STATE", "READY", "WAITING", "LIVE", "ARRIVALS/S", "TOKENS/S", "TTFT_MS", "WHY")
FIGURES = ("tokens_per_s", "ttft_p50_ms", "ttft_p99_ms")  # of the load, which has a new sample every SAMPLE_S
SAMPLE_S = 10.0
REPLICAS = ("REPLICA", "STATE", "CORES", "HOST", "PROGRESS")
MOST_UNREADY = 8
EVENTS = 5
MOST_EVENTS = 200  # that are kept


@app.command()
def top(
    interval: Annotated[
        float, typer.Option("--interval", "-n", min=0.2, max=60.0, metavar="S", help="Seconds between two readings.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one reading; the default without a terminal.")] = False,
) -> None:
    """Show cores, models, queues and events of the running fleet, live. Ctrl-C ends it."""
    client = the_fleet()
    status = client.get("status")
    load, read_at = _load(client), time.monotonic()
    events = latest(client, MOST_EVENTS)
    color = use_color(stdout())
    if once or not can_redraw(stdout()):
        show(None, Format.TABLE, screen(status, load, events, shutil.get_terminal_size().columns, None, color=color))
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(file=stdout(), highlight=False)
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            size = console.size
            text = Text.from_ansi(screen(status, load, events, size.width, size.height, color=color))
            text.no_wrap = True
            live.update(text, refresh=True)
            time.sleep(interval)
            try:
                status = client.get("status")
                if time.monotonic() - read_at >= SAMPLE_S:
                    load, read_at = _load(client), time.monotonic()
                after = events[-1]["seq"] if events else 0
                events = [*events, *events_after(client, after, None)][-MOST_EVENTS:]
            except Failed as failed:
                if failed.problem.id != "fleet-unreachable":
                    raise
                status = {**status, "unreachable": failed.problem.what}


Load = Mapping[str, Mapping[str, float | None]]


def _load(client: AdminClient) -> Load:
    """Returns the FIGURES of each model's last sample; none of a fleet that has no samples yet, or of an older one."""
    try:
        models = client.get("load")["models"]
    except FleetRefused:
        return {}
    return {name: {key: (own.get(key) or [None])[-1] for key in FIGURES} for name, own in models.items()}


def screen(
    status: Mapping[str, Any],
    load: Load,
    events: Sequence[Mapping[str, Any]],
    width: int,
    height: int | None,
    *,
    color: bool,
) -> str:
    """Returns the screen: the fleet, its cores, its models, replicas that are not ready, and the last events.

    ``height`` limits the number of lines: hosts that do not fit are counted. None: all hosts are shown.
    """
    paint = paint_state if color else None
    letter_of = letters(model["name"] for model in status["models"])
    head = [_heading(status), ""]
    rest = ["", columns(MODELS, [_model_row(model, letter_of, load) for model in status["models"]], paint)]
    unready = [replica for model in status["models"] for replica in model["replicas"] if replica["state"] != "ready"]
    if unready:
        rest += ["", _unready(unready, paint)]
    if events:
        rest += ["", columns(EVENT, [event_row(event) for event in events[-EVENTS:]], paint)]
    rest = "\n".join(rest).split("\n")
    room = None if height is None else max(1, height - len(head) - len(rest) - 1)
    return "\n".join([*head, *_hosts(status, letter_of, width, room, color=color), *rest])


def _heading(status: Mapping[str, Any]) -> str:
    hosts, rollout = status["hosts"], status.get("rollout")
    leased, cores = sum(host["leased"] for host in hosts), sum(host["cores"] for host in hosts)
    parts = [f"{status['name']}: {'ready' if status['ready'] else 'not ready'}", f"{leased} of {cores} cores in use"]
    if rollout:
        parts.append(rollout_line(rollout))
    parts += [text for text in (hold_text(status), status.get("unreachable")) if text]
    return ", ".join(parts)


def _hosts(
    status: Mapping[str, Any], letter_of: Mapping[str, str], width: int, room: int | None, *, color: bool
) -> list[str]:
    """Returns a line for each host, at most ``room`` with the legend."""
    hosts = status["hosts"]
    states = {replica["id"]: replica["state"] for model in status["models"] for replica in model["replicas"]}
    shown = hosts if room is None or len(hosts) < room else hosts[: max(1, room - 2)]
    name_width = max((len(host["name"]) for host in shown), default=0)
    lines = [
        f"{host['name'].ljust(name_width)}  "
        + host_line(host, cells(host, states, letter_of), width - name_width - 2, color)
        for host in shown
    ]
    if len(shown) < len(hosts):
        others = hosts[len(shown) :]
        leased, cores = sum(host["leased"] for host in others), sum(host["cores"] for host in others)
        lines.append(f"and {len(others)} more hosts: {leased} of {cores} cores in use")
    return [*lines, LEGEND]


def _model_row(model: Mapping[str, Any], letter_of: Mapping[str, str], load: Load) -> tuple[object, ...]:
    scaling = model.get("scaling") or {}
    demand = scaling.get("demand") or {}
    ready = sum(replica["state"] == "ready" for replica in model["replicas"])
    numbers = (demand.get(key) for key in ("waiting", "live", "arrivals_per_s"))
    name = model["name"]
    tokens, typical, slow = (load.get(name, {}).get(key) for key in FIGURES)
    ttft = None if typical is None or slow is None else f"{typical:.0f}/{slow:.0f}"
    tokens = None if tokens is None else round(tokens, 1)
    count = f"{ready}/{model['wanted']}"
    return (letter_of[name], name, model["state"], count, *numbers, tokens, ttft, scaling.get("why"))


def _unready(replicas: Sequence[Mapping[str, Any]], paint: Paint | None) -> str:
    rows = [
        (*replica_row(replica)[:4], fetch_text(replica["fetch"]) if replica.get("fetch") else replica["reason"])
        for replica in replicas[:MOST_UNREADY]
    ]
    more = len(replicas) - len(rows)
    return columns(REPLICAS, rows, paint) + (f"\nand {more} more that are not ready" if more else "")
