"""The commands `keys` and `audit`: manage API keys and show the audit log, without a fleet."""

from __future__ import annotations

import time
from enum import Enum
from typing import Annotated, Any

import typer

from orchestrator.access.audit_log import Audit, AuditLine, recorded_command
from orchestrator.access.keys import (
    SCOPES,
    Allowance,
    ApiKey,
    KeyFile,
    KeyRing,
    check_new,
    read_expiry,
    read_limit,
    without_secret,
)
from orchestrator.cli.app import FormatOption, YesOption, app, argument, group, option, with_options
from orchestrator.cli.client import running_fleet
from orchestrator.cli.listing import Column, Table, clock
from orchestrator.cli.output import Format, confirmed, fields_of, say, show
from orchestrator.process.addresses import is_loopback
from orchestrator.process.failure import Failed
from orchestrator.process.home import Home

keys = group("keys", "Manage the API keys of this home. A running fleet applies changes within a second.")

LIMITS = "requests_per_minute tokens_per_minute max_concurrent"
LATEST = 20  # actions that are shown by default

ALLOWANCE: dict[str, Any] = {  # the options for the fields of Allowance, of which None is not given
    "weight": Annotated[
        float | None,
        option("W", "Share of a model's tokens while requests of several keys wait (new keys: 1).", default=False),
    ],
    "priority": Annotated[
        int | None,
        option("P", "Best priority of the key's requests; lower values are served first (new keys: 0).", default=False),
    ],
    "requests_per_minute": Annotated[str | None, option("N|none", "Maximum requests per minute.", default=False)],
    "tokens_per_minute": Annotated[
        str | None, option("N|none", "Maximum tokens per minute, prompts and outputs.", default=False)
    ],
    "max_concurrent": Annotated[str | None, option("N|none", "Maximum concurrent requests.", default=False)],
}
KEYS: Table[ApiKey] = Table(
    lambda key: key.id,
    (
        Column("ID", lambda key: key.id),
        Column("NAME", lambda key: key.name),
        Column("SCOPES", lambda key: ",".join(key.scopes)),
        Column("MODELS", lambda key: ",".join(key.models) or "all"),
        Column("WEIGHT", lambda key: f"{key.weight:g}"),
        Column("PRIORITY", lambda key: key.priority),
        Column("REQ/MIN", lambda key: key.requests_per_minute),
        Column("TOK/MIN", lambda key: key.tokens_per_minute),
        Column("AT ONCE", lambda key: key.max_concurrent),
        Column("CREATED", lambda key: clock(key.created)),
        Column("EXPIRES", lambda key: (clock(key.expires) or "never") + (" (expired)" * key.expired(time.time()))),
    ),
)
ACTIONS: Table[AuditLine] = Table(
    lambda entry: entry.request,
    (
        Column("TIME", lambda entry: clock(entry.at)),
        Column("WHO", lambda entry: entry.who),
        Column("BY", lambda entry: entry.by or None),
        Column("ACTION", lambda entry: entry.action),
        Column("OUTCOME", lambda entry: entry.status),
        Column("REVISION", lambda entry: entry.revision),
        Column("ARGUMENTS", lambda entry: " ".join(f"{name}={value!r}" for name, value in entry.arguments.items())),
    ),
)
KeyArgument = Annotated[str, argument("ID|NAME", "ID or name of the key, as shown by `keys list`.")]


class ScopeName(str, Enum):
    INFERENCE = "inference"
    ADMIN = "admin"


