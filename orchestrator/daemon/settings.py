"""The settings of `up`, one table of them, each resolved flag > environment > file > default and keeping its origin."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from orchestrator.fleet.controller_settings import DRAIN_S
from orchestrator.process.failure import Failed
from placements.spec.problems import Problem, in_order

if TYPE_CHECKING:
    from orchestrator.gateway.settings import GatewaySettings
    from workers.artifacts.store.store_settings import StoreSettings

Origin = Literal["flag", "environment", "file", "default"]
FILE = "config.yaml"
IN_MEMORY = ("tmpfs", "ramfs")
LONGEST_DRAIN_S = 3600.0


@dataclass(frozen=True)
class Setting:
    """One thing that can be set. ``read`` takes what the command line or YAML gives, or a variable's text; it raises
    ValueError with what the value should be."""

    name: str  # also the key in the file, and the flag with - for _
    env: str
    default: Any
    kind: str
    doc: str
    read: Callable[[Any], Any]
    has_flag: bool = True
    in_file: bool = True
    flag: str = ""  # where it is another than the name says


@dataclass(frozen=True)
class Value:
    """What a setting is, and who said so."""

    name: str
    value: Any
    origin: Origin
    where: str = ""  # the flag, the variable, or file:line:column

    def as_dict(self) -> dict[str, Any]:
        value = list(self.value) if isinstance(self.value, tuple) else self.value
        return {"name": self.name, "value": value, "origin": self.origin, "where": self.where}


def _text(given: Any) -> str:
    if not isinstance(given, str):
        raise ValueError("text")
    return given


def _port(given: Any) -> int:
    what = "1 to 65535"
    number = int(given) if isinstance(given, str) and given.isascii() and given.isdecimal() else given
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= 65535:
        raise ValueError(what)
    return number


_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _switch(given: Any) -> bool:
    if isinstance(given, bool):
        return given
    try:
        return _WORDS[given.lower()]
    except (AttributeError, KeyError):
        raise ValueError("true or false") from None


def _number(given: Any, what: str) -> float:
    try:
        number = float("" if isinstance(given, bool) else given)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(what) from None
    if not math.isfinite(number):
        raise ValueError(what)
    return number


def _seconds(given: Any) -> float:
    what = f"a number of seconds, 0 to {LONGEST_DRAIN_S:.0f}"
    number = _number(given, what)
    if not 0 <= number <= LONGEST_DRAIN_S:
        raise ValueError(what)
    return number


def _deadline(given: Any) -> float:
    what = f"a number of seconds above 0, at most {LONGEST_DRAIN_S:.0f}"
    number = _number(given, what)
    if not 0 < number <= LONGEST_DRAIN_S:
        raise ValueError(what)
    return number


def _whole(least: int, most: int) -> Callable[[Any], int]:
    what = f"a whole number, {least} to {most}"

    def read(given: Any) -> int:
        number = int(given) if isinstance(given, str) and re.fullmatch("[0-9]{1,15}", given, re.ASCII) else given
        if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
            raise ValueError(what)
        return number

    return read


def _word(*known: str) -> Callable[[Any], str]:
    def read(given: Any) -> str:
        if given not in known:
            raise ValueError(" or ".join(known))
        return str(given)

    return read


def _file_path(given: Any) -> str:
    """Relative to the current folder."""
    if not _text(given).strip():
        raise ValueError("a file")
    return str(Path(given).expanduser().absolute())


def _several(one: Callable[[str], str], what: str) -> Callable[[Any], tuple[str, ...]]:
    """A list, or a text with commas, as a variable has it. ``one`` reads each, and raises ValueError."""

    def read(given: Any) -> tuple[str, ...]:
        items = given.split(",") if isinstance(given, str) else given
        if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
            raise ValueError(what)
        return tuple(dict.fromkeys(one(item.strip()) for item in items if item.strip()))

    return read


_ORIGIN = re.compile(r"https?://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?", re.ASCII)
_ORIGINS = "origins like https://chat.example, or *"
_MEMORY = "an absolute folder of a tmpfs"
_PLACES = "absolute folders, s3://bucket/prefix and hub:ORG"


def _cors_origin(text: str) -> str:
    if text != "*" and not _ORIGIN.fullmatch(text):
        raise ValueError(f"{_ORIGINS} (no path after the name)")
    return text


def _place(text: str) -> str:
    path = str(Path(text).expanduser()) if text.startswith("~/") or text == "~" else text
    if not path.startswith(("/", "s3://", "hub:")) or path == "s3://":
        raise ValueError(_PLACES)
    return path


def _folder(given: Any) -> str:
    path = str(Path(_text(given)).expanduser()) if given else ""
    if not path.startswith("/"):
        raise ValueError(_MEMORY)
    return path


MIB, GIB, PIB = 2**20, 2**30, 2**50


def _limit(name: str, default: int | None, least: int, most: int, doc: str) -> Setting:
    env = f"COREWRIGHT_{name.upper()}"
    return Setting(name, env, default, f"{least} to {most}", doc, _whole(least, most), has_flag=False)


def _time(name: str, default: float, doc: str) -> Setting:
    env = f"COREWRIGHT_{name.upper()}"
    return Setting(name, env, default, "above 0, at most 3600", doc, _deadline, has_flag=False)


SETTINGS = (
    Setting("host", "COREWRIGHT_HOST", "127.0.0.1", "text", "Address to listen on; beyond loopback with keys.", _text),
    Setting("port", "COREWRIGHT_PORT", 8080, "1 to 65535", "Port of the OpenAI-compatible address.", _port),
    Setting(
        "gateways",
        "COREWRIGHT_GATEWAYS",
        1,
        "1 to 64",
        "Gateway processes that share the port.",
        _whole(1, 64),
    ),
    Setting(
        "gateway_spare",
        "COREWRIGHT_GATEWAY_SPARE",
        True,
        "true or false",
        "Keep one more gateway process, which takes over at once from one that dies.",
        _switch,
        has_flag=False,
    ),
    Setting(
        "insecure",
        "COREWRIGHT_INSECURE",
        False,
        "true or false",
        "Disable API-key authentication on every address.",
        _switch,
    ),
    Setting(
        "tls_cert",
        "COREWRIGHT_TLS_CERT",
        None,
        "a file",
        "PEM: the gateway's certificate, and its chain. Read again when it changes.",
        _file_path,
    ),
    Setting("tls_key", "COREWRIGHT_TLS_KEY", None, "a file", "PEM: the key of the certificate.", _file_path),
    Setting(
        "tls_client_ca",
        "COREWRIGHT_TLS_CLIENT_CA",
        None,
        "a file",
        "PEM: demand of each client a certificate that one of these authorities has signed.",
        _file_path,
    ),
    Setting(
        "cors_origins",
        "COREWRIGHT_CORS_ORIGINS",
        (),
        "origins",
        "Origins whose scripts in browsers may read answers.",
        _several(_cors_origin, _ORIGINS),
        flag="--cors-origin",
    ),
    Setting("dashboard", "COREWRIGHT_DASHBOARD", True, "true or false", "Start Ray's dashboard.", _switch),
    Setting(
        "watch",
        "COREWRIGHT_WATCH",
        False,
        "true or false",
        "Apply the spec when its file changes; bad ones are not.",
        _switch,
    ),
    Setting(
        "drain_s", "COREWRIGHT_DRAIN_S", DRAIN_S, "0 to 3600", "Seconds for running requests at the end.", _seconds
    ),
    _limit("max_body_bytes", 8 * MIB, 1024, GIB, "Bytes of a request's body."),
    _limit("max_header_bytes", 32 * 2**10, 1024, MIB, "Bytes of a request's line and headers together."),
    _limit("max_messages", 2048, 1, 1_000_000, "Messages of a chat."),
    _limit("max_prompt_tokens", None, 1, 1 << 24, "Tokens of a prompt; unset: as many as the model takes."),
    _limit("max_connections", 10_000, 1, 1_000_000, "Open connections of one gateway."),
    _limit("max_connections_per_key", 4096, 1, 1_000_000, "Open connections of one key at one gateway."),
    _time("read_s", 30.0, "Seconds for a request to arrive, from its first byte to its last."),
    _time("idle_s", 75.0, "Seconds between two requests on one connection."),
    _time("write_s", 30.0, "Seconds that a client may take nothing of its answer; then it is disconnected."),
    _time("keep_alive_s", 10.0, "Seconds between two comments to a streaming client whose request waits for a slot."),
    Setting(
        "log_format",
        "COREWRIGHT_LOG_FORMAT",
        "text",
        "text or json",
        "Form of the gateway's log.",
        _word("text", "json"),
        has_flag=False,
    ),
    Setting(
        "log_prompts",
        "COREWRIGHT_LOG_PROMPTS",
        False,
        "true or false",
        "Write prompts and answers into the gateway's log.",
        _switch,
        has_flag=False,
    ),
    Setting(
        "allowed_sources",
        "COREWRIGHT_ALLOWED_SOURCES",
        None,
        "folders, s3:// prefixes and hub:ORG",
        "What a spec may read: models, drafts, compiler caches. Unset: see docs/security.md.",
        _several(_place, _PLACES),
        has_flag=False,
    ),
    _limit("store_bytes", None, MIB, PIB, "Bytes of a host's disk for fetched models; unset: as many as it has."),
    Setting(
        "store_memory",
        "COREWRIGHT_STORE_MEMORY",
        None,
        _MEMORY,
        "Where fetched models are copied to, to be loaded from memory. Unset: from disk.",
        _folder,
        has_flag=False,
    ),
    _limit("store_memory_bytes", None, MIB, PIB, "Bytes of it for them; unset: as many as it has."),
    Setting(
        "data_plane",
        "COREWRIGHT_DATA_PLANE",
        "unix",
        "unix or tcp",
        "Between gateways and replicas of one host; tcp, with TLS, is what other hosts are reached by.",
        _word("unix", "tcp"),
        has_flag=False,
    ),
    Setting(
        "home",
        "COREWRIGHT_HOME",
        "~/.corewright",
        "a folder",
        "Where the fleet's record, logs and locks are.",
        lambda given: str(Path(_text(given)).absolute()),
        has_flag=False,
        in_file=False,
    ),
)


@dataclass(frozen=True)
class Settings:
    """All of them, in the order of ``SETTINGS``. With problems of severity error the values are not to be used."""

    values: tuple[Value, ...]
    problems: tuple[Problem, ...]

    def __getitem__(self, name: str) -> Any:
        return next(value.value for value in self.values if value.name == name)

    def origin(self, name: str) -> Value:
        return next(value for value in self.values if value.name == name)

    def as_dicts(self) -> tuple[dict[str, Any], ...]:
        """As `config view -o json` prints them."""
        return tuple(value.as_dict() for value in self.values)


def resolve(
    flags: Mapping[str, Any], environ: Mapping[str, str] | None = None, only: Collection[str] | None = None
) -> Settings:
    """``flags`` are those of the command line, None where not given. An empty variable counts as unset. ``only``: the
    settings that are read, by name; None: all. Raises Failed for a home that others can write to."""
    from orchestrator.process.home import refuse_shared

    environ = os.environ if environ is None else environ
    problems: list[Problem] = []
    home = environ.get("COREWRIGHT_HOME") or str(Path.home() / ".corewright")
    refuse_shared(Path(home).absolute())
    written = _file(Path(home).absolute() / FILE, problems)
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
            read = setting.read(given.value)
        except ValueError as error:
            where = given.where if given.origin == "file" else ""
            source = "" if given.origin == "file" else f"{given.where}: "
            what = f"{source}{setting.name} must be {error}, not {given.value!r}"
            problems.append(Problem("setting-wrong", "error", where, what, setting.doc))
            read = setting.default
        if setting.name == "store_memory" and read is not None and is_on_disk(read):
            where = given.where if given.origin == "file" else ""
            what = f"store_memory: {read} is on a disk: each model would lie there twice, and not in memory"
            problems.append(
                Problem("store-memory-on-disk", "warning", where, what, "a folder of a tmpfs: /dev/shm/models")
            )
        values.append(Value(setting.name, read, given.origin, given.where))
    return Settings(tuple(values), in_order(problems))


def _given(
    setting: Setting, flags: Mapping[str, Any], environ: Mapping[str, str], written: Mapping[str, Value]
) -> Value | None:
    if flags.get(setting.name) is not None:
        return Value(setting.name, flags[setting.name], "flag", setting.flag or "--" + setting.name.replace("_", "-"))
    if environ.get(setting.env):
        return Value(setting.name, environ[setting.env], "environment", setting.env)
    return written.get(setting.name)


def _file(path: Path, problems: list[Problem]) -> dict[str, Value]:
    """What the file sets. No file, or an empty one, sets nothing."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        what = f"{path} cannot be read: {error.strerror}"
        problems.append(Problem("settings-unreadable", "error", "", what, "make it readable, or remove it"))
        return {}
    from placements.spec.yaml_tree import BROKEN, read

    tree = read(text, str(path))
    found_empty = any(problem.id == "spec-empty" for problem in tree.problems)  # an error of a spec, and none here
    problems += () if found_empty else tree.problems
    if tree.value is BROKEN or found_empty:
        return {}
    if not isinstance(tree.value, dict):
        what = "the settings are a mapping, such as port: 8080"
        problems.append(Problem("settings-unreadable", "error", f"{path}:1:1", what, "one setting a line"))
        return {}
    known = [setting.name for setting in SETTINGS if setting.in_file]
    found = {}
    for key, value in tree.value.items():
        place = tree.places.get((key,))
        where = f"{path}:{place.line}:{place.column}" if place else str(path)
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f'did you mean "{near[0]}"?' if near else f"one of: {', '.join(known)}"
            problems.append(Problem("setting-unknown", "error", where, f'"{key}" is no setting of this file', hint))
        elif value is not BROKEN and value is not None:
            found[key] = Value(key, value, "file", where)
    return found


