"""Commands that look at the fleet: get, describe, events, logs, config view."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.app import FAILED, FollowOption, FormatOption, ModelArgument, app, group, the_fleet
from orchestrator.cli.output import Format, complain, show, stdout
from orchestrator.process.failure import Failed

if TYPE_CHECKING:
    from orchestrator.cli.client import AdminClient

config = group("config", "The settings of `up`.")

LATEST = 20  # events that are shown unless more are asked for
ABOUT_ONE = 10  # of `describe`
LOG_LINES = 8


class Kind(str, Enum):
    MODELS = "models"
    REPLICAS = "replicas"
    HOSTS = "hosts"
    REVISIONS = "revisions"
    EVENTS = "events"


@app.command()
def get(
    kind: Annotated[Kind, typer.Argument(metavar="models|replicas|hosts|revisions|events")],
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Only this one; of events: those of this model.")
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """List models, replicas, hosts, revisions or events."""
    from orchestrator.cli.follow import latest
    from orchestrator.cli.tables import listing

    client = the_fleet()
    if kind is Kind.EVENTS:
        found = latest(client, LATEST, name)
    elif kind is Kind.REVISIONS and name is not None:
        if not (name.isascii() and name.isdecimal() and 0 < len(name) < 10):
            raise typer.BadParameter(f"{name!r} is no revision's number", param_hint="NAME")
        revision = client.get(f"revisions/{name}")
        show({"revisions": [revision]}, output, listing("revisions", [revision]) + "\n\n" + revision["text"])
        return
    elif kind is Kind.REVISIONS:
        found = client.get("revisions")["revisions"]
    else:
        things = _things(client.get("status"), kind)
        if name is not None and name not in things:
            raise _not_there(name, list(things))
        found = [thing for key, thing in things.items() if name in (None, key)]
    show({kind.value: found}, output, listing(kind.value, found))


def _things(status: Mapping[str, Any], kind: Kind) -> dict[str, dict[str, Any]]:
    """By name or id."""
    if kind is Kind.HOSTS:
        return {host["name"]: host for host in status["hosts"]}
    if kind is Kind.MODELS:
        return {model["name"]: model for model in status["models"]}
    return {replica["id"]: replica for model in status["models"] for replica in model["replicas"]}


def _not_there(name: str, names: list[str]) -> Failed:
    return Failed("not-in-fleet", f"the fleet has no {name!r}", f"it has {', '.join(names)}" if names else "")


@app.command()
def describe(
    name: Annotated[str, typer.Argument(metavar="MODEL|REPLICA|HOST", help="A name, or a replica's id.")],
    output: FormatOption = Format.TABLE,
) -> None:
    """Tell all that is known of a model, a replica or a host: conditions, cause, log, recent events."""
    from orchestrator.cli.client import FleetRefused
    from orchestrator.cli.follow import events_after
    from orchestrator.cli.tables import description

    client = the_fleet()
    status = client.get("status")
    for kind in (Kind.MODELS, Kind.REPLICAS, Kind.HOSTS):
        things = _things(status, kind)
        if name in things:
            break
    else:
        raise _not_there(name, [key for kind in (Kind.MODELS, Kind.HOSTS) for key in _things(status, kind)])
    word = kind.value.removesuffix("s")
    model = None if kind is Kind.HOSTS else name.rpartition("/")[0] if kind is Kind.REPLICAS else name
    events = [event for event in events_after(client, 0, model) if kind is Kind.MODELS or event.get(word) == name]
    events = events[-ABOUT_ONE:]
    log: dict[str, Any] = {"replica": None, "lines": []}
    if model is not None:
        with contextlib.suppress(FleetRefused):  # it has none
            told = client.get("logs", {"model": model, "replica": _of_interest(status, model, name)})
            log = {"replica": told["replica"], "lines": told["text"].splitlines()[-LOG_LINES:]}
    data = {"kind": word, word: things[name], "events": events, "log": log}
    show(data, output, description(word, things[name], events, log))


def _of_interest(status: Mapping[str, Any], model: str, name: str) -> int | None:
    """The replica whose log tells most: the one that was asked for, or the first that has a cause to tell."""
    ids = [name] if name != model else []
    ids += [r["id"] for m in status["models"] if m["name"] == model for r in m["replicas"] if r["reason"]]
    return int(ids[0].rpartition("/")[2]) if ids else None


@app.command()
def events(
    follow: FollowOption = False,
    model: Annotated[str | None, typer.Option(metavar="M", help="Only those of this model.")] = None,
    since: Annotated[int | None, typer.Option(min=0, metavar="SEQ", help="Only those after this one.")] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Tell what happened: the last 20 events, or all since SEQ; with -f also what happens next."""
    from orchestrator.cli.follow import coming, events_after, latest
    from orchestrator.cli.tables import event_line, listing

    client = the_fleet()
    found = latest(client, LATEST, model) if since is None else list(events_after(client, since, model))
    if not follow:
        show({"events": found}, output, listing("events", found))
        return
    with contextlib.suppress(KeyboardInterrupt):
        if output is Format.TABLE:
            show(None, output, event_line(None))
        for event in found:
            _show_event(event, output)
        for event in coming(client, found[-1]["seq"] if found else since or 0, model):
            _show_event(event, output)


def _show_event(event: dict[str, Any], output: Format) -> None:
    """One line, so that a program can read it as it comes; in YAML one document."""
    from orchestrator.cli.tables import event_line

    if output is Format.JSON:
        show(None, Format.TABLE, json.dumps(event))
    elif output is Format.YAML:
        show([event], output, "")
    else:
        show(None, output, event_line(event))


@app.command()
def logs(
    model: ModelArgument,
    follow: FollowOption = False,
    replica: Annotated[int | None, typer.Option(min=0, metavar="N", help="Which replica; default the first.")] = None,
) -> None:
    """Show the end of a replica's log."""
    client = the_fleet()
    told = client.get("logs", {"model": model, "replica": replica})
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            stdout().write(told["text"])
            stdout().flush()
            if not follow:
                break
            told = _more(client, model, told)


def _more(client: AdminClient, model: str, told: Mapping[str, Any]) -> Any:
    from orchestrator.fleet.controller_settings import LONGEST_WAIT_S

    replica = told["replica"].rpartition("/")[2]
    wanted = {"model": model, "replica": replica, "offset": told["offset"], "wait_s": LONGEST_WAIT_S}
    return client.patiently("logs", wanted)


@config.command("view")
def config_view(output: FormatOption = Format.TABLE) -> None:
    """Show each setting of `up` with its origin: for this shell, and for the running fleet."""
    from orchestrator.cli.client import find_fleet
    from orchestrator.cli.tables import settings_text
    from orchestrator.daemon.settings import resolve
    from placements.spec.problems import has_errors

    here = resolve({})
    complain(here.problems)
    client, fleet = find_fleet(), None
    if client is not None:
        try:
            fleet = client.get("config")["values"]
        except Failed as failed:
            complain([failed.problem])
    table = "an `up` from this shell:\n" + settings_text(here.as_dicts())
    if fleet is not None:
        table += "\n\nthe running fleet:\n" + settings_text(fleet)
    show({"shell": list(here.as_dicts()), "fleet": fleet}, output, table)
    raise typer.Exit(FAILED if has_errors(here.problems) else 0)
