"""The settings of an LMI container: `serving.properties` and environment variables, as LMI itself reads them.

From the code of DJL Serving 0.28 and 0.33 (`ModelInfo.loadServingProperties`, `ModelServer`, `LmiConfigRecommender`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import javaproperties

from placements.facts.tables import read_table

_SNAKE_CASE = re.compile(r"[A-Z][A-Z0-9_]*")
_ASSIGNMENT = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_.]*)=(.*)")
_VARIABLES: Mapping[str, str] = read_table("lmi/settings.json")["variables"]
"""Variable -> the property that it sets."""

MODEL_DATA, IMAGE = "ModelDataSource", "Image"
"""Settings of a SageMaker model beside its environment: where its files are, and its container."""

_CONTAINERS = ("PrimaryContainer", "Containers")
_ENVIRONMENTS = ("Environment", "environment", "Environment.Variables")


@dataclass(frozen=True)
class LmiSetting:
    """One property, by LMI's name without ``option.``, and where it was written."""

    name: str
    value: str
    label: str  # of its file
    line: int
    written: str  # its name there

    @property
    def where(self) -> str:
        """FILE:LINE."""
        return f"{self.label}:{self.line}"


class UnreadableSettings(Exception):
    """A file that is not of its format; the text says where and why."""


def read_properties(text: str, label: str) -> list[LmiSetting]:
    """Returns the properties of a `serving.properties`. Raises UnreadableSettings."""
    settings, line = [], 1
    try:
        for element in javaproperties.parse(text.removeprefix("\ufeff")):  # a byte order mark
            if isinstance(element, javaproperties.KeyValue):
                name = element.key.removeprefix("option.")
                settings.append(LmiSetting(name, element.value.strip(), label, line, element.key))
            line += element.source.count("\n")
    except javaproperties.InvalidUEscapeError as error:
        raise UnreadableSettings(f"{label}:{line}: {error}") from None
    return settings


def read_environment(text: str, label: str) -> list[LmiSetting]:
    """Returns the variables of a container: lines `KEY=VALUE`, or JSON: a mapping, a list of `{name, value}` as in a
    task definition, or one of these below `Environment`, in a SageMaker model, as its `describe-model` prints it. Of
    that the model's data and the image are settings, too. Raises UnreadableSettings."""
    pairs = _from_json(text, label) if text.lstrip().startswith(("{", "[")) else _from_lines(text, label)
    return [
        LmiSetting(name, value, label, line, variable)
        for variable, value, line in pairs
        if value and (name := _property_of(variable))
    ]


def merged(files: Iterable[LmiSetting], environment: Iterable[LmiSetting]) -> tuple[list[LmiSetting], list[LmiSetting]]:
    """Returns the settings that count, and those that they hide. Of a file the last counts, and the file before the
    environment; there `HF_...`, which LMI writes to a file, before `OPTION_...`, and the others are defaults."""
    ranked = sorted(environment, key=lambda setting: not setting.written.startswith("OPTION_"))
    ranked.sort(key=lambda setting: not setting.written.startswith("HF_"))
    chosen: dict[str, LmiSetting] = {}
    every = [*reversed(list(files)), *ranked]
    for setting in every:
        chosen.setdefault(setting.name, setting)
    counted = [setting for setting in every if chosen[setting.name] is setting]
    in_order = sorted(counted, key=lambda setting: (setting in ranked, setting.line))
    return in_order, [setting for setting in every if chosen[setting.name] is not setting]


def _property_of(variable: str) -> str:
    """Returns LMI's property of a variable; the variable itself if it is of another program."""
    for prefix in ("OPTION_", "ARGS_"):
        if variable.startswith(prefix) and len(variable) > len(prefix):
            name = variable.removeprefix(prefix)
            name = name.lower() if _SNAKE_CASE.fullmatch(name) else name
            return "entryPoint" if name == "entrypoint" else name
    return _VARIABLES.get(variable, variable)


def _from_lines(text: str, label: str) -> Iterator[tuple[str, str, int]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _ASSIGNMENT.fullmatch(line)
        if match is None:
            raise UnreadableSettings(f"{label}:{number}: not a line KEY=VALUE: {line.strip()[:60]}")
        value = match[2].strip()
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        yield match[1], value, number


def _from_json(text: str, label: str) -> Iterator[tuple[str, str, int]]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UnreadableSettings(f"{label}: not JSON: {error}") from None
    variables = _environment(value)
    if variables is None:
        raise UnreadableSettings(f"{label}: no variables: give a mapping, or a list of name and value")
    for name, content in variables.items():
        before = text[: max(0, text.find(json.dumps(name)))]
        yield name, content if isinstance(content, str) else json.dumps(content), before.count("\n") + 1


def _environment(value: Any) -> Mapping[str, Any] | None:
    if isinstance(value, list) and all(isinstance(item, dict) and "name" in item for item in value):
        return {str(item["name"]): item.get("value", "") for item in value}
    if not isinstance(value, dict):
        return None
    for key in _CONTAINERS:
        containers = value[key] if isinstance(value.get(key), list) else [value.get(key)]
        if len(containers) == 1 and isinstance(containers[0], dict):
            return _environment(containers[0])
    for key in _ENVIRONMENTS:
        if isinstance(value.get(key), dict | list):
            variables = _environment(value[key])
            return None if variables is None else {**_container(value), **variables}
    if isinstance(value.get(IMAGE), str):
        return _container(value)
    return value if all(not isinstance(item, dict | list) for item in value.values()) else None


def _container(value: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a container of a SageMaker model says beside its environment."""
    source = value.get(MODEL_DATA)
    data = source.get("S3DataSource") if isinstance(source, dict) else None
    uri = data.get("S3Uri") if isinstance(data, dict) else value.get("ModelDataUrl")
    return {name: text for name, text in ((MODEL_DATA, uri), (IMAGE, value.get(IMAGE))) if isinstance(text, str)}