@keys.command("create")
@with_options(ALLOWANCE)
def create(
    name: Annotated[str, argument("NAME", "Name of the key, shown in lists and logs.")],
    scope: Annotated[
        list[ScopeName] | None,
        typer.Option(
            help="Scope of the key: inference (the models) or admin (the fleet). Repeatable.", show_default="inference"
        ),
    ] = None,
    model: Annotated[
        list[str] | None, option("M", "Restrict the key to this model. Repeatable.", default="all models")
    ] = None,
    expires: Annotated[
        str | None, option("WHEN", "Expiry: a duration such as 30d or 12h, a date or a time.", default="never")
    ] = None,
    activate_at: Annotated[
        str | None,
        option("WHEN", "With the first key: when to start requiring keys, such as 30m or a time.", default="now"),
    ] = None,
    yes: YesOption = False,
    output: FormatOption = Format.TABLE,
    **allowance: Any,
) -> None:
    """Create an API key and print it once. The first key enables authentication."""
    home = Home.from_environment()
    now = time.time()
    ends = None if expires is None else read_expiry(expires, now)
    starts = None if activate_at is None else read_expiry(activate_at, now, "--activate-at")
    chosen = {item.value for item in scope or (ScopeName.INFERENCE,)}
    scopes = tuple(known for known in SCOPES if known in chosen)
    models = tuple(model or ())
    limits = _given(allowance)
    check_new(name, models, Allowance(**limits))
    home.prepare()
    file = KeyFile(home.keys)
    if starts is None and file.read().keyless_until is None:
        _confirm_closing(file.read(), now, yes, "--activate-at 30m gives clients time to get their keys")
    arguments = {"name": name, "scopes": scopes, "models": models, "expires": ends, "activate_at": starts}
    with recorded_command(home, "keys create", arguments | _audited(limits)):
        key, text = file.create(
            name, scopes=scopes, models=models, expires=ends, allowance=Allowance(**limits), activate_at=starts, now=now
        )
    ring = file.read()
    if not ring.requires_key(now):
        say(access(ring, now))
    if output is Format.TABLE:
        say(f"{key.name}: {_scope_text(key)}, {_expiry_text(key)}. The key is not shown again:")
    show({**_as_dict(key), "key": text}, output, text)


@keys.command("set")
@with_options(ALLOWANCE)
def change(key: KeyArgument, output: FormatOption = Format.TABLE, **allowance: Any) -> None:
    """Change the weight, priority or limits of a key. Options that are not given stay unchanged."""
    limits = _given(allowance)
    if not limits:
        raise typer.BadParameter("pass --weight, --priority or a limit", param_hint="options")
    home = Home.from_environment()
    with recorded_command(home, "keys set", {"key": without_secret(key), **_audited(limits)}):
        changed = KeyFile(home.keys).change(key, **limits)
    values = f"weight {changed.weight:g}, priority {changed.priority}, {_limits_text(changed)}"
    show(_as_dict(changed), output, f"{changed.name} ({changed.id}): {values}")


@keys.command("list")
def list_keys(output: FormatOption = Format.TABLE) -> None:
    """List the keys, without their secrets."""
    ring = KeyFile(Home.from_environment().keys).read()
    now = time.time()
    listed = [_as_dict(key) for key in ring.keys]
    data = {"required": ring.requires_key(now), "keyless_until": ring.keyless_until, "keys": listed}
    show(data, output, KEYS.text(ring.keys) if ring.keys else "no keys")
    if output is Format.TABLE and not ring.requires_key(now):
        say(access(ring, now))


@keys.command("revoke")
def revoke(key: KeyArgument, output: FormatOption = Format.TABLE) -> None:
    """Revoke a key. Running requests finish, and authentication stays enabled."""
    home = Home.from_environment()
    with recorded_command(home, "keys revoke", {"key": without_secret(key)}):
        revoked = KeyFile(home.keys).revoke(key)
    ring, now = KeyFile(home.keys).read(), time.time()
    if not ring.keys:
        reopening = "run `corewright keys create NAME`, or `corewright keys open` to accept requests without"
        say(f"no keys are left: {reopening if ring.requires_key(now) else access(ring, now)}")
    show({"id": revoked.id, "name": revoked.name}, output, f"{revoked.name} ({revoked.id}): revoked")


