"""The settings of `up`, one table of them, each resolved flag > environment > file > default and keeping its origin."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from orchestrator.fleet import DRAIN_S
from placements.problems import Problem, in_order

Origin = Literal["flag", "environment", "file", "default"]
FILE = "config.yaml"
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


@dataclass(frozen=True)
class Value:
    """What a setting is, and who said so."""

    name: str
    value: Any
    origin: Origin
    where: str = ""  # the flag, the variable, or file:line:column

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "value": self.value, "origin": self.origin, "where": self.where}


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


def _seconds(given: Any) -> float:
    what = f"a number of seconds, 0 to {LONGEST_DRAIN_S:.0f}"
    try:
        number = float("" if isinstance(given, bool) else given)
    except (TypeError, ValueError):
        raise ValueError(what) from None
    if not (math.isfinite(number) and 0 <= number <= LONGEST_DRAIN_S):
        raise ValueError(what)
    return number


SETTINGS = (
    Setting("host", "COREWRIGHT_HOST", "127.0.0.1", "text", "Address to listen on; loopback only.", _text),
    Setting("port", "COREWRIGHT_PORT", 8080, "1 to 65535", "Port of the OpenAI-compatible address.", _port),
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


def resolve(flags: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Settings:
    """``flags`` are those of the command line, None where not given. An empty variable counts as unset."""
    environ = os.environ if environ is None else environ
    problems: list[Problem] = []
    home = environ.get("COREWRIGHT_HOME") or str(Path.home() / ".corewright")
    written = _file(Path(home).absolute() / FILE, problems)
    values = []
    for setting in SETTINGS:
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
        values.append(Value(setting.name, read, given.origin, given.where))
    return Settings(tuple(values), in_order(problems))


def _given(
    setting: Setting, flags: Mapping[str, Any], environ: Mapping[str, str], written: Mapping[str, Value]
) -> Value | None:
    if flags.get(setting.name) is not None:
        return Value(setting.name, flags[setting.name], "flag", "--" + setting.name.replace("_", "-"))
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
    from placements.yamltree import BROKEN, read

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
