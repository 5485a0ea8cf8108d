"""The command `top`: the live state of the fleet on one screen."""

from __future__ import annotations

import contextlib
import shutil
import string
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Annotated

from orchestrator.cli.app import app, option, switch
from orchestrator.cli.client import AdminClient, FleetRefused, the_fleet
from orchestrator.cli.follow import events_after, latest, rollout_line
from orchestrator.cli.listing import EVENTS, REPLICAS, arrivals_per_s, live, waiting
from orchestrator.cli.output import Format, can_redraw, paint_state, show, stdout, use_color
from orchestrator.messages.fleet_status import EventRow, FleetStatus, HostInFleet, ModelInFleet, ReplicaInFleet
from orchestrator.process.failure import Failed
from orchestrator.process.text_table import Paint, columns
from placements.facts.core_range import CoreRange
from placements.facts.topology import TOPOLOGIES

MODELS = ("", "MODEL", "STATE", "READY", "WAITING", "LIVE", "ARRIVALS/S", "TOKENS/S", "TTFT_MS", "WHY")
FIGURES = ("tokens_per_s", "ttft_p50_ms", "ttft_p99_ms")  # of the load, which has a new sample every SAMPLE_S
SAMPLE_S = 10.0
STARTING = REPLICAS.first(4)  # columns of replicas that are not ready, before PROGRESS
MOST_UNREADY = 8
LAST_EVENTS = 5
MOST_EVENTS = 200  # that are kept


@app.command()
def top(
    interval: Annotated[
        float, option("S", "Seconds between two readings.", "--interval", "-n", min=0.2, max=60.0)
    ] = 1.0,
    once: Annotated[bool, switch("--once", "Print one reading; the default without a terminal.")] = False,
) -> None:
    """Show cores, models, queues and events of the running fleet, live. Ctrl-C ends it."""
    client = the_fleet()
    status, unreachable = client.status(), ""
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
            text = Text.from_ansi(
                screen(status, load, events, size.width, size.height, color=color, unreachable=unreachable)
            )
            text.no_wrap = True
            live.update(text, refresh=True)
            time.sleep(interval)
            try:
                status, unreachable = client.status(), ""
                if time.monotonic() - read_at >= SAMPLE_S:
                    load, read_at = _load(client), time.monotonic()
                after = events[-1].seq if events else 0
                events = [*events, *events_after(client, after, None)][-MOST_EVENTS:]
            except Failed as failed:
                if failed.problem.id != "fleet-unreachable":
                    raise
                unreachable = failed.problem.what


Load = Mapping[str, Mapping[str, float | None]]


def _load(client: AdminClient) -> Load:
    """Returns the FIGURES of each model's last sample; none of a fleet that has no samples yet."""
    try:
        models = client.get("load")["models"]
    except FleetRefused:
        return {}
    return {name: {key: (own.get(key) or [None])[-1] for key in FIGURES} for name, own in models.items()}


def screen(
    status: FleetStatus,
    load: Load,
    events: Sequence[EventRow],
    width: int,
    height: int | None,
    *,
    color: bool,
    unreachable: str = "",
) -> str:
    """Returns the screen: the fleet, its cores, its models, replicas that are not ready, and the last events.

    ``height`` limits the number of lines: hosts that do not fit are counted. None: all hosts are shown.
    ``unreachable``: why there is no newer status.
    """
    paint = paint_state if color else None
    letter_of = letters(model.name for model in status.models)
    head = [_heading(status, unreachable), ""]
    rest = ["", columns(MODELS, [_model_row(model, letter_of, load) for model in status.models], paint)]
    unready = [replica for replica in status.replicas if not replica.ready]
    if unready:
        rest += ["", _unready(unready, paint)]
    if events:
        rest += ["", EVENTS.text(events[-LAST_EVENTS:], paint)]
    rest = "\n".join(rest).split("\n")
    room = None if height is None else max(1, height - len(head) - len(rest) - 1)
    return "\n".join([*head, *_hosts(status, letter_of, width, room, color=color), *rest])


def _heading(status: FleetStatus, unreachable: str) -> str:
    leased, cores = sum(host.leased for host in status.hosts), sum(host.cores for host in status.hosts)
    parts = [f"{status.name}: {'ready' if status.ready else 'not ready'}", f"{leased} of {cores} cores in use"]
    parts += [text for text in (rollout_line(status.rollout), status.hold, unreachable) if text]
    return ", ".join(parts)


