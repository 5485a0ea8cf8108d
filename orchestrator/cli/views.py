"""The commands `status`, `describe`, `events`, `logs` and `config view`: show the state of the fleet."""

from __future__ import annotations

import contextlib
import json
from typing import Annotated, Any

import msgspec
import typer

from orchestrator.cli.app import FAILED, FollowOption, FormatOption, ModelArgument, app, group
from orchestrator.cli.client import FleetRefused, find_fleet, the_fleet
from orchestrator.cli.fleet_names import names_of
from orchestrator.cli.follow import coming, events_after, latest
from orchestrator.cli.get import LATEST, items_by_name, not_in_fleet
from orchestrator.cli.listing import EVENTS, EventRow
from orchestrator.cli.output import Format, complain, show, stdout
from orchestrator.cli.state_colors import state_paint
from orchestrator.cli.tables import description, event_line, settings_text, status_text
from orchestrator.daemon.settings import resolve
from orchestrator.fleet.controller_settings import LONGEST_WAIT_S
from orchestrator.fleet.fleet_status import FleetStatus
from orchestrator.process.failure import Failed
from placements.spec.problems import has_errors

config = group("config", "Show the settings of `up`.")

DESCRIBE_EVENTS = 10
LOG_LINES = 8


@app.command()
def status(output: FormatOption = Format.TABLE) -> None:
    """Show models, replicas and cores of the running fleet."""
    client = the_fleet()
    data = client.status()
    console = None if client.record is None else client.record.console
    show(data, output, status_text(data, state_paint(stdout()), console))


@app.command()
def describe(
    name: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|REPLICA|HOST",
            help="Name of a model or host, or ID of a replica.",
            autocompletion=names_of("models", "replicas", "hosts"),
        ),
    ],
    output: FormatOption = Format.TABLE,
) -> None:
    """Show the details of a model, replica or host. Includes conditions, failures, log and recent events."""
    client = the_fleet()
    status = client.status()
    for kind in ("models", "replicas", "hosts"):
        by_name = items_by_name(status, kind)
        if name in by_name:
            break
    else:
        raise not_in_fleet(name, [key for kind in ("models", "hosts") for key in items_by_name(status, kind)])
    word = kind.removesuffix("s")
    model = None if kind == "hosts" else name.rpartition("/")[0] if kind == "replicas" else name
    events = list(events_after(client, 0, model))
    if kind != "models":
        events = [event for event in events if name in (event.replica, event.host)]
    events = events[-DESCRIBE_EVENTS:]
    log: dict[str, Any] = {"replica": None, "lines": []}
    if model is not None:
        with contextlib.suppress(FleetRefused):  # it has no log
            reply = client.get("logs", {"model": model, "replica": _replica_of_interest(status, model, name)})
            log = {"replica": reply["replica"], "lines": reply["text"].splitlines()[-LOG_LINES:]}
    data = {"kind": word, word: by_name[name], "events": events, "log": log}
    show(data, output, description(word, by_name[name], events, log))


def _replica_of_interest(status: FleetStatus, model: str, name: str) -> int | None:
    """Returns the number of the named replica, or of the first replica of the model that has a problem."""
    ids = [name] if name != model else []
    ids += [replica.id for replica in status.replicas if replica.model == model and replica.reason]
    return int(ids[0].rpartition("/")[2]) if ids else None


@app.command()
def events(
    follow: FollowOption = False,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="M",
            help="Only events of this model.",
            show_default="all models",
            autocompletion=names_of("models"),
        ),
    ] = None,
    since: Annotated[
        int | None,
        typer.Option(min=0, metavar="SEQ", help="All events after this sequence number.", show_default="the last 20"),
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show the last 20 events of the fleet, or all events since SEQ."""
    client = the_fleet()
    shown = latest(client, LATEST, model) if since is None else list(events_after(client, since, model))
    if not follow:
        show({"events": shown}, output, EVENTS.text(shown, state_paint(stdout())))
        return
    with contextlib.suppress(KeyboardInterrupt):
        if output is Format.TABLE:
            show(None, output, event_line(None))
        for event in shown:
            _show_event(event, output)
        for event in coming(client, shown[-1].seq if shown else since or 0, model):
            _show_event(event, output)


def _show_event(event: EventRow, output: Format) -> None:
    """Print one line, so that a program can read the stream; in YAML a list of one."""
    if output is Format.JSON:
        show(None, Format.TABLE, json.dumps(msgspec.to_builtins(event)))
    elif output is Format.YAML:
        show([event], output, "")
    else:
        show(None, output, event_line(event, state_paint(stdout())))


@app.command()
def logs(
    model: ModelArgument,
    follow: FollowOption = False,
    replica: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Number of the replica.", show_default="the first running one"),
    ] = None,
) -> None:
    """Show the end of a replica's log."""
    client = the_fleet()
    page = client.get("logs", {"model": model, "replica": replica})
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            stdout().write(page["text"])
            stdout().flush()
            if not follow:
                break
            number = page["replica"].rpartition("/")[2]
            query = {"model": model, "replica": number, "offset": page["offset"], "wait_s": LONGEST_WAIT_S}
            page = client.get_with_retries("logs", query)


@config.command("view")
def config_view(output: FormatOption = Format.TABLE) -> None:
    """Show each setting of `up` with its origin, for this shell and for the running fleet."""
    settings = resolve({})
    complain(settings.problems)
    client, fleet = find_fleet(), None
    if client is not None:
        try:
            fleet = client.get("config")["values"]
        except Failed as failed:
            complain([failed.problem])
    table = "an `up` from this shell:\n" + settings_text(settings.as_dicts())
    if fleet is not None:
        table += "\n\nthe running fleet:\n" + settings_text(fleet)
    show({"shell": list(settings.as_dicts()), "fleet": fleet}, output, table)
    raise typer.Exit(FAILED if has_errors(settings.problems) else 0)