def is_on_disk(folder: str) -> bool:
    """Whether what is put there would lie on a disk of this machine; False where nobody can tell."""
    import psutil

    path = Path(folder).resolve()
    mounts = {Path(one.mountpoint): one.fstype for one in psutil.disk_partitions(all=True)}
    found = next((mounts[one] for one in (path, *path.parents) if one in mounts), IN_MEMORY[0])
    return found not in IN_MEMORY


def gateway_settings(settings: Settings) -> GatewaySettings:
    """What each gateway is told. Call it when there are no problems."""
    import msgspec.structs

    from orchestrator.gateway.settings import GatewaySettings

    names = [field.name for field in msgspec.structs.fields(GatewaySettings)]
    return GatewaySettings(**{name: settings[name] for name in names})


def store_settings(settings: Settings, root: Path) -> StoreSettings:
    """What each host keeps of artifacts, in ``root``. Call it when there are no problems."""
    from workers.artifacts.store.store_settings import StoreSettings

    return StoreSettings(
        root=str(root),
        budget=settings["store_bytes"],
        memory=settings["store_memory"],
        memory_budget=settings["store_memory_bytes"],
    )


def store_here(root: Path) -> StoreSettings:
    """The same for a command of this machine, from its environment and its file. Raises Failed where one of these
    settings is wrong, or the file is."""
    settings = resolve({}, only=("store_bytes", "store_memory", "store_memory_bytes"))
    for problem in settings.problems:
        if problem.severity == "error":
            place = f"{problem.where}: " if problem.where else ""
            raise Failed(problem.id, f"{place}{problem.what}", problem.hint)
    return store_settings(settings, root)
