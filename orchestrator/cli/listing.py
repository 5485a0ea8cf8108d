"""The columns of models, replicas, hosts, revisions and events, for every table of the command line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from orchestrator.fleet.fleet_status import (
    EventRow,
    FleetStatus,
    HostInFleet,
    ModelInFleet,
    ReplicaInFleet,
    RevisionRow,
)
from orchestrator.process.text_table import Paint, columns

T = TypeVar("T")
Row = tuple[object, ...]


@dataclass(frozen=True)
class Column(Generic[T]):
    """One column: its title, and its value of an item. ``wide``: only of `-o wide`."""

    title: str
    value: Callable[[T], object]
    wide: bool = False


@dataclass(frozen=True)
class Table(Generic[T]):
    """The columns of one kind of items; ``key`` names an item."""

    key: Callable[[T], Any]
    columns: tuple[Column[T], ...]

    def shown(self, wide: bool) -> tuple[Column[T], ...]:
        """Returns the columns of `get`, or those of `get -o wide`."""
        return tuple(column for column in self.columns if wide or not column.wide)

    def first(self, count: int) -> Table[T]:
        """Returns the table with its first columns."""
        return Table(self.key, self.columns[:count])

    def header(self, *, wide: bool = False) -> tuple[str, ...]:
        """Returns the titles."""
        return tuple(column.title for column in self.shown(wide))

    def row(self, item: T, *, wide: bool = False) -> Row:
        """Returns the values of an item."""
        return tuple(column.value(item) for column in self.shown(wide))

    def text(self, items: Iterable[T], paint: Paint | None = None, *, wide: bool = False) -> str:
        """Returns the items as text."""
        return columns(self.header(wide=wide), [self.row(item, wide=wide) for item in items], paint)


def clock(seconds: float | None) -> str | None:
    """Returns a wall-clock time in the local time zone."""
    return None if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def cores_text(cores: str | Sequence[object]) -> str | None:
    """Returns "all", or ranges: 0-3,8. None for none."""
    return (cores if isinstance(cores, str) else ",".join(map(str, cores))) or None


def arrivals_per_s(model: ModelInFleet) -> float | None:
    """Returns the requests per second for a model; None if it is unknown."""
    return None if model.scaling.demand is None else model.scaling.demand.arrivals_per_s


def waiting(model: ModelInFleet) -> int | None:
    """Returns the waiting requests for a model; None if they are unknown."""
    return None if model.scaling.demand is None else model.scaling.demand.waiting


def live(model: ModelInFleet) -> int | None:
    """Returns the requests for a model in slots; None if they are unknown."""
    return None if model.scaling.demand is None else model.scaling.demand.live


def _cause(revision: RevisionRow) -> str:
    back = {"undo": "back to", "rollback": "rolled back to"}
    return revision.cause if revision.of is None else f"{back.get(revision.cause, revision.cause)} {revision.of}"


def _leases(host: HostInFleet) -> str | None:
    return ", ".join(f"{lease.replica} on {lease.cores}" for lease in host.leases) or None


MODELS: Table[ModelInFleet] = Table(
    lambda model: model.name,
    (
        Column("MODEL", lambda model: model.name),
        Column("STATE", lambda model: model.state.value),
        Column("READY", lambda model: f"{model.ready}/{model.wanted}"),
        Column("VERSION", lambda model: model.version),
        Column("REASON", lambda model: model.reason),
        Column("KIND", lambda model: model.kind, wide=True),
        Column("ARRIVALS/S", arrivals_per_s, wide=True),
        Column("WAITING", waiting, wide=True),
        Column("LIVE", live, wide=True),
        Column("WHY", lambda model: model.scaling.why, wide=True),
    ),
)
REPLICAS: Table[ReplicaInFleet] = Table(
    lambda replica: replica.id,
    (
        Column("REPLICA", lambda replica: replica.id),
        Column("STATE", lambda replica: replica.state.value),
        Column("CORES", lambda replica: replica.cores),
        Column("HOST", lambda replica: replica.host),
        Column("PID", lambda replica: replica.pid),
        Column("RESTARTS", lambda replica: replica.restarts),
        Column("VERSION", lambda replica: replica.version),
        Column("LIVE", lambda replica: replica.live),
        Column("WAITING", lambda replica: replica.waiting),
        Column("ENGINE", lambda replica: replica.engine, wide=True),
        Column("EPOCH", lambda replica: replica.epoch, wide=True),
        Column("LOAD_S", lambda replica: replica.load_s, wide=True),
        Column("COMPILE_S", lambda replica: replica.compile_s, wide=True),
        Column("LOG", lambda replica: replica.log_file, wide=True),
        Column("REASON", lambda replica: replica.reason, wide=True),
    ),
)
HOSTS: Table[HostInFleet] = Table(
    lambda host: host.name,
    (
        Column("HOST", lambda host: host.name),
        Column("STATE", lambda host: host.state),
        Column("CORES", lambda host: host.cores),
        Column("LEASED", lambda host: host.leased),
        Column("FREE", lambda host: host.free),
        Column("CORDONED", lambda host: host.free_cordoned),
        Column("QUARANTINED", lambda host: host.quarantined),
        Column("RESERVED", lambda host: host.reserved),
        Column("CORDON", lambda host: cores_text(host.cordoned)),
        Column("INSTANCE", lambda host: host.instance, wide=True),
        Column("EMULATED", lambda host: "yes" if host.emulated else "no", wide=True),
        Column("REPLICAS", _leases, wide=True),
    ),
)
REVISIONS: Table[RevisionRow] = Table(
    lambda revision: revision.revision,
    (
        Column("REVISION", lambda revision: revision.revision),
        Column("AT", lambda revision: clock(revision.at)),
        Column("BY", lambda revision: revision.by),
        Column("CAUSE", _cause),
        Column("STATE", lambda revision: revision.state),
        Column("CHANGES", lambda revision: revision.changes),
    ),
)
EVENTS: Table[EventRow] = Table(
    lambda event: event.seq,
    (
        Column("SEQ", lambda event: event.seq),
        Column("AT", lambda event: clock(event.at)),
        Column("LEVEL", lambda event: event.level),
        Column("REASON", lambda event: event.reason),
        Column("ABOUT", lambda event: event.replica or event.model or event.host),
        Column("MESSAGE", lambda event: event.message),
    ),
)
TABLES: Mapping[str, Table[Any]] = {
    "models": MODELS,
    "replicas": REPLICAS,
    "hosts": HOSTS,
    "revisions": REVISIONS,
    "events": EVENTS,
}


def items_by_name(status: FleetStatus, kind: str) -> dict[str, Any]:
    """Returns the models, replicas or hosts of a status by name or id."""
    items: dict[str, Sequence[Any]] = {"models": status.models, "replicas": status.replicas, "hosts": status.hosts}
    return {TABLES[kind].key(item): item for item in items[kind]}


def selected(items: Iterable[T], selector: Sequence[tuple[str, bool, str]]) -> list[T]:
    """Returns the items whose fields match: each of ``selector`` is a field, whether it must be equal, and the text.

    Raises ValueError for a field that no item has.
    """
    every = list(items)
    fields = [_fields(msgspec.to_builtins(item)) for item in every]
    known = sorted({name for own in fields for name in own})
    for name, _, _ in selector:
        if every and name not in known:
            raise ValueError(f"no item has a field {name!r}; they have {', '.join(known)}")
    matches = (all((own.get(name, "") == text) == equal for name, equal, text in selector) for own in fields)
    return [item for item, matched in zip(every, matches, strict=True) if matched]


def _fields(item: Mapping[str, Any]) -> dict[str, str]:
    """Returns the plain fields of an item as text; those of a replica include its model."""
    model = {"model": item["id"].rpartition("/")[0]} if "id" in item else {}
    return model | {key: _text(value) for key, value in item.items() if not isinstance(value, (dict, list))}


def _text(value: object) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
