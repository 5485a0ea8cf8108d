"""The command `get`: lists the items of one kind, and follows their changes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from itertools import chain
from typing import Annotated, Any

import typer

from orchestrator.cli.app import app, argument, bad_parameter, names_of, option, switch
from orchestrator.cli.client import AdminClient, the_fleet, typed
from orchestrator.cli.follow import coming, latest
from orchestrator.cli.listing import TABLES, Row, Table, items_by_name, selected
from orchestrator.cli.output import show, show_next, state_paint, stdout
from orchestrator.messages.fleet_status import RevisionRow, RevisionText
from orchestrator.process.failure import Failed
from orchestrator.process.text_table import aligned, cells

LATEST = 20  # events that are shown by default
READ_S = 1.0  # between two readings of the status, without an event
SELECTOR = re.compile(r"([\w.]+)(!=|==?)(.*)")
NAMED_KINDS = ("models", "replicas", "hosts", "events")  # those whose names a shell completes
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


@app.command()
def get(
    kind: Annotated[ObjectKind, argument("models|replicas|hosts|revisions|events", "Kind of the items.")],
    name: Annotated[
        str | None, argument("NAME", "Name of one item; for events the name of a model.", autocompletion=_names_to_get)
    ] = None,
    selector: Annotated[
        list[str] | None,
        option("FIELD=TEXT", "Only items with this field, or FIELD!=TEXT. Repeatable.", "--selector", "-l"),
    ] = None,
    watch: Annotated[bool, switch("--watch", "Continue with the items that change, until Ctrl-C.", "-w")] = False,
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
    table = TABLES[kind.value]
    if watch:
        with contextlib.suppress(KeyboardInterrupt):
            follow_items(table, items, _changes(client, kind, name, wanted, items), output)
        return
    if output is ListFormat.NAME:
        text = "\n".join(str(table.key(item)) for item in items)
    else:
        text = table.text(items, state_paint(stdout()), wide=output is ListFormat.WIDE)
        if kind is ObjectKind.REVISIONS and name is not None:
            text += "\n\n" + items[0].text
    show({kind.value: items}, output, text)


def _names_to_get(context: typer.Context) -> list[str]:
    """Returns the names that `get KIND` takes."""
    kind = context.params.get("kind")
    kind = str(kind.value if isinstance(kind, Enum) else kind)
    return names_of(*({"events": "models"}.get(kind, kind),) if kind in NAMED_KINDS else ())()


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
            return [client.read(RevisionText, f"revisions/{_number(name)}")]
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


def not_in_fleet(name: str, names: Sequence[str]) -> Failed:
    return Failed("not-in-fleet", f"the fleet has no {name!r}", f"it has {', '.join(names)}" if names else "")


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


def follow_items(table: Table[Any], items: Sequence[Any], changes: Iterable[Any], output: ListFormat) -> None:
    """Prints the items, and then only those of which something else is shown than before."""
    wide = output is ListFormat.WIDE
    header = table.header(wide=wide)
    lines = [cells(row) for row in (header, *(table.row(item, wide=wide) for item in items))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if output in (ListFormat.TABLE, ListFormat.WIDE):
        show(None, output, aligned(header, header, widths))
    printed: dict[Any, Row] = {}
    for item in chain(items, changes):
        key, row = table.key(item), table.row(item, wide=wide)
        if printed.get(key) != row:
            printed[key] = row
            line = aligned(header, cells(row), widths, state_paint(stdout()))
            show_next(item, output, str(key) if output is ListFormat.NAME else line)
