"""The state of the fleet as tables. Keys that a fleet of another version does not send show as `-`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from orchestrator.fleet.progress_text import fetch_text, hold_text
from orchestrator.process.text_table import columns

Row = tuple[object, ...]
TIMES = ("at", "since", "until")
EVENT_WIDTHS = (6, 19, 7, 18, 16)


def clock(seconds: float | None) -> str | None:
    """Returns a wall-clock time in the local time zone."""
    return None if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def cores_text(cores: Any) -> str | None:
    """ "all", or a list of ranges: 0-3,8. None for none."""
    return ",".join(map(str, cores)) or None if isinstance(cores, list) else cores or None


# `get`


def _model_row(model: Mapping[str, Any]) -> Row:
    ready = sum(replica["state"] == "ready" for replica in model["replicas"])
    return model["name"], model["state"], f"{ready}/{model['wanted']}", model.get("version"), model["reason"]


def _replica_row(replica: Mapping[str, Any]) -> Row:
    plain = ("id", "state", "cores", "host", "pid", "restarts", "version", "live", "waiting")
    return tuple(replica.get(key) for key in plain)


def _host_row(host: Mapping[str, Any]) -> Row:
    free_cordoned = host.get("free_cordoned")  # None from older fleets, which count them as free
    counts = (*(host[key] for key in ("cores", "leased", "free")), free_cordoned, host["quarantined"], host["reserved"])
    state = "lost" if host.get("lost") else "starting" if host.get("starting") else "ready"
    return (host["name"], state, *counts, cores_text(host.get("cordoned")))


def _revision_row(revision: Mapping[str, Any]) -> Row:
    of = revision.get("of")
    cause = revision["cause"] if of is None else f"{revision['cause']} of {of}"
    changes = revision.get("changes")
    changes = len(changes) if isinstance(changes, list) else changes
    return revision["revision"], clock(revision["at"]), revision["by"], cause, revision["state"], changes


def _event_row(event: Mapping[str, Any]) -> Row:
    about = event.get("replica") or event.get("model") or event.get("host")
    return event["seq"], clock(event["at"]), event["level"], event["reason"], about, event["message"]


REPLICA = ("REPLICA", "STATE", "CORES", "HOST", "PID", "RESTARTS", "VERSION", "LIVE", "WAITING")
HOST = ("HOST", "STATE", "CORES", "LEASED", "FREE", "CORDONED", "QUARANTINED", "RESERVED", "CORDON")
NUMBERS = ("MODEL", "READY", "WANTED", "ARRIVALS/S", "WAITING", "LIVE", "WHY")
EVENT = ("SEQ", "AT", "LEVEL", "REASON", "ABOUT", "MESSAGE")
KINDS: Mapping[str, tuple[Sequence[str], Callable[[Mapping[str, Any]], Row]]] = {
    "models": (("MODEL", "STATE", "READY", "VERSION", "REASON"), _model_row),
    "replicas": (REPLICA, _replica_row),
    "hosts": (HOST, _host_row),
    "revisions": (("REVISION", "AT", "BY", "CAUSE", "STATE", "CHANGES"), _revision_row),
    "events": (EVENT, _event_row),
}


def listing(kind: str, items: Iterable[Mapping[str, Any]]) -> str:
    """Returns the table of `get`."""
    header, row = KINDS[kind]
    return columns(header, [row(item) for item in items])


def event_line(event: Mapping[str, Any] | None) -> str:
    """Returns one line of followed events; for None the header."""
    cells = ["-" if cell is None else str(cell) for cell in (EVENT if event is None else _event_row(event))]
    return "  ".join([cell.ljust(width) for cell, width in zip(cells, EVENT_WIDTHS, strict=False)] + cells[-1:])


# `status`, `rollout status`


def status_text(data: Mapping[str, Any]) -> str:
    """Returns replicas, models and hosts, with notes on problems and on work in progress."""
    rows: list[Row] = []
    notes: list[str] = []
    for model in data["models"]:
        for replica in model["replicas"]:
            rows.append(_replica_row(replica)[:6])
            if replica.get("fetch"):
                notes.append(f"{replica['id']}: {fetch_text(replica['fetch'])}")
            if replica["reason"]:
                notes += _replica_notes(replica)
        for preparation in model.get("preparing") or ():
            notes += _preparing_notes(model, preparation, data["hosts"])
        if not model["replicas"]:
            rows.append((model["name"], model["state"], None, None, None, None))
            if model["reason"]:
                notes.append(f"{model['name']}: {model['reason']}")
    hosts = [(row[0], *row[2:7]) for row in map(_host_row, data["hosts"])]
    host_notes = [note for host in data["hosts"] for note in _host_notes(host)]
    parts = [
        hold_text(data),
        columns(REPLICA[:6], rows),
        columns(NUMBERS, [_numbers_row(model) for model in data["models"]]),
        columns((HOST[0], *HOST[2:7]), hosts),
        "\n".join([*notes, *_maintenance(data), *_versions(data), *_gateways(data), *host_notes]),
    ]
    rollout = data.get("rollout")
    if rollout and rollout["state"] != "complete":
        parts.append(rollout_line(rollout))
    return "\n\n".join(part for part in parts if part)


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


def rollout_text(rollout: Mapping[str, Any]) -> str:
    """Returns the line of the rollout, and a row for each model."""
    keys = ("model", "state", "strategy", "wanted", "updated", "ready", "old")
    rows = [tuple(model.get(key) for key in keys) for model in rollout["models"]]
    table = columns(("MODEL", "STATE", "STRATEGY", "WANTED", "UPDATED", "READY", "OLD"), rows)
    return rollout_line(rollout) + ("\n\n" + table if rows else "")


# `describe`


def description(kind: str, item: Mapping[str, Any], events: Sequence[Mapping[str, Any]], log: Mapping[str, Any]) -> str:
    """Returns the values of an item, then its tables, its events, and the end of its log."""
    plain: list[tuple[str, str]] = [("kind", kind)]
    parts: list[str] = []
    for key, value in item.items():
        if key == "log":
            continue
        if key == "replicas":
            parts.append(listing("replicas", value) if value else "no replicas")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            parts.append(_table(key, value))
        else:
            name = "kind of model" if key == "kind" else key.replace("_", " ")  # the first kind is that of the item
            plain.append((name, _plain(key, value)))
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
