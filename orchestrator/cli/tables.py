"""The state of the fleet as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from orchestrator.cli.listing import (
    EVENTS,
    REPLICAS,
    Column,
    EventRow,
    Row,
    Table,
    arrivals_per_s,
    clock,
    cores_text,
    live,
    waiting,
)
from orchestrator.fleet.fleet_status import (
    FleetStatus,
    GatewayInFleet,
    HostInFleet,
    ModelInFleet,
    PreparationStatus,
    ReplicaInFleet,
    RolloutStatus,
)
from orchestrator.fleet.progress_text import fetch_text
from orchestrator.process.text_table import Paint, aligned, cells, columns

TIMES = ("at", "since", "until")
EVENT_WIDTHS = (6, 19, 7, 18, 16, 0)
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


# `events`


def event_line(event: EventRow | None, paint: Paint | None = None) -> str:
    """Returns one line of followed events; for None the header."""
    header = EVENTS.header()
    return aligned(header, cells(header if event is None else EVENTS.row(event)), EVENT_WIDTHS, paint)


# `status`, `rollout status`


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
                notes.append(f"{replica.id}: {fetch_text(replica.fetch)}")
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
        notes.append(f"    failed {replica.failures} times in a row; next attempt after {replica.pause_s:.0f} s")
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
    return notes + [f"    {fetch_text(fetch)}" for fetch in fetches]


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


def rollout_line(rollout: RolloutStatus) -> str:
    """Returns the state of a rollout and its reason in one line."""
    reason = f": {rollout.reason}" if rollout.reason else ""
    return f"revision {rollout.revision}: {rollout.state.replace('_', ' ')}{reason}"


def rollout_text(rollout: RolloutStatus, paint: Paint | None = None) -> str:
    """Returns the line of the rollout, and a row for each model."""
    rows = [
        (model.model, model.state, model.strategy, model.wanted, model.updated, model.ready, model.old)
        for model in rollout.models
    ]
    table = columns(("MODEL", "STATE", "STRATEGY", "WANTED", "UPDATED", "READY", "OLD"), rows, paint)
    return rollout_line(rollout) + ("\n\n" + table if rows else "")


# `describe`


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
