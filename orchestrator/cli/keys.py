"""Commands about who may do what, and who did: keys create, keys list, keys revoke, audit. They need no fleet."""

from __future__ import annotations

import contextlib
import time
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.app import FormatOption, app, group
from orchestrator.cli.output import Format, columns, say, show

if TYPE_CHECKING:
    from orchestrator.audit import AuditEntry
    from orchestrator.keys import ApiKey

keys = group("keys", "The API keys of this home. A running fleet takes notice within a second.")

LATEST = 20  # actions that are shown unless more are asked for


class ScopeName(str, Enum):
    INFERENCE = "inference"
    ADMIN = "admin"


@keys.command("create")
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is; shown in lists and logs.")],
    scope: Annotated[
        list[ScopeName] | None,
        typer.Option(help="inference: ask models. admin: change the fleet. Repeatable.", show_default="inference"),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(metavar="M", help="Ask only this model. Repeatable.", show_default="all")
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="WHEN", help="30d, 12h, or a date; default never.", show_default=False)
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Make a key. Its text is printed once, and kept nowhere."""
    from orchestrator.audit import Audit, caller, recorded
    from orchestrator.home import Home
    from orchestrator.keys import SCOPES, KeyFile, read_expiry

    home = Home.from_environment()
    now = time.time()
    ends = None if expires is None else read_expiry(expires, now)
    asked = {one.value for one in scope or (ScopeName.INFERENCE,)}
    scopes = tuple(one for one in SCOPES if one in asked)
    models = tuple(model or ())
    home.prepare()
    told = {"name": name, "scopes": scopes, "models": models, "expires": ends}
    with recorded(Audit(home.audit), "command", "keys create", told, by=caller()):
        key, text = KeyFile(home.keys).create(name, scopes=scopes, models=models, expires=ends, now=now)
    if output is Format.TABLE:
        say(f"{key.name}: {_may(key)}, {_until(key)}. It is not shown again:")
    show({**_as_dict(key), "key": text}, output, text)


@keys.command("list")
def list_keys(output: FormatOption = Format.TABLE) -> None:
    """Show the keys, without their secrets."""
    from orchestrator.home import Home
    from orchestrator.keys import KeyFile

    found = KeyFile(Home.from_environment().keys).read().keys
    now = time.time()
    rows = [
        (
            key.id,
            key.name,
            ",".join(key.scopes),
            ",".join(key.models) or "all",
            _time(key.created),
            "never" if key.expires is None else _time(key.expires) + (" (expired)" if key.expired(now) else ""),
        )
        for key in found
    ]
    table = columns(("ID", "NAME", "SCOPES", "MODELS", "CREATED", "EXPIRES"), rows) if rows else "no keys"
    show({"keys": [_as_dict(key) for key in found]}, output, table)


@keys.command("revoke")
def revoke(
    key: Annotated[str, typer.Argument(metavar="ID|NAME", help="As `keys list` shows it.")],
    output: FormatOption = Format.TABLE,
) -> None:
    """Take a key away. What it has begun may end."""
    from orchestrator.audit import Audit, caller, recorded
    from orchestrator.home import Home
    from orchestrator.keys import KeyFile, shown

    home = Home.from_environment()
    with contextlib.ExitStack() as stack:
        if home.path.is_dir():  # else there is no key either, and nothing to write down
            told = {"key": shown(key)}
            stack.enter_context(recorded(Audit(home.audit), "command", "keys revoke", told, by=caller()))
        gone = KeyFile(home.keys).revoke(key)
    show({"id": gone.id, "name": gone.name}, output, f"{gone.name} ({gone.id}): revoked")


@app.command()
def audit(
    count: Annotated[
        int, typer.Option("-n", min=1, max=100_000, metavar="N", help="So many of the last actions.")
    ] = LATEST,
    output: FormatOption = Format.TABLE,
) -> None:
    """Tell who changed what, and what came of it. Needs no fleet."""
    from orchestrator.audit import Audit
    from orchestrator.home import Home

    found = Audit(Home.from_environment().audit).entries(count)
    rows = [(_time(e.at), e.who, e.by or None, e.action, e.status, e.revision, _arguments(e)) for e in found]
    header = ("TIME", "WHO", "BY", "ACTION", "OUTCOME", "REVISION", "ARGUMENTS")
    data = [
        {
            "at": entry.at,
            "who": entry.who,
            "by": entry.by,
            "action": entry.action,
            "arguments": entry.arguments,
            "status": entry.status,
            "revision": entry.revision,
        }
        for entry in found
    ]
    show({"actions": data}, output, columns(header, rows) if rows else "nothing yet")


def _arguments(entry: AuditEntry) -> str:
    """In one line; what could paint the terminal is escaped."""
    return " ".join(f"{name}={value!r}" for name, value in entry.arguments.items())


def _as_dict(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.id,
        "name": key.name,
        "scopes": list(key.scopes),
        "models": list(key.models),
        "created": key.created,
        "expires": key.expires,
    }


def _may(key: ApiKey) -> str:
    return f"{' and '.join(key.scopes)}, {', '.join(key.models) if key.models else 'all models'}"


def _until(key: ApiKey) -> str:
    return "without end" if key.expires is None else f"until {_time(key.expires)}"


def _time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