@keys.command("open")
def open_(
    until: Annotated[
        str | None, option("WHEN", "When to require keys again, such as 2h or a time.", default="never")
    ] = None,
) -> None:
    """Accept requests without a key on loopback, until `keys create` or `keys close`."""
    home, now = Home.from_environment(), time.time()
    ends = None if until is None else read_expiry(until, now, "--until")
    address, on_network = _listen_address()
    if on_network:
        message = f"the running fleet listens on {address}, where every request needs a key"
        raise Failed("keys-open-refused", message, "`corewright up --insecure` accepts requests without a key there")
    with recorded_command(home, "keys open", {"until": ends}):
        KeyFile(home.keys).open_keyless(ends)
    say(access(KeyFile(home.keys).read(), now))


@keys.command("close")
def close(yes: YesOption = False) -> None:
    """Require a key for every request from now on: ends a grace period, or `keys open`."""
    home, now = Home.from_environment(), time.time()
    home.prepare()
    file = KeyFile(home.keys)
    _confirm_closing(file.read(), now, yes, "`corewright keys create NAME` creates a key")
    with recorded_command(home, "keys close", {}):
        file.close_keyless()
    say(access(file.read(), now))


def access(ring: KeyRing, now: float) -> str:
    """Returns a sentence that says which requests need a key."""
    if ring.requires_key(now):
        return "every request needs a key"
    until = "" if ring.keyless_until is None else f" until {clock(ring.keyless_until)}"
    return f"requests without a key are accepted on loopback{until}"


def _listen_address() -> tuple[str | None, bool]:
    """Returns the listen address of the running gateway, None without a fleet; and whether it is not loopback."""
    record = running_fleet()
    listens = None if record is None else record.listens
    return listens, listens is not None and not is_loopback(listens)


def _confirm_closing(ring: KeyRing, now: float, yes: bool, hint: str) -> None:
    """Report that requests without a key will be rejected, and prompt if a fleet is running. Aborts unless confirmed.

    Does nothing if keys are required already."""
    address, on_network = _listen_address()
    if ring.requires_key(now) or on_network:
        return
    say(f"from now on requests without a key are rejected (except with `up --insecure`)\n    hint: {hint}")
    if address is not None and not confirmed("Continue?", yes):
        raise typer.Abort


@app.command()
def audit(
    count: Annotated[int, option("N", "Number of actions to show.", "-n", min=1, max=100_000)] = LATEST,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show the last actions in the audit log. Needs no fleet."""
    entries = Audit(Home.from_environment().audit).entries(count)
    data = [fields_of(entry, "at who by action arguments status revision") for entry in entries]
    show({"actions": data}, output, ACTIONS.text(entries) if entries else "nothing yet")


def _as_dict(key: ApiKey) -> dict[str, Any]:
    return fields_of(key, f"id name scopes models created expires weight priority {LIMITS}")


def _given(allowance: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that were given, as fields of Allowance. Raises Failed for an invalid limit."""
    given = {name: value for name, value in allowance.items() if value is not None}
    texts = {name: value for name, value in given.items() if isinstance(value, str)}
    return given | {name: read_limit(f"--{name.replace('_', '-')}", text) for name, text in texts.items()}


def _audited(limits: dict[str, Any]) -> dict[str, Any]:
    """Returns the limits for the audit log, which omits nulls: a removed limit is recorded as "none"."""
    return {name: "none" if value is None else value for name, value in limits.items()}


def _limits_text(key: ApiKey) -> str:
    limits = zip(fields_of(key, LIMITS).values(), ("requests/min", "tokens/min", "at a time"), strict=True)
    parts = [f"{limit} {unit}" for limit, unit in limits if limit is not None]
    return ", ".join(parts) or "no limits"


def _scope_text(key: ApiKey) -> str:
    return f"{' and '.join(key.scopes)}, {', '.join(key.models) if key.models else 'all models'}"


def _expiry_text(key: ApiKey) -> str:
    return "never expires" if key.expires is None else f"until {clock(key.expires)}"
