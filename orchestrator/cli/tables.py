"""The state of the fleet as tables. Keys that a fleet of another version does not send show as `-`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orchestrator.cli.listing import (
    EVENT,
    HOST,
    REPLICA,
    Row,
    clock,
    cores_text,
    event_row,
    host_row,
    listing,
    replica_row,
)
from orchestrator.fleet.progress_text import fetch_text, hold_text
from orchestrator.process.text_table import Paint, aligned, cells, columns

TIMES = ("at", "since", "until")
EVENT_WIDTHS = (6, 19, 7, 18, 16, 0)
MOST_REPLICAS = 12  # shown each; of more, only those that are not ready
MOST_HOSTS = 4  # likewise
NUMBERS = ("MODEL", "READY", "WANTED", "ARRIVALS/S", "WAITING", "LIVE", "WHY")


# `events`


def event_line(event: Mapping[str, Any] | None, paint: Paint | None = None) -> str:
    """Returns one line of followed events; for None the header."""
    return aligned(EVENT, cells(EVENT if event is None else event_row(event)), EVENT_WIDTHS, paint)


# `status`, `rollout status`


def status_text(data: Mapping[str, Any], paint: Paint | None = None, console: str | None = None) -> str:
    """Returns the fleet with the address of its ``console``, replicas, models and hosts, with notes on problems and on
    work in progress.

    Of many replicas or hosts, those that are ready and healthy are only counted, so that the text fits a screen.
    """
    replicas: list[Row] = []
    notes: list[str] = []
    for model in data["models"]:
        for replica in model["replicas"]:
            replicas.append(replica_row(replica)[:6])
            if replica.get("fetch"):
                notes.append(f"{replica['id']}: {fetch_text(replica['fetch'])}")
            if replica["reason"]:
                notes += _replica_notes(replica)
        for preparation in model.get("preparing") or ():
            notes += _preparing_notes(model, preparation, data["hosts"])
        if not model["replicas"]:
            replicas.append((model["name"], model["state"], None, None, None, None))
            if model["reason"]:
                notes.append(f"{model['name']}: {model['reason']}")
    host_notes = [note for host in data["hosts"] for note in _host_notes(host)]
    parts = [
        hold_text(data),
        _heading(data, console),
        _replica_table(replicas, paint),
        columns(NUMBERS, [_numbers_row(model) for model in data["models"]]),
        _host_table(data["hosts"]),
        "\n".join([*notes, *_maintenance(data), *_versions(data), *_gateways(data), *host_notes]),
    ]
    rollout = data.get("rollout")
    if rollout and rollout["state"] != "complete":
        parts.append(rollout_line(rollout))
    return "\n\n".join(part for part in parts if part)


def _heading(data: Mapping[str, Any], console: str | None) -> str:
    ready = "ready" if data["ready"] else "not ready"
    address = f", console {console}" if console else ""
    return f"{data['name']}: {ready}, revision {data.get('revision', '-')}{address}"


def _replica_table(rows: Sequence[Row], paint: Paint | None) -> str:
    """Returns a row for each replica; of more than MOST_REPLICAS, for each that is not ready."""
    if len(rows) <= MOST_REPLICAS:
        return columns(REPLICA[:6], rows, paint)
    ready = sum(row[1] == "ready" for row in rows)
    others = [row for row in rows if row[1] not in ("ready", "unloaded")]
    shown = others[:MOST_REPLICAS]
    counts = f"{ready} of {len(rows)} replicas are ready"
    more = f", {len(others) - len(shown)} more are not" if len(others) > len(shown) else ""
    line = f"{counts}{more}; `corewright get replicas` lists all"
    return f"{columns(REPLICA[:6], shown, paint)}\n{line}" if shown else line


def _host_table(hosts: Sequence[Mapping[str, Any]]) -> str:
    """Returns a row for each host; of more than MOST_HOSTS, for each that has a problem, and one for the others."""
    header = (HOST[0], *HOST[2:7])
    rows = [(row[0], *row[2:7]) for row in map(host_row, hosts)]
    if len(rows) <= MOST_HOSTS:
        return columns(header, rows)
    healthy = [row for row, host in zip(rows, hosts, strict=True) if not _host_notes(host)]
    shown = [row for row in rows if row not in healthy][:MOST_HOSTS]
    others = [row for row in rows if row not in shown]
    sums: list[object] = [sum(int(str(row[i] or 0)) for row in others) for i in range(1, len(header))]
    return columns(header, [*shown, (f"{len(others)} {'more' if shown else 'hosts'}", *sums)])


def _numbers_row(model: Mapping[str, Any]) -> Row:
    """Returns a model's ready and wanted replicas, its demand, and the reason of the last scaling."""
    scaling = model.get("scaling") or {}
    demand = scaling.get("demand") or {}
    ready = sum(replica["state"] == "ready" for replica in model["replicas"])
    scaled = model.get("scaled")
    why = f"scaled by {scaled['by']}" if scaled else scaling.get("why")
    numbers = (demand.get(key) for key in ("arrivals_per_s", "waiting", "live"))
    return (model["name"], ready, model["wanted"], *numbers, why)


def _replica_notes(replica: Mapping[str, Any]) -> list[str]:
    notes = [f"{replica['id']}: {replica['reason']}"]
    if replica["pause_s"]:
        notes.append(f"    {replica['failures']} failed starts; next attempt after {replica['pause_s']:.0f} s")
    if replica.get("stopped"):
        model = replica["id"].rpartition("/")[0]
        notes.append(f"    no further attempts until an apply, or `corewright rollout restart {model}`")
    return notes + [f"    | {line}" for line in replica["log"]]


