"""The rows of models, replicas, hosts, revisions and events. Keys that an older fleet does not send show as `-`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.process.text_table import Paint, columns

Row = tuple[object, ...]
Item = Mapping[str, Any]


def clock(seconds: float | None) -> str | None:
    """Returns a wall-clock time in the local time zone."""
    return None if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def cores_text(cores: Any) -> str | None:
    """ "all", or a list of ranges: 0-3,8. None for none."""
    return ",".join(map(str, cores)) or None if isinstance(cores, list) else cores or None


def _model_row(model: Item) -> Row:
    ready = sum(replica["state"] == "ready" for replica in model["replicas"])
    return model["name"], model["state"], f"{ready}/{model['wanted']}", model.get("version"), model["reason"]


def _wide_model_row(model: Item) -> Row:
    scaling = model.get("scaling") or {}
    demand = scaling.get("demand") or {}
    return model.get("kind"), *(demand.get(key) for key in ("arrivals_per_s", "waiting", "live")), scaling.get("why")


def replica_row(replica: Item) -> Row:
    plain = ("id", "state", "cores", "host", "pid", "restarts", "version", "live", "waiting")
    return tuple(replica.get(key) for key in plain)


def _wide_replica_row(replica: Item) -> Row:
    return tuple(replica.get(key) for key in ("engine", "epoch", "load_s", "compile_s", "log_file", "reason"))


def host_row(host: Item) -> Row:
    free_cordoned = host.get("free_cordoned")  # None from older fleets, which count them as free
    counts = (*(host[key] for key in ("cores", "leased", "free")), free_cordoned, host["quarantined"], host["reserved"])
    state = "lost" if host.get("lost") else "starting" if host.get("starting") else "ready"
    return (host["name"], state, *counts, cores_text(host.get("cordoned")))


def _wide_host_row(host: Item) -> Row:
    leases = ", ".join(f"{lease['replica']} on {lease['cores']}" for lease in host.get("leases") or ())
    return host.get("instance"), "yes" if host.get("emulated") else "no", leases or None


def _revision_row(revision: Item) -> Row:
    of = revision.get("of")
    cause = revision["cause"] if of is None else f"{revision['cause']} of {of}"
    changes = revision.get("changes")
    changes = len(changes) if isinstance(changes, list) else changes
    return revision["revision"], clock(revision["at"]), revision["by"], cause, revision["state"], changes


def event_row(event: Item) -> Row:
    about = event.get("replica") or event.get("model") or event.get("host")
    return event["seq"], clock(event["at"]), event["level"], event["reason"], about, event["message"]


def _nothing(item: Item) -> Row:
    return ()


@dataclass(frozen=True)
class Kind:
    """One kind of items: the key of their name, their columns, and the further columns of `-o wide`."""

    key: str
    header: tuple[str, ...]
    row: Callable[[Item], Row]
    wide_header: tuple[str, ...] = ()
    wide_row: Callable[[Item], Row] = _nothing

    def columns(self, wide: bool) -> tuple[str, ...]:
        return self.header + (self.wide_header if wide else ())

    def cells(self, item: Item, wide: bool) -> Row:
        return (*self.row(item), *(self.wide_row(item) if wide else ()))


REPLICA = ("REPLICA", "STATE", "CORES", "HOST", "PID", "RESTARTS", "VERSION", "LIVE", "WAITING")
HOST = ("HOST", "STATE", "CORES", "LEASED", "FREE", "CORDONED", "QUARANTINED", "RESERVED", "CORDON")
EVENT = ("SEQ", "AT", "LEVEL", "REASON", "ABOUT", "MESSAGE")
KINDS: Mapping[str, Kind] = {
    "models": Kind(
        "name",
        ("MODEL", "STATE", "READY", "VERSION", "REASON"),
        _model_row,
        ("KIND", "ARRIVALS/S", "WAITING", "LIVE", "WHY"),
        _wide_model_row,
    ),
    "replicas": Kind(
        "id", REPLICA, replica_row, ("ENGINE", "EPOCH", "LOAD_S", "COMPILE_S", "LOG", "REASON"), _wide_replica_row
    ),
    "hosts": Kind("name", HOST, host_row, ("INSTANCE", "EMULATED", "REPLICAS"), _wide_host_row),
    "revisions": Kind("revision", ("REVISION", "AT", "BY", "CAUSE", "STATE", "CHANGES"), _revision_row),
    "events": Kind("seq", EVENT, event_row),
}


def listing(kind: str, items: Iterable[Item], paint: Paint | None = None, *, wide: bool = False) -> str:
    """Returns the table of `get`."""
    shown = KINDS[kind]
    return columns(shown.columns(wide), [shown.cells(item, wide) for item in items], paint)


def selected(items: Iterable[Item], selector: Sequence[tuple[str, bool, str]]) -> list[Item]:
    """Returns the items whose fields match: each of ``selector`` is a field, whether it must be equal, and the text.

    Raises ValueError for a field that no item has.
    """
    every = list(items)
    fields = [_fields(item) for item in every]
    known = sorted({name for own in fields for name in own})
    for name, _, _ in selector:
        if every and name not in known:
            raise ValueError(f"no item has a field {name!r}; they have {', '.join(known)}")
    matches = (all((own.get(name, "") == text) == equal for name, equal, text in selector) for own in fields)
    return [item for item, matched in zip(every, matches, strict=True) if matched]


def _fields(item: Item) -> dict[str, str]:
    """Returns the plain fields of an item as text; those of a replica include its model."""
    model = {"model": item["id"].rpartition("/")[0]} if "id" in item else {}
    return model | {key: _text(value) for key, value in item.items() if not isinstance(value, (dict, list))}


def _text(value: object) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
