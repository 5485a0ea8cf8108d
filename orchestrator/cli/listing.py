"""The columns of models, replicas, hosts, revisions and events, for every table of the command line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from operator import attrgetter
from typing import Any, Generic, TypeVar

import msgspec

from orchestrator.console import columns as described
from orchestrator.console.columns import CellFormat, ColumnText
from orchestrator.messages.fleet_status import (
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


_FORMATS: Mapping[CellFormat, Callable[[Any], object]] = {
    "text": lambda value: value.value if isinstance(value, Enum) else value,
    "clock": clock,
    "cores": cores_text,
    "yes_no": lambda value: "yes" if value else "no",
    "ready": lambda model: f"{model.ready}/{model.wanted}",
    "host_state": lambda host: host.state,
    "leases": lambda leases: ", ".join(f"{lease.replica} on {lease.cores}" for lease in leases) or None,
    "cause": _cause,
}


def _column(text: ColumnText) -> Column[Any]:
    paths = [path.split(".") if path else [] for path in text.field.split("|")]

    def value(item: Any) -> object:
        values = (reduce(lambda part, name: getattr(part, name, None), path, item) for path in paths)
        return _FORMATS[text.format](next((each for each in values if each is not None), None))

    return Column(text.title.upper(), value, text.wide)


def _table(key: str, texts: Iterable[ColumnText]) -> Table[Any]:
    return Table(attrgetter(key), tuple(map(_column, texts)))


MODELS: Table[ModelInFleet] = _table("name", described.MODELS)
REPLICAS: Table[ReplicaInFleet] = _table("id", described.REPLICAS)
HOSTS: Table[HostInFleet] = _table("name", described.HOSTS)
REVISIONS: Table[RevisionRow] = _table("revision", described.REVISIONS)
EVENTS: Table[EventRow] = _table("seq", described.EVENTS)
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