def _preparing_notes(
    model: Mapping[str, Any], preparation: Mapping[str, Any], hosts: Iterable[Mapping[str, Any]]
) -> list[str]:
    """Returns what an update waits for while the old replicas serve."""
    state, host = preparation["state"], preparation["host"]
    notes = [f"{model['name']}: preparing the new version on {host} ({state}); the old replicas keep serving"]
    if preparation["reason"]:
        notes.append(f"    {preparation['failures']} failed attempts: {preparation['reason']}")
    fetches = [fetch for host in hosts if host["name"] == preparation["host"] for fetch in host.get("fetches") or ()]
    return notes + [f"    {fetch_text(fetch)}" for fetch in fetches]


def _versions(data: Mapping[str, Any]) -> list[str]:
    """Returns the versions of corewright, while they differ."""
    versions = data.get("versions")
    if not versions:
        return []
    kinds = {"host_actors": "host actor of ", "gateways": "gateway of ", "replicas": ""}
    parts = [f"{kind}{name} {version}" for key, kind in kinds.items() for name, version in versions[key].items()]
    line = f"upgrade: the controller is corewright {versions['controller']}, and not yet: {', '.join(parts)}"
    return [line] if versions["problem"] is None else [line, f"upgrade: {versions['problem']}"]


def _maintenance(data: Mapping[str, Any]) -> list[str]:
    roll = data.get("maintenance")
    return [] if roll is None else [roll_line(roll)]


def _gateways(data: Mapping[str, Any]) -> list[str]:
    """Returns a line for each gateway of a joined cluster."""
    return [
        f"gateway of {gateway['host'] or gateway['machine']}: "
        + ", ".join(
            part
            for part in (
                gateway["address"] or gateway["machine"],
                gateway["state"],
                gateway["reason"],
                None if gateway["routes_age_s"] is None else f"routes {gateway['routes_age_s']:.0f} s old",
            )
            if part
        )
        for gateway in data.get("gateways") or ()
    ]


def _host_notes(host: Mapping[str, Any]) -> list[str]:
    notes = [f"{host['name']}: lost"] if host.get("lost") else []
    if (starting := host.get("starting")) is not None:
        why = f": {starting['reason']}" if starting["reason"] else ""
        notes.append(f"{host['name']}: a machine is requested since {clock(starting['since'])}{why}")
    cordoned = cores_text(host.get("cordoned"))
    if cordoned:
        notes.append(f"{host['name']}: cordoned" + ("" if cordoned == "all" else f": cores {cordoned}"))
    if (leaving := host.get("leaving")) is not None:
        until = "" if leaving["until"] is None else f", it ends at {clock(leaving['until'])}"
        notes.append(f"{host['name']}: leaving: {leaving['cause']}{until}")
    for held in host.get("quarantine") or ():
        if held.get("cause"):
            notes.append(f"{host['name']}: core {held['core']} gets no replica: {held['cause']}")
            continue
        command = f" ({held['command']})" if held.get("command") else ""
        owner = f"pid {held['pid']}{command}" if held.get("pid") is not None else "an unknown process"
        notes.append(f"{host['name']}: core {held['core']} is held by {owner}")
    return notes


def roll_line(roll: Mapping[str, Any]) -> str:
    """Returns the progress of a maintenance of hosts in one line."""
    host, *rest = roll["hosts"]
    doing = {"next": "it is next", "draining": "its replicas move", "waiting": "it is empty"}[roll["phase"]]
    waits = {"operator": ", until `corewright hosts continue`", "node": ", until its Ray node is a new one"}
    if roll["phase"] == "waiting":
        doing += waits[roll["wait"]]
    why = f"; {roll['refusal']}" if roll.get("refusal") else ""
    return f"maintenance of {host}: {doing}{why}" + (f"; then {', '.join(rest)}" if rest else "")


def rollout_line(rollout: Mapping[str, Any]) -> str:
    """Returns the state of a rollout and its reason in one line."""
    reason = f": {rollout['reason']}" if rollout.get("reason") else ""
    return f"revision {rollout['revision']}: {rollout['state'].replace('_', ' ')}{reason}"


def rollout_text(rollout: Mapping[str, Any], paint: Paint | None = None) -> str:
    """Returns the line of the rollout, and a row for each model."""
    keys = ("model", "state", "strategy", "wanted", "updated", "ready", "old")
    rows = [tuple(model.get(key) for key in keys) for model in rollout["models"]]
    table = columns(("MODEL", "STATE", "STRATEGY", "WANTED", "UPDATED", "READY", "OLD"), rows, paint)
    return rollout_line(rollout) + ("\n\n" + table if rows else "")


# `describe`


def description(kind: str, item: Mapping[str, Any], events: Sequence[Mapping[str, Any]], log: Mapping[str, Any]) -> str:
    """Returns the values of an item, then its tables, its events, and the end of its log."""
    plain: list[tuple[str, str]] = [("object", kind)]
    parts: list[str] = []
    for key, value in item.items():
        if key == "log":
            continue
        if key == "replicas":
            parts.append(listing("replicas", value) if value else "no replicas")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            parts.append(_table(key, value))
        else:
            plain.append((key.replace("_", " "), _plain(key, value)))
    width = max(len(key) for key, _ in plain)
    parts.insert(0, "\n".join(f"{key.ljust(width)}  {value}" for key, value in plain))
    if events:
        parts.append(listing("events", events))
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
