"""Commands for API keys and the audit log: `keys` and `audit`. They need no fleet."""

from __future__ import annotations

import contextlib
import time
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.app import FormatOption, YesOption, app, group
from orchestrator.cli.output import Format, confirmed, say, show
from orchestrator.process.failure import Failed
from orchestrator.process.text_table import columns

if TYPE_CHECKING:
    from orchestrator.access.audit_log import AuditEntry
    from orchestrator.access.keys import ApiKey, KeyRing
    from orchestrator.process.home import Home

keys = group("keys", "The API keys of this home. A running fleet takes notice within a second.")

ALLOWED = ("WEIGHT", "PRIORITY", "REQ/MIN", "TOK/MIN", "AT ONCE")
LATEST = 20  # actions that are shown unless more are asked for

WeightOption = Annotated[
    float | None,
    typer.Option(metavar="W", help="Its share where several keys wait; a new key has 1.", show_default=False),
]
PriorityOption = Annotated[
    int | None,
    typer.Option(
        metavar="P", help="The best that its requests may have; lower goes first; a new key has 0.", show_default=False
    ),
]
RequestsOption = Annotated[
    str | None, typer.Option(metavar="N|none", help="At most so many requests a minute.", show_default=False)
]
TokensOption = Annotated[
    str | None,
    typer.Option(metavar="N|none", help="At most so many tokens a minute, prompts and answers.", show_default=False),
]
ConcurrentOption = Annotated[
    str | None, typer.Option(metavar="N|none", help="At most so many requests at a time.", show_default=False)
]


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
    weight: WeightOption = None,
    priority: PriorityOption = None,
    requests_per_minute: RequestsOption = None,
    tokens_per_minute: TokensOption = None,
    max_concurrent: ConcurrentOption = None,
    activate_at: Annotated[
        str | None,
        typer.Option(
            metavar="WHEN",
            help="With the first key: demand keys from then on, such as 30m or a time.",
            show_default="at once",
        ),
    ] = None,
    yes: YesOption = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Create a key, and print its text once. From the first key on, every request needs one."""
    from orchestrator.access.audit_log import Audit, caller, recorded
    from orchestrator.access.keys import SCOPES, Allowance, KeyFile, read_expiry
    from orchestrator.process.home import Home

    home = Home.from_environment()
    now = time.time()
    ends = None if expires is None else read_expiry(expires, now)
    starts = None if activate_at is None else read_expiry(activate_at, now, "--activate-at")
    asked = {one.value for one in scope or (ScopeName.INFERENCE,)}
    scopes = tuple(one for one in SCOPES if one in asked)
    models = tuple(model or ())
    limits = _limits(weight, priority, requests_per_minute, tokens_per_minute, max_concurrent)
    allowance = Allowance(**limits)
    home.prepare()
    file = KeyFile(home.keys)
    if starts is None and file.read().keyless_until is None:
        _confirm_closing(home, file.read(), now, yes, "--activate-at 30m leaves clients time to get their keys")
    told = {"name": name, "scopes": scopes, "models": models, "expires": ends, "activate_at": starts, **_told(limits)}
    with recorded(Audit(home.audit), "command", "keys create", told, by=caller()):
        key, text = file.create(
            name, scopes=scopes, models=models, expires=ends, allowance=allowance, activate_at=starts, now=now
        )
    ring = file.read()
    if not ring.requires_key(now):
        say(access(ring, now))
    if output is Format.TABLE:
        say(f"{key.name}: {_may(key)}, {_until(key)}. It is not shown again:")
    show({**_as_dict(key), "key": text}, output, text)


@keys.command("set")
def change(
    key: Annotated[str, typer.Argument(metavar="ID|NAME", help="As `keys list` shows it.")],
    weight: WeightOption = None,
    priority: PriorityOption = None,
    requests_per_minute: RequestsOption = None,
    tokens_per_minute: TokensOption = None,
    max_concurrent: ConcurrentOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Give a key another weight or other limits. What is not named stays."""
    from orchestrator.access.audit_log import Audit, caller, recorded
    from orchestrator.access.keys import KeyFile, shown
    from orchestrator.process.home import Home

    limits = _limits(weight, priority, requests_per_minute, tokens_per_minute, max_concurrent)
    if not limits:
        raise typer.BadParameter("are what can be set; none is given", param_hint="a weight and limits")
    home = Home.from_environment()
    with contextlib.ExitStack() as stack:
        if home.path.is_dir():  # else there is no key either, and nothing to write down
            told = {"key": shown(key), **_told(limits)}
            stack.enter_context(recorded(Audit(home.audit), "command", "keys set", told, by=caller()))
        changed = KeyFile(home.keys).change(key, **limits)
    told_of = f"weight {changed.weight:g}, priority {changed.priority}, {_limited(changed)}"
    show(_as_dict(changed), output, f"{changed.name} ({changed.id}): {told_of}")


