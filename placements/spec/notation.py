"""The notations of single values in a spec: their types, validators, and descriptions for problems."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StrictInt,
    WithJsonSchema,
)

from placements.facts.core_range import CoreRange

TYPE_IN_WORDS = "x-type"
"""The JSON Schema keyword that holds a field's type as `reference` writes it. Editors ignore it."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)
NAME_RULE = "letters, digits, '.', '_' and '-', at most 63 of them, beginning with a letter or digit"
ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}", re.ASCII)
ALIAS_RULE = "letters, digits, '.', '_', '-', ':' and '/', at most 128 of them, beginning with a letter or digit"
_BUCKET = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?", re.ASCII)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_REVISION = re.compile(r"(?!.*\.\.)(?=.{1,255}$)[A-Za-z0-9][\w.+-]*(/[A-Za-z0-9][\w.+-]*)*", re.ASCII)
MAX_PATH_BYTES = 3072  # of a folder: Linux takes 4095 with the names of the files below
MAX_NAME_BYTES = 255
_PATH_STARTS = ("/", "./", "../", "~")

SourceKind = Literal["path", "s3", "hub"]


@dataclass(frozen=True)
class Reported:
    """Metadata of a type: how `parse` reports a value that it cannot read. "" where the type itself says enough."""

    wanted: str = ""  # what the value must be, in words
    id: str = "wrong-type"  # of a value that a validator rejects
    hint: str = ""  # for such a value
    bound_hint: str = ""  # for a number out of range


@dataclass(frozen=True, order=True)
class CorePin:
    """The required place of one replica: a range, on one host or (``host`` None) on any."""

    cores: CoreRange
    host: str | None = None

    @classmethod
    def parse(cls, text: str) -> CorePin:
        """Parses "0-7" or "inf2.48xlarge/0:0-7". Raises ValueError with a one-sentence reason."""
        host, colon, cores = text.rpartition(":")
        if colon and not host:
            raise ValueError(f'"{text}" has no host before the colon; write "0-7" or "inf2.48xlarge/0:0-7"')
        return cls(CoreRange.parse(cores), host or None)

    def __str__(self) -> str:
        return f"{self.host}:{self.cores}" if self.host else str(self.cores)


_RANGE_TEXT = re.compile(r"\s*(\d{1,3})\s*(?:(?:-|\.\.|:|to)\s*(\d{1,3}))?\s*")


def ranges_in(value: object) -> tuple[CoreRange, ...]:
    """Returns the ranges of cores that a value in another notation means, with adjacent ones joined; () if it means
    none."""
    items = value if isinstance(value, list) else str(value).split(",")
    cores: set[int] = set()
    for item in items if isinstance(value, list | str | int) and not isinstance(value, bool) else ():
        match = _RANGE_TEXT.fullmatch(str(item))
        if match is None:
            return ()
        ends = sorted((int(match[1]), int(match[2] or match[1])))
        cores |= set(range(ends[0], ends[1] + 1))
    firsts = [core for core in sorted(cores) if core - 1 not in cores]
    lasts = [core for core in sorted(cores) if core + 1 not in cores]
    return tuple(map(CoreRange, firsts, lasts))


def _pin(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, str | int):
        return value
    return CorePin.parse(str(value))


def _reserved(value: object) -> object:
    """[20, "22-23"] -> (20, 22, 23)."""
    if not isinstance(value, list | tuple):
        return value
    cores: list[int] = []
    for item in value:
        if isinstance(item, bool) or not isinstance(item, str | int):
            raise ValueError('reserved cores are a list of core ids and ranges, like [20, "22-23"]')
        cores.extend(CoreRange.parse(str(item)))
    return tuple(sorted(set(cores)))


def _matching(pattern: re.Pattern[str], rule: str) -> AfterValidator:
    def judge(value: str) -> str:
        if not pattern.fullmatch(value):
            raise ValueError(f'"{value}" is not {rule}')
        return value

    return AfterValidator(judge)


def _source(value: str) -> str:
    source_kind(value)
    return value


def is_path(source: str) -> bool:
    """Returns whether the source is written as a folder of the host."""
    return source.startswith(_PATH_STARTS) or source in (".", "..")


def resolved(path: str, folder: str | Path) -> str:
    """Returns a path in a folder, absolute if ``folder`` is. `~` is expanded, and homes of other users are not."""
    return str(Path(folder) / (Path(path).expanduser() if path.startswith("~/") or path == "~" else path))


def unusable_path(path: str) -> str | None:
    """Returns why no file system can have that path; None if it can."""
    if "\0" in path:
        return "has a NUL character"
    data = path.encode("utf-8", "surrogatepass")
    if len(data) > MAX_PATH_BYTES:
        return f"has {len(data)} bytes; a path has at most {MAX_PATH_BYTES}"
    longest = max(map(len, data.split(b"/")))
    return f"has a name of {longest} bytes; a name has at most {MAX_NAME_BYTES}" if longest > MAX_NAME_BYTES else None


def name_from(source: str) -> str:
    """Returns a name for the model of a source: its last part, with the characters of a name."""
    last = re.sub(r"[^A-Za-z0-9._-]+", "-", source.rstrip("/").rpartition("/")[2])
    return last.strip("-._")[:56] or "model"


