"""The commands `status`, `describe`, `events`, `logs`, `config view` and `console`: show the state of the fleet."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Annotated, Any

import msgspec
import typer

from orchestrator.cli.app import (
    FAILED,
    FollowOption,
    FormatOption,
    ModelArgument,
    app,
    argument,
    group,
    names_of,
    option,
)
from orchestrator.cli.client import FleetRefused, find_fleet, the_fleet
from orchestrator.cli.follow import coming, event_line, events_after, latest, rollout_line
from orchestrator.cli.get import LATEST, not_in_fleet
from orchestrator.cli.listing import (
    EVENTS,
    REPLICAS,
    Column,
    Row,
    Table,
    arrivals_per_s,
    clock,
    cores_text,
    items_by_name,
    live,
    waiting,
)
from orchestrator.cli.output import Format, complain, show, show_next, state_paint, stdout
from orchestrator.cluster.settings import resolve
from orchestrator.messages.controller_settings import LONGEST_WAIT_S
from orchestrator.messages.fleet_status import (
    EventRow,
    FleetStatus,
    GatewayInFleet,
    HostInFleet,
    ModelInFleet,
    PreparationStatus,
    ReplicaInFleet,
)
from orchestrator.process.failure import Failed
from orchestrator.process.text_table import Paint, columns
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
        argument(
            "MODEL|REPLICA|HOST",
            "Name of a model or host, or ID of a replica.",
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
        str | None, option("M", "Only events of this model.", default="all models", autocompletion=names_of("models"))
    ] = None,
    since: Annotated[
        int | None, option("SEQ", "All events after this sequence number.", default="the last 20", min=0)
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
        for event in chain(shown, coming(client, shown[-1].seq if shown else since or 0, model)):
            show_next(event, output, event_line(event, state_paint(stdout())))


@app.command()
def logs(
    model: ModelArgument,
    follow: FollowOption = False,
    replica: Annotated[
        int | None, option("N", "Number of the replica.", default="the first running one", min=0)
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


TIMES = ("at", "since", "until")
MOST_REPLICAS = 12  # shown each; of more, only those that are not ready
MOST_HOSTS = 4  # likewise


def _why(model: ModelInFleet) -> str | None:
    """Returns the reason of the last change of the number of replicas."""
    return model.scaling.why if model.scaled is None else f"scaled by {model.scaled.by}"


NUMBERS: Table[ModelInFleet] = Table(
    lambda model: model.name,
    (
        Column("MODEL", lambda model: model.name),
        Column("READY", lambda model: model.ready),
        Column("WANTED", lambda model: model.wanted),
        Column("ARRIVALS/S", arrivals_per_s),
        Column("WAITING", waiting),
        Column("LIVE", live),
        Column("WHY", _why),
    ),
)
IN_STATUS = REPLICAS.first(6)


def status_text(data: FleetStatus, paint: Paint | None = None, console: str | None = None) -> str:
    """Returns the fleet with the address of its ``console``, replicas, models and hosts, with notes on problems and on
    work in progress.

    Of many replicas or hosts, those that are ready and healthy are only counted, so that the text fits a screen.
    """
    replicas: list[Row] = []
    notes: list[str] = []
    for model in data.models:
        for replica in model.replicas:
            replicas.append(IN_STATUS.row(replica))
            if replica.fetch is not None:
                notes.append(f"{replica.id}: {replica.fetch.text}")
            if replica.reason:
                notes += _replica_notes(replica)
        for preparation in model.preparing:
            notes += _preparing_notes(model, preparation, data.hosts)
        if not model.replicas:
            replicas.append((model.name, model.state.value, None, None, None, None))
            if model.reason:
                notes.append(f"{model.name}: {model.reason}")
    notes += map(_gateway_note, data.gateways)
    notes += [note for host in data.hosts for note in _host_notes(host)]
    parts = [
        data.hold,
        _heading(data, console),
        _replica_table(replicas, len(data.replicas), paint),
        NUMBERS.text(data.models),
        _host_table(data.hosts),
        "\n".join(notes),
    ]
    if data.rollout.state != "complete":
        parts.append(rollout_line(data.rollout))
    return "\n\n".join(part for part in parts if part)


def _heading(data: FleetStatus, console: str | None) -> str:
    ready = "ready" if data.ready else "not ready"
    address = f", console {console}" if console else ""
    return f"{data.name}: {ready}, revision {data.revision}{address}"


def _replica_table(rows: Sequence[Row], replicas: int, paint: Paint | None) -> str:
    """Returns a row for each replica, and for each model without one; of more than MOST_REPLICAS, for those that are
    neither ready nor unloaded."""
    header = IN_STATUS.header()
    if len(rows) <= MOST_REPLICAS:
        return columns(header, rows, paint)
    ready = sum(row[1] == "ready" for row in rows)
    others = [row for row in rows if row[1] not in ("ready", "unloaded")]
    shown = others[:MOST_REPLICAS]
    counts = f"{ready} of {replicas} replicas are ready"
    more = f", {len(others) - len(shown)} more are not" if len(others) > len(shown) else ""
    line = f"{counts}{more}; `corewright get replicas` lists all"
    return f"{columns(header, shown, paint)}\n{line}" if shown else line


def _host_table(hosts: Sequence[HostInFleet]) -> str:
    """Returns a row for each host; of more than MOST_HOSTS, for each that has a problem, and one for the others."""
    header = ("HOST", "CORES", "LEASED", "FREE", "CORDONED", "QUARANTINED")
    if len(hosts) <= MOST_HOSTS:
        return columns(header, [(host.name, *_core_counts(host)) for host in hosts])
    shown = [host for host in hosts if _host_notes(host)][:MOST_HOSTS]
    others = [host for host in hosts if host not in shown]
    sums = [sum(counts) for counts in zip(*map(_core_counts, others), strict=True)]
    rows = [(host.name, *_core_counts(host)) for host in shown]
    return columns(header, [*rows, (f"{len(others)} {'more' if shown else 'hosts'}", *sums)])


def _core_counts(host: HostInFleet) -> tuple[int, ...]:
    return host.cores, host.leased, host.free, host.free_cordoned, host.quarantined


def _replica_notes(replica: ReplicaInFleet) -> list[str]:
    notes = [f"{replica.id}: {replica.reason}"]
    if replica.pause_s:
        count = f"failed {replica.failures} times in a row; " if replica.failures else ""
        notes.append(f"    {count}next attempt after {replica.pause_s:.0f} s")
    if replica.stopped:
        notes.append(f"    no further attempts until an apply, or `corewright rollout restart {replica.model}`")
    return notes + [f"    | {line}" for line in replica.log]


def _preparing_notes(model: ModelInFleet, preparation: PreparationStatus, hosts: Iterable[HostInFleet]) -> list[str]:
    """Returns what an update waits for while the old replicas serve."""
    state, place = preparation.state, preparation.host
    notes = [f"{model.name}: preparing the new version on {place} ({state}); the old replicas keep serving"]
    if preparation.reason:
        notes.append(f"    {preparation.failures} failed attempts: {preparation.reason}")
    fetches = [fetch for host in hosts if host.name == place for fetch in host.fetches]
    return notes + [f"    {fetch.text}" for fetch in fetches]


def _gateway_note(gateway: GatewayInFleet) -> str:
    age = None if gateway.routes_age_s is None else f"routes {gateway.routes_age_s:.0f} s old"
    parts = (gateway.address or gateway.machine, gateway.state, gateway.reason, age)
    return f"gateway of {gateway.host or gateway.machine}: {', '.join(part for part in parts if part)}"


def _host_notes(host: HostInFleet) -> list[str]:
    notes = [f"{host.name}: lost"] if host.lost else []
    if host.starting is not None:
        why = f": {host.starting.reason}" if host.starting.reason else ""
        notes.append(f"{host.name}: a machine is requested since {clock(host.starting.since)}{why}")
    cordoned = cores_text(host.cordoned)
    if cordoned:
        notes.append(f"{host.name}: cordoned" + ("" if cordoned == "all" else f": cores {cordoned}"))
    if host.leaving is not None:
        until = "" if host.leaving.until is None else f", it ends at {clock(host.leaving.until)}"
        notes.append(f"{host.name}: leaving: {host.leaving.cause}{until}")
    for held in host.quarantine:
        if held.cause:
            notes.append(f"{host.name}: core {held.core} gets no replica: {held.cause}")
            continue
        command = f" ({held.command})" if held.command else ""
        owner = f"pid {held.pid}{command}" if held.pid is not None else "an unknown process"
        notes.append(f"{host.name}: core {held.core} is held by {owner}")
    return notes


def description(
    kind: str,
    item: ModelInFleet | ReplicaInFleet | HostInFleet,
    events: Sequence[EventRow],
    log: Mapping[str, Any],
) -> str:
    """Returns the values of an item, then its tables, its events, and the end of its log."""
    plain: list[tuple[str, str]] = [("object", kind)]
    parts: list[str] = []
    for key, value in msgspec.to_builtins(item).items():
        if key == "log":
            continue
        if isinstance(item, ModelInFleet) and key == "replicas":
            parts.append(REPLICAS.text(item.replicas) if value else "no replicas")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            parts.append(_table(key, value))
        else:
            plain.append((key.replace("_", " "), _plain(key, value)))
    width = max(len(key) for key, _ in plain)
    parts.insert(0, "\n".join(f"{key.ljust(width)}  {value}" for key, value in plain))
    if events:
        parts.append(EVENTS.text(events))
    if log["lines"]:
        parts.append("\n".join([f"log of {log['replica']}:", *(f"    | {line}" for line in log["lines"])]))
    return "\n\n".join(parts)


def _table(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    header = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[clock(row.get(key)) if key in TIMES else row.get(key) for key in header] for row in rows]
    return f"{name}:\n" + columns([key.upper() for key in header], cells)


def _plain(key: str, value: Any) -> str:
    if isinstance(value, list):
        return cores_text(value) or "-"
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {_plain(name, item)}" for name, item in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    return str(clock(value)) if key in TIMES else str(value)


def settings_text(values: Iterable[Mapping[str, Any]]) -> str:
    """Returns each setting with its value and origin."""
    rows = [(value["name"], _plain("", value["value"]), _origin(value)) for value in values]
    return columns(("NAME", "VALUE", "ORIGIN"), rows)


def _origin(value: Mapping[str, Any]) -> str:
    return str(value["origin"]) + (f" ({value['where']})" if value.get("where") else "")


@app.command()
def console(output: FormatOption = Format.TABLE) -> None:
    """Show the address of the web console, and the key to log in with."""
    fleet = the_fleet()
    url = fleet.record.console if fleet.record else f"{fleet.url}/console/"
    show({"url": url, "key": fleet.token}, output, f"console  {url}\nkey      {fleet.token}")
