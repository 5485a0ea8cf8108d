"""The columns of models, replicas, hosts, revisions and events, for the tables of the console and of the commands."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

CellFormat = Literal["text", "clock", "cores", "yes_no", "ready", "host_state", "leases", "cause"]
"""How a cell is made of the value: as it is, or by the function of that name in `cli/listing.py` and `columns.js`."""


class ColumnText(msgspec.Struct, frozen=True):
    """One column of a kind of objects."""

    title: str
    field: str  # a path in the object's JSON; "a|b": the first that has a value; "": the object
    format: CellFormat = "text"
    wide: bool = False  # only in `-o wide`
    number: bool = False  # the console aligns it to the right
    page: bool = True  # whether the console shows it


MODELS = (
    ColumnText("Model", "name"),
    ColumnText("State", "state"),
    ColumnText("Ready", "", "ready"),
    ColumnText("Version", "version", page=False),  # it has that of each replica
    ColumnText("Reason", "reason", page=False),  # the console shows it below the state
    ColumnText("Kind", "kind", wide=True, page=False),
    ColumnText("Arrivals/s", "scaling.demand.arrivals_per_s", wide=True, number=True),
    ColumnText("Waiting", "scaling.demand.waiting", wide=True, number=True),
    ColumnText("Live", "scaling.demand.live", wide=True, number=True),
    ColumnText("Why", "scaling.why", wide=True, page=False),
)
REPLICAS = (
    ColumnText("Replica", "id"),
    ColumnText("State", "state"),
    ColumnText("Cores", "cores"),
    ColumnText("Host", "host"),
    ColumnText("PID", "pid", number=True),
    ColumnText("Restarts", "restarts", number=True),
    ColumnText("Version", "version"),
    ColumnText("Live", "live", number=True),
    ColumnText("Waiting", "waiting", number=True),
    ColumnText("Engine", "engine", wide=True, page=False),
    ColumnText("Epoch", "epoch", wide=True, page=False),  # the console shows both in one cell, with the phases
    ColumnText("Load_s", "load_s", wide=True, page=False),
    ColumnText("Compile_s", "compile_s", wide=True, page=False),
    ColumnText("Log", "log_file", wide=True, page=False),
    ColumnText("Reason", "reason", wide=True, page=False),
)
HOSTS = (
    ColumnText("Host", "name"),
    ColumnText("State", "", "host_state"),
    ColumnText("Cores", "cores"),
    ColumnText("Leased", "leased"),
    ColumnText("Free", "free"),
    ColumnText("Cordoned", "free_cordoned"),
    ColumnText("Quarantined", "quarantined"),
    ColumnText("Reserved", "reserved"),
    ColumnText("Cordon", "cordoned", "cores"),
    ColumnText("Instance", "instance", wide=True),
    ColumnText("Emulated", "emulated", "yes_no", wide=True),
    ColumnText("Replicas", "leases", "leases", wide=True),
)
REVISIONS = (
    ColumnText("Revision", "revision"),
    ColumnText("At", "at", "clock"),
    ColumnText("By", "by"),
    ColumnText("Cause", "", "cause"),
    ColumnText("State", "state"),
    ColumnText("Changes", "changes"),
)
EVENTS = (
    ColumnText("Seq", "seq", page=False),
    ColumnText("At", "at", "clock", number=True),
    ColumnText("Level", "level"),
    ColumnText("Reason", "reason"),
    ColumnText("About", "replica|model|host"),
    ColumnText("Message", "message"),
)
PAGE_TABLES: Mapping[str, tuple[ColumnText, ...]] = MappingProxyType(
    {
        name: tuple(column for column in columns if column.page)
        for name, columns in (("models", MODELS), ("replicas", REPLICAS), ("events", EVENTS))
    }
)