def _hosts(
    status: FleetStatus, letter_of: Mapping[str, str], width: int, room: int | None, *, color: bool
) -> list[str]:
    """Returns a line for each host, at most ``room`` with the legend."""
    hosts = status.hosts
    ready = {replica.id for replica in status.replicas if replica.ready}
    shown = hosts if room is None or len(hosts) < room else hosts[: max(1, room - 2)]
    name_width = max((len(host.name) for host in shown), default=0)
    lines = [
        f"{host.name.ljust(name_width)}  "
        + host_line(host, cells(host, ready, letter_of), width - name_width - 2, color)
        for host in shown
    ]
    if len(shown) < len(hosts):
        others = hosts[len(shown) :]
        leased, cores = sum(host.leased for host in others), sum(host.cores for host in others)
        lines.append(f"and {len(others)} more hosts: {leased} of {cores} cores in use")
    return [*lines, LEGEND]


def _model_row(model: ModelInFleet, letter_of: Mapping[str, str], load: Load) -> tuple[object, ...]:
    tokens, typical, slow = (load.get(model.name, {}).get(key) for key in FIGURES)
    return (
        letter_of[model.name],
        model.name,
        model.state.value,
        f"{model.ready}/{model.wanted}",
        waiting(model),
        live(model),
        arrivals_per_s(model),
        None if tokens is None else round(tokens, 1),
        None if typical is None or slow is None else f"{typical:.0f}/{slow:.0f}",
        model.scaling.why,
    )


def _unready(replicas: Sequence[ReplicaInFleet], paint: Paint | None) -> str:
    rows = [
        (*STARTING.row(replica), replica.reason if replica.fetch is None else replica.fetch.text)
        for replica in replicas[:MOST_UNREADY]
    ]
    more = len(replicas) - len(rows)
    text = columns((*STARTING.header(), "PROGRESS"), rows, paint)
    return text + (f"\nand {more} more that are not ready" if more else "")


LETTERS = string.ascii_uppercase
MANY = "*"  # of each model after the 26th
MODEL_COLORS = (36, 33, 35, 32, 34, 31, 96, 93, 95, 92, 94, 91)
FREE, RESERVED, CORDONED, QUARANTINED, LOST = ".#/!?"
LEGEND = "A ready  a not ready  . free  # reserved  / cordoned  ! quarantined  ? lost"


def letters(models: Iterable[str]) -> dict[str, str]:
    """Returns the letter of each model, the same on every host."""
    return {name: LETTERS[i] if i < len(LETTERS) else MANY for i, name in enumerate(models)}


def cells(host: HostInFleet, ready: Container[str], letter_of: Mapping[str, str]) -> list[str]:
    """Returns one character for each core of a host of the status: the letter of its model, which is a capital if
    the replica is ``ready``, or a sign of LEGEND."""
    drawn = [LOST if host.lost else FREE] * host.cores
    if isinstance(host.cordoned, str):
        drawn = [CORDONED] * host.cores
    else:
        _mark(drawn, host.cordoned, CORDONED)
    _mark(drawn, host.reserved_cores, RESERVED)
    _mark(drawn, [str(held.core) for held in host.quarantine], QUARANTINED)
    for lease in host.leases:
        letter = letter_of.get(lease.replica.rpartition("/")[0], MANY)
        _mark(drawn, [lease.cores], letter if lease.replica in ready else letter.lower())
    return drawn


def _mark(drawn: list[str], ranges: Iterable[str], sign: str) -> None:
    for text in ranges:
        for core in CoreRange.parse(text):
            if core < len(drawn):
                drawn[core] = sign


def host_line(host: HostInFleet, drawn: Sequence[str], width: int, color: bool) -> str:
    """Returns the cores in groups of one device, without the groups where they are wider than ``width``."""
    topology = TOPOLOGIES.get(host.instance or "")
    devices = topology.devices if topology is not None and host.cores % topology.devices == 0 else 1
    per = max(1, host.cores // devices)
    gap = " " if len(drawn) + devices <= width else ""
    groups = (drawn[first : first + per] for first in range(0, len(drawn), per))
    return gap.join("".join(_painted(cell, len(list(run)), color) for cell, run in groupby(group)) for group in groups)


def _painted(cell: str, times: int, color: bool) -> str:
    if not color:
        return cell * times
    if cell.upper() in LETTERS:
        number = MODEL_COLORS[LETTERS.index(cell.upper()) % len(MODEL_COLORS)]
        return f"\x1b[{'7;' if cell.isupper() else ''}{number}m{cell * times}\x1b[0m"
    return f"\x1b[31m{cell * times}\x1b[0m" if cell in (QUARANTINED, LOST) else cell * times
