"""The table of settings of `up`, each resolved from flag, environment, file or default, with its origin."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec.structs

from orchestrator.gateway.settings import GatewaySettings
from orchestrator.messages.controller_settings import DRAIN_S
from orchestrator.messages.gateway_places import HEAD, HOSTS
from orchestrator.process.failure import Failed
from placements.spec import removed
from placements.spec.problems import Problem, in_order

if TYPE_CHECKING:
    from workers.artifacts.store.store import StoreSettings

Origin = Literal["flag", "environment", "file", "default"]
FILE = "config.yaml"
LONGEST_DRAIN_S = 3600
S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True)
class Kind:
    """The valid values of a setting. ``read`` converts a value from the command line or YAML, or the text of a
    variable; it raises ValueError with a description of valid values."""

    rule: str  # for the docs
    read: Callable[[Any], Any]
    type: Any = str  # of the command-line option
    option: Mapping[str, Any] = field(default_factory=dict)  # its limits, or the name of its value


@dataclass(frozen=True)
class Setting:
    """One setting. An empty ``option``: it has none."""

    name: str  # also the key in the file
    kind: Kind
    default: Any
    doc: str
    option: str = ""  # as Typer declares it

    @property
    def env(self) -> str:
        return _variable(self.name)

    @property
    def in_file(self) -> bool:
        return self.name != "home"  # the folder of the file


@dataclass(frozen=True)
class Value:
    """The value of a setting, and its origin."""

    name: str
    value: Any
    origin: Origin
    where: str = ""  # the flag, the variable, or file:line:column

    def as_dict(self) -> dict[str, Any]:
        value = list(self.value) if isinstance(self.value, tuple) else self.value
        return {"name": self.name, "value": value, "origin": self.origin, "where": self.where}


def _variable(name: str) -> str:
    return f"COREWRIGHT_{name.upper()}"


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("text")
    return value


_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    try:
        return _WORDS[value.lower()]
    except (AttributeError, KeyError):
        raise ValueError("true or false") from None


def _seconds(rule: str, least: float) -> Kind:
    def read(value: Any) -> float:
        try:
            number = float("" if isinstance(value, bool) else value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not least <= number <= LONGEST_DRAIN_S:
            raise ValueError(f"a number of seconds, {rule}")
        return number

    return Kind(rule, read, float, {"min": least, "max": LONGEST_DRAIN_S})


def _whole(least: int, most: int) -> Kind:
    def read(value: Any) -> int:
        number = int(value) if isinstance(value, str) and re.fullmatch("[0-9]{1,15}", value, re.ASCII) else value
        if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
            raise ValueError(f"a whole number, {least} to {most}")
        return number

    return Kind(f"{least} to {most}", read, int, {"min": least, "max": most})


def _word(*allowed: str) -> Kind:
    def read(value: Any) -> str:
        if value not in allowed:
            raise ValueError(" or ".join(allowed))
        return str(value)

    return Kind(" or ".join(allowed), read)


def _file_path(value: Any) -> str:
    """Relative to the current folder."""
    if not _text(value).strip():
        raise ValueError("a file")
    return str(Path(value).expanduser().absolute())


def _several(rule: str, valid: str, read_item: Callable[[str], str], **option: Any) -> Kind:
    """Returns the kind of lists, and of texts with commas. ``read_item`` reads each item, and raises ValueError."""

    def read(value: Any) -> tuple[str, ...]:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
            raise ValueError(valid)
        return tuple(dict.fromkeys(read_item(item.strip()) for item in items if item.strip()))

    return Kind(rule, read, list[str], option)


_ORIGIN = re.compile(r"https?://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?", re.ASCII)
_ORIGINS = "origins such as https://chat.example, or *"
_CONSOLE = re.compile(_ORIGIN.pattern + "(/[A-Za-z0-9._~-]+)*/console/?", re.ASCII)
_CONSOLES = "a URL such as https://ops.example/console/"
_PLACES = "absolute folders, s3://bucket/prefix and hub:ORG"


def _cors_origin(text: str) -> str:
    if text != "*" and not _ORIGIN.fullmatch(text):
        raise ValueError(f"{_ORIGINS} (no path after the name)")
    return text


def _console_url(value: Any) -> str:
    """As browsers write it: in lower case before the path, and without the port of its scheme."""
    if not _CONSOLE.fullmatch(_text(value)):
        raise ValueError(_CONSOLES)
    parts = urlsplit(value)
    netloc = parts.netloc.lower().removesuffix({"http": ":80", "https": ":443"}[parts.scheme])
    return f"{parts.scheme}://{netloc}{parts.path.rstrip('/')}/"


def _place(text: str) -> str:
    path = str(Path(text).expanduser()) if text.startswith("~/") or text == "~" else text
    if not path.startswith(("/", "s3://", "hub:")) or path == "s3://":
        raise ValueError(_PLACES)
    return path


def _places(value: Any) -> str:
    key, is_label, text = _text(value).partition("=")
    if value not in (HOSTS, HEAD) and not (is_label and key and text):
        raise ValueError("hosts, head or a label KEY=VALUE")
    return str(value)


MIB, GIB, PIB = 2**20, 2**30, 2**50
TEXT = Kind("text", _text)
SWITCH = Kind("true or false", _switch, bool)
FILE_PATH = Kind("a file", _file_path, str, {"metavar": "FILE"})
TIMEOUT = _seconds("above 0, at most 3600", math.ulp(0.0))
BYTES = _whole(MIB, PIB)
GATEWAY = {item.name: item.default for item in msgspec.structs.fields(GatewaySettings)}


def _gateway(name: str, kind: Kind, doc: str, option: str = "") -> Setting:
    """Returns a setting that gateways get, with the default that they have."""
    return Setting(name, kind, GATEWAY[name], doc, option)


def _flag(name: str, kind: Kind, doc: str) -> Setting:
    """Returns a setting of gateways with an option of the same name."""
    return _gateway(name, kind, doc, f"--{name.replace('_', '-')}")


SETTINGS = (
    _flag("host", TEXT, "Address that the gateway listens on. Beyond loopback it requires API keys, or --insecure."),
    _flag("port", _whole(1, 65535), "Port that the gateway listens on."),
    _flag("gateways", _whole(1, 64), "Number of gateway processes that share the port."),
    Setting(
        "gateways_on",
        Kind("hosts, head or a label KEY=VALUE of Ray nodes", _places),
        HOSTS,
        "Machines of a joined Ray cluster that have gateways. On its own Ray, `up` always has them on its machine.",
        "--gateways-on",
    ),
    _gateway("gateway_spare", SWITCH, "Keep a spare gateway process, which takes over when another one dies."),
    _flag("insecure", SWITCH, "Disable API-key authentication on every address."),
    _flag("tls_cert", FILE_PATH, "TLS certificate of the gateway with its chain (PEM). Reloaded when it changes."),
    _flag("tls_key", FILE_PATH, "Private key of the TLS certificate (PEM)."),
    _flag("tls_client_ca", FILE_PATH, "Require client certificates signed by these authorities (PEM)."),
    _gateway(
        "cors_origins",
        _several("origins", _ORIGINS, _cors_origin, metavar="ORIGIN"),
        "Origins to allow cross-origin requests from (CORS).",
        "--cors-origin",
    ),
    Setting(
        "console_url",
        Kind(_CONSOLES, _console_url, str, {"metavar": "URL"}),
        None,
        "Address of the web console for browsers, behind a proxy to the admin port.",
        "--console-url",
    ),
    Setting(
        "admin_port",
        _whole(1, 65535),
        None,
        "Port of 127.0.0.1 for the admin API and the web console. Unset: a free one.",
        "--admin-port",
    ),
    Setting("dashboard", SWITCH, True, "Start the Ray dashboard.", "--dashboard/--no-dashboard"),
    Setting(
        "watch",
        SWITCH,
        False,
        "Apply the spec whenever its file changes. Invalid specs are rejected.",
        "--watch/--no-watch",
    ),
    Setting("drain_s", _seconds("0 to 3600", 0), DRAIN_S, "Drain timeout on shutdown, in seconds.", "--drain-s"),
    _gateway("sagemaker", SWITCH, "Serve SageMaker's routes to load and unload models. Set by `serve-sagemaker`."),
    _gateway("max_body_bytes", _whole(1024, GIB), "Maximum size of a request body, in bytes."),
    _gateway("max_header_bytes", _whole(1024, MIB), "Maximum size of the request line and headers, in bytes."),
    _gateway("max_messages", _whole(1, 1_000_000), "Maximum number of messages in a chat request."),
    _gateway("max_prompt_tokens", _whole(1, 1 << 24), "Maximum number of prompt tokens; unset: the model's limit."),
    _gateway("max_connections", _whole(1, 1_000_000), "Maximum open connections per gateway process."),
    _gateway("max_connections_per_key", _whole(1, 1_000_000), "Maximum open connections of a key per gateway process."),
    _gateway("read_s", TIMEOUT, "Timeout for receiving a request, from its first byte to its last, in seconds."),
    _gateway("idle_s", TIMEOUT, "Timeout between two requests on a connection, in seconds."),
    _gateway("write_s", TIMEOUT, "Timeout for a client that reads nothing of its response, in seconds."),
    _gateway("keep_alive_s", TIMEOUT, "Interval of keep-alive comments in streams that wait for a slot, in seconds."),
    _gateway("log_format", _word("text", "json"), "Format of the gateway log."),
    _gateway("log_prompts", SWITCH, "Write prompts and answers to the gateway log."),
    Setting(
        "allowed_sources",
        _several("folders, s3:// prefixes and hub:ORG", _PLACES, _place),
        None,
        "Sources that a spec may read: models, drafts, compiler caches. Unset: see docs/security.md.",
    ),
    Setting("store_bytes", BYTES, None, "Maximum disk space per host for fetched models, in bytes; unset: no limit."),
    Setting(
        "data_plane",
        _word("unix", "tcp"),
        "unix",
        "Transport between gateways and replicas of one host. Other hosts always use tcp, with TLS.",
    ),
    Setting(
        "home",
        Kind("a folder", lambda given: str(Path(_text(given)).absolute())),
        "~/.corewright",
        "Folder of the fleet's record, logs and locks.",
    ),
)


@dataclass(frozen=True)
class Settings:
    """All values, in the order of ``SETTINGS``. They are invalid if one of the problems is an error."""

    values: tuple[Value, ...]
    problems: tuple[Problem, ...]

    def __getitem__(self, name: str) -> Any:
        return next(value.value for value in self.values if value.name == name)

    def origin(self, name: str) -> Value:
        return next(value for value in self.values if value.name == name)

    def fill(self, struct: type[S], **further: Any) -> S:
        """Returns a struct with the values of the settings that have the names of its fields. Requires settings without
        problems."""
        values = {value.name: value.value for value in self.values if value.name in struct.__struct_fields__}
        return struct(**values, **further)

    def as_dicts(self) -> tuple[dict[str, Any], ...]:
        """Returns the list that `config view -o json` prints."""
        return tuple(value.as_dict() for value in self.values)


def resolve(
    flags: Mapping[str, Any], environ: Mapping[str, str] | None = None, only: Collection[str] | None = None
) -> Settings:
    """Returns the settings from ``flags`` (None for those not given), the environment and the file.

    An empty variable counts as unset. ``only``: the names of the settings to read; None: all. Raises Failed for a home
    that others can write to."""
    from orchestrator.process.home import refuse_shared

    environ = os.environ if environ is None else environ
    problems: list[Problem] = []
    home = environ.get("COREWRIGHT_HOME") or str(Path.home() / ".corewright")
    refuse_shared(Path(home).absolute())
    written = _file(Path(home).absolute() / FILE, problems)
    problems += [_removal(_variable(name), name, "") for name in removed.SETTINGS if environ.get(_variable(name))]
    values = []
    for setting in SETTINGS:
        if only is not None and setting.name not in only:
            continue
        given = _given(setting, flags, environ, written)
        if given is None:
            default = home if setting.name == "home" else setting.default
            values.append(Value(setting.name, default, "default"))
            continue
        try:
            read = setting.kind.read(given.value)
        except ValueError as error:
            where = given.where if given.origin == "file" else ""
            source = "" if given.origin == "file" else f"{given.where}: "
            message = f"{source}{setting.name} must be {error}, not {given.value!r}"
            problems.append(Problem("setting-wrong", "error", where, message, setting.doc))
            read = setting.default
        values.append(Value(setting.name, read, given.origin, given.where))
    return Settings(tuple(values), in_order(problems))


def _given(
    setting: Setting, flags: Mapping[str, Any], environ: Mapping[str, str], written: Mapping[str, Value]
) -> Value | None:
    if flags.get(setting.name) is not None:
        return Value(setting.name, flags[setting.name], "flag", setting.option.partition("/")[0])
    if environ.get(setting.env):
        return Value(setting.name, environ[setting.env], "environment", setting.env)
    return written.get(setting.name)


def _removal(given: str, name: str, where: str) -> Problem:
    return Problem("setting-removed", "error", where, f"{given} was removed", removed.SETTINGS[name])


def _file(path: Path, problems: list[Problem]) -> dict[str, Value]:
    """Returns the values of the file; none for a missing or empty file."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}"
        problems.append(Problem("settings-unreadable", "error", "", message, "make the file readable, or remove it"))
        return {}
    from placements.spec.yaml_tree import BROKEN, read

    tree = read(text, str(path))
    is_empty = any(problem.id == "spec-empty" for problem in tree.problems)  # an error of specs, but valid here
    problems += () if is_empty else tree.problems
    if tree.value is BROKEN or is_empty:
        return {}
    if not isinstance(tree.value, dict):
        message = "the file must be a mapping, such as port: 8080"
        problems.append(Problem("settings-unreadable", "error", f"{path}:1:1", message, "write one setting per line"))
        return {}
    names = [setting.name for setting in SETTINGS if setting.in_file]
    values = {}
    for key, value in tree.value.items():
        place = tree.places.get((key,))
        where = f"{path}:{place.line}:{place.column}" if place else str(path)
        if key in removed.SETTINGS:
            problems.append(_removal(key, key, where))
        elif key not in names:
            near = difflib.get_close_matches(str(key), names, 1)
            hint = f'did you mean "{near[0]}"?' if near else f"one of: {', '.join(names)}"
            problems.append(Problem("setting-unknown", "error", where, f'"{key}" is not a setting of this file', hint))
        elif value is not BROKEN and value is not None:
            values[key] = Value(key, value, "file", where)
    return values


def store_settings(settings: Settings, root: Path) -> StoreSettings:
    """Returns the settings of each host's artifact store in ``root``. Requires settings without problems."""
    from workers.artifacts.store.store import StoreSettings

    return StoreSettings(root=str(root), budget=settings["store_bytes"])


def store_here(root: Path) -> StoreSettings:
    """As ``store_settings``, from the environment and the file of a command. Raises Failed if this setting, or
    the file, is wrong."""
    settings = resolve({}, only=("store_bytes",))
    for problem in settings.problems:
        if problem.severity == "error":
            place = f"{problem.where}: " if problem.where else ""
            raise Failed(problem.id, f"{place}{problem.what}", problem.hint)
    return store_settings(settings, root)