@keys.command("list")
def list_keys(output: FormatOption = Format.TABLE) -> None:
    """Show the keys, without their secrets."""
    from orchestrator.access.keys import KeyFile
    from orchestrator.process.home import Home

    ring = KeyFile(Home.from_environment().keys).read()
    now = time.time()
    rows = [
        (
            key.id,
            key.name,
            ",".join(key.scopes),
            ",".join(key.models) or "all",
            f"{key.weight:g}",
            key.priority,
            key.requests_per_minute,
            key.tokens_per_minute,
            key.max_concurrent,
            _time(key.created),
            "never" if key.expires is None else _time(key.expires) + (" (expired)" if key.expired(now) else ""),
        )
        for key in ring.keys
    ]
    table = columns(("ID", "NAME", "SCOPES", "MODELS", *ALLOWED, "CREATED", "EXPIRES"), rows) if rows else "no keys"
    listed = [_as_dict(key) for key in ring.keys]
    shown = {"demanded": ring.requires_key(now), "keyless_until": ring.keyless_until, "keys": listed}
    show(shown, output, table)
    if output is Format.TABLE and not ring.requires_key(now):
        say(access(ring, now))


@keys.command("revoke")
def revoke(
    key: Annotated[str, typer.Argument(metavar="ID|NAME", help="As `keys list` shows it.")],
    output: FormatOption = Format.TABLE,
) -> None:
    """Revoke a key. Answers that have begun go on, and other requests need a key as before."""
    from orchestrator.access.audit_log import Audit, caller, recorded
    from orchestrator.access.keys import KeyFile, shown
    from orchestrator.process.home import Home

    home = Home.from_environment()
    with contextlib.ExitStack() as stack:
        if home.path.is_dir():  # else there is no key either, and nothing to write down
            told = {"key": shown(key)}
            stack.enter_context(recorded(Audit(home.audit), "command", "keys revoke", told, by=caller()))
        gone = KeyFile(home.keys).revoke(key)
    if not KeyFile(home.keys).read().keys:
        say("no key is left: corewright keys create NAME makes one, corewright keys open answers requests without")
    show({"id": gone.id, "name": gone.name}, output, f"{gone.name} ({gone.id}): revoked")


@keys.command("open")
def open_(
    until: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="End of that, such as 2h or a time.", show_default="without end"),
    ] = None,
) -> None:
    """Answer requests without a key again, on loopback, until the next key is created or `keys close`."""
    from orchestrator.access.audit_log import Audit, caller, recorded
    from orchestrator.access.keys import KeyFile, read_expiry
    from orchestrator.process.home import Home

    home, now = Home.from_environment(), time.time()
    ends = None if until is None else read_expiry(until, now, "--until")
    listens, on_network = _listening(home)
    if on_network:
        what = f"the running fleet listens on {listens}, where every request needs a key"
        raise Failed("keys-open-refused", what, "corewright up --insecure answers requests without a key there")
    with contextlib.ExitStack() as stack:
        if home.path.is_dir():
            stack.enter_context(recorded(Audit(home.audit), "command", "keys open", {"until": ends}, by=caller()))
        KeyFile(home.keys).open_keyless(ends)
    say(access(KeyFile(home.keys).read(), now))


