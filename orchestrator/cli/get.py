"""The command `get`: lists the items of one kind, and follows their changes."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Annotated, Any

import msgspec
import typer

from orchestrator.cli.app import app, bad_parameter
from orchestrator.cli.client import AdminClient, the_fleet, typed
from orchestrator.cli.fleet_names import names_to_get
from orchestrator.cli.follow import coming, latest
from orchestrator.cli.listing import TABLES, RevisionRow, Row, selected
from orchestrator.cli.output import Format, show, stdout
from orchestrator.cli.state_colors import state_paint
from orchestrator.fleet.fleet_status import FleetStatus
from orchestrator.process.failure import Failed
from orchestrator.process.text_table import aligned, cells

LATEST = 20  # events that are shown by default
READ_S = 1.0  # between two readings of the status, without an event
SELECTOR = re.compile(r"([\w.]+)(!=|==?)(.*)")
NEXT = re.compile(r",(?=[\w.]+!?=)")  # a comma within a text has no condition after it


class ObjectKind(str, Enum):
    MODELS = "models"
    REPLICAS = "replicas"
    HOSTS = "hosts"
    REVISIONS = "revisions"
    EVENTS = "events"


class ListFormat(str, Enum):
    TABLE = "table"
    WIDE = "wide"
    NAME = "name"
    JSON = "json"
    YAML = "yaml"


class _RevisionText(RevisionRow, frozen=True):
    """One revision with its spec and its plan."""

    text: str
    file: str
    base_dir: str
    plan: Any


@app.command()
def get(
    kind: Annotated[
        ObjectKind, typer.Argument(metavar="models|replicas|hosts|revisions|events", help="Kind of the items.")
    ],
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Name of one item; for events the name of a model.", autocompletion=names_to_get
        ),
    ] = None,
    selector: Annotated[
        list[str] | None,
        typer.Option(
            "--selector", "-l", metavar="FIELD=TEXT", help="Only items with this field, or FIELD!=TEXT. Repeatable."
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Continue with the items that change, until Ctrl-C.")
    ] = False,
    output: Annotated[
        ListFormat, typer.Option("--output", "-o", help="Output format; wide has more columns.")
    ] = ListFormat.TABLE,
) -> None:
    """List models, replicas, hosts, revisions or events."""
    with bad_parameter("--selector"):
        wanted = [matcher for text in selector or () for matcher in matchers(text)]
    client = the_fleet()
    with bad_parameter("--selector"):
        items = selected(_items(client, kind, name), wanted)
    if not watch:
        _show(kind, items, output, name)
        return
    with contextlib.suppress(KeyboardInterrupt):
        _Printer(kind, items, output).follow(_changes(client, kind, name, wanted, items))


def matchers(text: str) -> list[tuple[str, bool, str]]:
    """Returns the conditions of a selector, which are separated by commas: field, whether equal, text. Raises
    ValueError."""
    return [_matcher(part) for part in NEXT.split(text)]


def _matcher(text: str) -> tuple[str, bool, str]:
    match = SELECTOR.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is neither FIELD=TEXT nor FIELD!=TEXT")
    return match[1], match[2] != "!=", match[3]


def _items(client: AdminClient, kind: ObjectKind, name: str | None) -> list[Any]:
    """Returns the items of a kind, or the one of that name. Raises Failed if there is none."""
    if kind is ObjectKind.EVENTS:
        return list(latest(client, LATEST, name))
    if kind is ObjectKind.REVISIONS:
        if name is not None:
            return [typed(client.get(f"revisions/{_number(name)}"), _RevisionText)]
        return typed(client.get("revisions")["revisions"], list[RevisionRow])
    by_name = items_by_name(client.status(), kind.value)
    if name is None:
        return list(by_name.values())
    if name not in by_name:
        raise not_in_fleet(name, list(by_name))
    return [by_name[name]]


def _number(name: str) -> str:
    if not (name.isascii() and name.isdecimal() and 0 < len(name) < 10):
        raise typer.BadParameter(f"{name!r} is not a revision number", param_hint="NAME")
    return name


def items_by_name(status: FleetStatus, kind: str) -> dict[str, Any]:
    """Returns the models, replicas or hosts of a status by name or id."""
    items: dict[str, Sequence[Any]] = {"models": status.models, "replicas": status.replicas, "hosts": status.hosts}
    return {TABLES[kind].key(item): item for item in items[kind]}


def not_in_fleet(name: str, names: Sequence[str]) -> Failed:
    return Failed("not-in-fleet", f"the fleet has no {name!r}", f"it has {', '.join(names)}" if names else "")


def _show(kind: ObjectKind, items: Sequence[Any], output: ListFormat, name: str | None) -> None:
    table = TABLES[kind.value]
    if output is ListFormat.NAME:
        text = "\n".join(str(table.key(item)) for item in items)
    else:
        text = table.text(items, state_paint(stdout()), wide=output is ListFormat.WIDE)
        if kind is ObjectKind.REVISIONS and name is not None:
            text += "\n\n" + items[0].text
    plain = output not in (ListFormat.JSON, ListFormat.YAML)
    show({kind.value: list(items)}, Format.TABLE if plain else Format(output.value), text)


def _changes(
    client: AdminClient,
    kind: ObjectKind,
    name: str | None,
    wanted: Sequence[tuple[str, bool, str]],
    items: Sequence[Any],
) -> Iterator[Any]:
    """Yields the items again and again: events as they come, the others with each event, or after READ_S."""
    if kind is ObjectKind.EVENTS:
        for event in coming(client, items[-1].seq if items else 0, name):
            with contextlib.suppress(ValueError):
                yield from selected([event], wanted)
        return
    after = next((event.seq for event in latest(client, 1)), 0)
    while True:
        page = client.get_with_retries("events", {"after": after, "limit": 1000, "wait_s": READ_S})
        after = page["next"]
        with contextlib.suppress(ValueError):  # there is no item with that field now
            yield from selected(_items(client, kind, name), wanted)


class _Printer:
    """Prints items, and then only those of which something else is shown than before."""

    def __init__(self, kind: ObjectKind, items: Sequence[Any], output: ListFormat) -> None:
        self._table, self._output = TABLES[kind.value], output
        self._wide = output is ListFormat.WIDE
        self._printed: dict[Any, object] = {}
        header = self._table.header(wide=self._wide)
        lines = [header, *(cells(self._table.row(item, wide=self._wide)) for item in items)]
        self._widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
        if output in (ListFormat.TABLE, ListFormat.WIDE):
            self._print(aligned(header, header, self._widths))
        self.follow(items)

    def follow(self, items: Iterator[Any] | Sequence[Any]) -> None:
        for item in items:
            key, row = self._table.key(item), self._table.row(item, wide=self._wide)
            if self._printed.get(key) != row:
                self._printed[key] = row
                self._item(item, row)

    def _item(self, item: Any, row: Row) -> None:
        if self._output is ListFormat.NAME:
            self._print(str(self._table.key(item)))
        elif self._output is ListFormat.JSON:
            self._print(json.dumps(msgspec.to_builtins(item)))
        elif self._output is ListFormat.YAML:
            show([item], Format.YAML, "")
        else:
            header = self._table.header(wide=self._wide)
            self._print(aligned(header, cells(row), self._widths, state_paint(stdout())))

    def _print(self, line: str) -> None:
        show(None, Format.TABLE, line)