def source_kind(source: str) -> SourceKind:
    """Returns "path" for / ./ ../ or ~, "s3" for s3://, else "hub". Raises ValueError for an invalid source."""
    if is_path(source):
        return "path"
    if source.startswith("s3://"):
        if not _BUCKET.fullmatch(source):
            raise ValueError(f'"{source}" has no valid S3 bucket; write s3://bucket/prefix')
        return "s3"
    if "://" in source:
        raise ValueError(f'"{source}" has an unknown scheme; a source is a path, s3://bucket/prefix or a hub id')
    if not _HUB_ID.fullmatch(source):
        raise ValueError(f'"{source}" is not a hub id like "org/model"; a path begins with / ./ ../ or ~')
    return "hub"


def _location(value: str) -> str:
    if not value.startswith(("s3://", *_PATH_STARTS)):
        raise ValueError(f'"{value}" is not a path, which begins with / ./ ../ or ~, or s3://bucket/prefix')
    source_kind(value)
    return value


def _cron(value: str) -> str:
    if len(value.split()) != 5:
        raise ValueError(f'"{value}" is not a cron expression of five fields: minute, hour, day, month, weekday')
    try:
        CronSim(value, datetime(2000, 1, 1, tzinfo=timezone.utc))
    except CronSimError as error:
        raise ValueError(f'"{value}" is not a cron expression: {str(error).lower()}') from error
    return value


def _zone(value: str) -> str:
    try:
        ZoneInfo(value)
    except (KeyError, ValueError, OSError) as error:
        raise ValueError(f'"{value}" is not a time zone') from error
    return value


def _interpreter(value: str) -> str:
    if not value.strip():
        raise ValueError("an interpreter is a path, like ~/envs/nxdi/bin/python")
    return value


_UNITS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
DURATION = "(?=[0-9])" + "".join(rf"([0-9]{{1,9}}(\.[0-9]{{1,3}})?{unit})?" for unit in _UNITS)
_DURATION_TEXT = re.compile(DURATION)


def _seconds(value: object) -> object:
    """Parses a duration: "1h30m" -> 5400.0. Returns other values unchanged, for the field's type to reject."""
    match = _DURATION_TEXT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return value
    return sum(float(part[:-1]) * _UNITS[part[-1]] for part in match.groups()[::2] if part)


def _or(known: tuple[int, ...]) -> str:
    return " or ".join(filter(None, (", ".join(map(str, known[:-1])), str(known[-1]))))


def choice(*known: int) -> BeforeValidator:
    """Rejects a boolean, which equals a number."""

    def judge(value: object) -> object:
        if isinstance(value, bool):
            raise ValueError(f"{str(value).lower()} is a boolean; it must be {_or(known)}")
        return value

    return BeforeValidator(judge)


_RANGE_HINT = 'a range is written like "0-7", with its host like "inf2.48xlarge/0:0-7"'
_SOURCE_HINT = "a source is a path, s3://bucket/prefix or a hub id like org/model"

T = TypeVar("T")
Name = Annotated[str, _matching(NAME, f"a usable name: {NAME_RULE}"), Reported(id="bad-name")]
Alias = Annotated[str, _matching(ALIAS, f"a usable alias: {ALIAS_RULE}"), Reported("a name", id="bad-name")]
Source = Annotated[str, AfterValidator(_source), Reported(id="bad-source", hint=_SOURCE_HINT)]
Location = Annotated[str, AfterValidator(_location), Reported(id="bad-source")]
_REVISION_WANTED = "a branch, tag or commit"
HubRevision = Annotated[str, _matching(_REVISION, _REVISION_WANTED), Reported(_REVISION_WANTED, id="bad-revision")]
Interpreter = Annotated[str, AfterValidator(_interpreter), Reported("a path, like ~/envs/nxdi/bin/python")]
Zone = Annotated[
    str,
    AfterValidator(_zone),
    Reported(
        "a time zone, like Europe/Berlin",
        id="unknown-timezone",
        hint="use a name of the IANA database, like Europe/Berlin or UTC",
    ),
]
Cron = Annotated[str, AfterValidator(_cron)]
CRON_WANTED = 'a cron expression, like "0 8 * * MON-FRI"'
Count = Annotated[int, Field(strict=True)]
Seconds = Annotated[
    T, BeforeValidator(_seconds), Reported("seconds, or a duration like 10m or 1h30m")
]  # `Seconds[float]`
Milliseconds = Annotated[float, Reported("a number of milliseconds")]
Gib = Annotated[float, Reported("a number of GiB")]
Lengths = Annotated[
    tuple[Annotated[StrictInt, Field(ge=1, le=1 << 24)], ...],
    Field(strict=False),
    Reported("a list of whole numbers, like [128, 512]"),
]
PinField = Annotated[
    CorePin,
    BeforeValidator(_pin),
    Reported('a range, like "0-7"', id="bad-range", hint=_RANGE_HINT),
    PlainSerializer(str),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": r"^(.+:)?[0-9]{1,3}(-[0-9]{1,3})?$"},
                {"type": "integer", "minimum": 0},
            ]
        }
    ),
]
ReservedCores = Annotated[
    tuple[int, ...],
    BeforeValidator(_reserved),
    Reported('a list of core ids, like [20, "22-23"]', id="bad-range", hint=_RANGE_HINT),
    WithJsonSchema(
        {
            "type": "array",
            "items": {
                "anyOf": [
                    {"type": "integer", "minimum": 0},
                    {"type": "string", "pattern": "^[0-9]{1,3}(-[0-9]{1,3})?$"},
                ]
            },
        }
    ),
]


def in_words(type_: str, **more: Any) -> dict[str, Any]:
    """Returns the type in words, for the reference, and further keywords."""
    return {TYPE_IN_WORDS: type_, **more}


class Frozen(BaseModel):
    """The base of the mappings of a spec."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True, use_attribute_docstrings=True
    )
    wanted: ClassVar[str] = "a mapping"  # in problems