@keys.command("close")
def close(yes: YesOption = False) -> None:
    """Demand a key of every request from now on: the end of a grace period, or of `keys open`."""
    from orchestrator.access.audit_log import Audit, caller, recorded
    from orchestrator.access.keys import KeyFile
    from orchestrator.process.home import Home

    home, now = Home.from_environment(), time.time()
    home.prepare()
    file = KeyFile(home.keys)
    _confirm_closing(home, file.read(), now, yes, "corewright keys create NAME makes a key")
    with recorded(Audit(home.audit), "command", "keys close", {}, by=caller()):
        file.close_keyless()
    say(access(file.read(), now))


def access(ring: KeyRing, now: float) -> str:
    """What a request needs, in words."""
    if ring.requires_key(now):
        return "every request needs a key"
    until = "" if ring.keyless_until is None else f" until {_time(ring.keyless_until)}"
    return f"requests without a key are answered on loopback{until}"


def _listening(home: Home) -> tuple[str | None, bool]:
    """The address on which the gateway of the running fleet listens, None where no fleet runs; and whether it is
    reached from the network."""
    from orchestrator.process.addresses import is_loopback
    from orchestrator.process.home import daemon_alive

    record = home.read_record()
    listens = record.listens if record is not None and daemon_alive(record) else None
    return listens, listens is not None and not is_loopback(listens)


def _confirm_closing(home: Home, ring: KeyRing, now: float, yes: bool, hint: str) -> None:
    """Report that clients without a key will be refused, and prompt while a fleet runs. Returns at once where every
    request needs a key already. Aborts without a yes."""
    listens, on_network = _listening(home)
    if ring.requires_key(now) or on_network:
        return
    say(f"from now on every request without a key is refused (`up --insecure` aside)\n    hint: {hint}")
    if listens is not None and not confirmed("Go on?", yes):
        raise typer.Abort


@app.command()
def audit(
    count: Annotated[
        int, typer.Option("-n", min=1, max=100_000, metavar="N", help="So many of the last actions.")
    ] = LATEST,
    output: FormatOption = Format.TABLE,
) -> None:
    """Tell who changed what, and what came of it. Needs no fleet."""
    from orchestrator.access.audit_log import Audit
    from orchestrator.process.home import Home

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
        "weight": key.weight,
        "priority": key.priority,
        "requests_per_minute": key.requests_per_minute,
        "tokens_per_minute": key.tokens_per_minute,
        "max_concurrent": key.max_concurrent,
    }


def _limits(
    weight: float | None,
    priority: int | None,
    requests_per_minute: str | None,
    tokens_per_minute: str | None,
    max_concurrent: str | None,
) -> dict[str, Any]:
    """What was given of it, as fields of Allowance. Raises Failed for what is no limit."""
    from orchestrator.access.keys import read_limit

    given = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrent": max_concurrent,
    }
    found: dict[str, Any] = {} if weight is None else {"weight": weight}
    found |= {} if priority is None else {"priority": priority}
    for name, text in given.items():
        if text is not None:
            found[name] = read_limit(f"--{name.replace('_', '-')}", text)
    return found


def _told(limits: dict[str, Any]) -> dict[str, Any]:
    """For the audit log, which leaves out what is null: that a limit was taken away is told too."""
    return {name: "none" if value is None else value for name, value in limits.items()}


def _limited(key: ApiKey) -> str:
    parts = [
        f"{limit} {unit}"
        for limit, unit in (
            (key.requests_per_minute, "requests/min"),
            (key.tokens_per_minute, "tokens/min"),
            (key.max_concurrent, "at a time"),
        )
        if limit is not None
    ]
    return ", ".join(parts) or "no limits"


def _may(key: ApiKey) -> str:
    return f"{' and '.join(key.scopes)}, {', '.join(key.models) if key.models else 'all models'}"


def _until(key: ApiKey) -> str:
    return "without end" if key.expires is None else f"until {_time(key.expires)}"


def _time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
