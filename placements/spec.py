"""The schema of a spec: what one YAML file wishes for. Values only; `parse` reads them from text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StrictInt,
    WithJsonSchema,
    model_validator,
)

from placements.checkpoints import Checkpoint
from placements.cores import CoreRange
from placements.engines import Dtype, Engine, default_dtype
from placements.places import Places

DEFAULT_MAX_LEN = 2048
"""Tokens of a slot when the spec says nothing and the checkpoint allows as many."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)
NAME_RULE = "letters, digits, '.', '_' and '-', at most 63 of them, beginning with a letter or digit"
_BUCKET = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?", re.ASCII)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_PATH_STARTS = ("/", "./", "../", "~")

SourceKind = Literal["path", "s3", "hub"]
GroupQueryAttention = Literal["shard-over-heads", "shard-over-batch", "replicated-heads", "all-gather-heads"]
Strategy = Literal["auto", "surge", "in_place", "borrow", "hold"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True, order=True)
class Pin:
    """Where one replica must lie: a range, on one host or (``host`` None) on any."""

    cores: CoreRange
    host: str | None = None

    @classmethod
    def parse(cls, text: str) -> Pin:
        """Read "0-7" or "inf2.48xlarge/0:0-7". Raises ValueError with one sentence that says what is wrong."""
        host, colon, cores = text.rpartition(":")
        if colon and not host:
            raise ValueError(f'"{text}" names no host before the colon; write "0-7" or "inf2.48xlarge/0:0-7"')
        return cls(CoreRange.parse(cores), host or None)

    def __str__(self) -> str:
        return f"{self.host}:{self.cores}" if self.host else str(self.cores)


def _pin(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, str | int):
        return value
    return Pin.parse(str(value))


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


def _name(value: str) -> str:
    if not NAME.fullmatch(value):
        raise ValueError(f'"{value}" is not a usable name: {NAME_RULE}')
    return value


def _source(value: str) -> str:
    source_kind(value)
    return value


def source_kind(source: str) -> SourceKind:
    """A path begins with / ./ ../ or ~, S3 with s3://, anything else is a hub id. ValueError where it can be none."""
    if source.startswith(_PATH_STARTS) or source in (".", ".."):
        return "path"
    if source.startswith("s3://"):
        if not _BUCKET.fullmatch(source):
            raise ValueError(f'"{source}" names no valid S3 bucket; it is written s3://bucket/prefix')
        return "s3"
    if "://" in source:
        raise ValueError(f'"{source}" has an unknown scheme; a source is a path, s3://bucket/prefix or a hub id')
    if not _HUB_ID.fullmatch(source):
        raise ValueError(f'"{source}" is not a hub id like "org/model"; a path begins with / ./ ../ or ~')
    return "hub"


def _location(value: str) -> str:
    if not value.startswith(("s3://", *_PATH_STARTS)):
        raise ValueError(f'"{value}" is neither a path, which begins with / ./ ../ or ~, nor s3://bucket/prefix')
    source_kind(value)
    return value


Name = Annotated[str, AfterValidator(_name)]
Count = Annotated[int, Field(strict=True)]
PinField = Annotated[
    Pin,
    BeforeValidator(_pin),
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


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True)


class Replicas(_Frozen):
    """How many replicas of a model may run. ``max`` defaults to ``min``, at least 1; ``min`` to 1.

    That min does not exceed max is a rule of `checks`, so that it can be told beside all other findings.
    """

    min: int = Field(1, ge=0, le=1000)
    max: int = Field(1, ge=1, le=1000)

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, value: Any) -> Any:
        """2 -> {min: 2, max: 2}."""
        if type(value) is int:  # not a bool
            return {"min": value, "max": value}
        if isinstance(value, Mapping) and "max" not in value and type(value.get("min")) is int:
            return {**value, "max": max(1, value["min"])}
        return value


class Reserve(_Frozen):
    """What replicas may not use. ``vcpus`` None: the default of the host (4 %, at least 1; 0 on emulated hosts)."""

    vcpus: int | None = Field(None, ge=0, le=4096)
    memory_gib: float = Field(0.0, ge=0, le=1 << 20)
    cores: ReservedCores = ()


class Spread(_Frozen):
    """At most ``host`` replicas of the model on one host. ``spread: host`` is one on each."""

    host: int = Field(1, ge=1, le=1000)

    @model_validator(mode="before")
    @classmethod
    def _word(cls, value: Any) -> Any:
        """ "host" -> {host: 1}."""
        return {"host": 1} if value == "host" else value


class Draft(_Frozen):
    """A smaller model of the same vocabulary, which guesses ``k`` tokens ahead of each step of its model."""

    source: Annotated[str, AfterValidator(_source)]
    k: int = Field(4, ge=1, le=16)


class Update(_Frozen):
    """How a model's processes are replaced when the spec changes."""

    strategy: Strategy = "auto"  # auto: the one with the least predicted outage
    hold_s: float = Field(30.0, ge=0, le=3600)  # auto lets requests wait for a swap of at most so long
    progress_deadline_s: float = Field(900.0, gt=0, le=86_400)  # without a new replica for so long it has failed
    rollback: bool = True  # a failed update goes back to the last revision that was complete
    max_failures: int = Field(3, ge=1, le=100)  # failed starts in a row of one new replica: it has failed


class Deadlines(_Frozen):
    """How long a replica may take, in seconds."""

    start_s: float = Field(900.0, gt=0, le=86_400)  # from its start to its first generation
    step_s: float = Field(120.0, gt=0, le=86_400)  # one prefill or decode
    drain_s: float = Field(300.0, ge=0, le=86_400)  # for its requests to end before it is stopped


class HostsSpec(_Frozen):
    """Machines of one type: ``instance`` for real ones, or ``emulate``; exactly one of the two."""

    instance: str | None = None
    emulate: str | None = None
    count: int = Field(1, ge=1, le=4096)
    lnc: Literal[1, 2] | None = None  # physical cores in a logical one, on trn2; None: 2
    reserve: Reserve = Reserve()


class ModelSpec(_Frozen):
    """One model of the fleet."""

    name: Name
    source: Annotated[str, AfterValidator(_source)]
    engine: Engine = "auto"
    dtype: Dtype | None = None  # None: by engine, see ``dtype_on``
    tp_degree: int = Field(1, ge=1, le=128)
    max_batch: int = Field(4, ge=1, le=1024)  # slots; small, since every slot's KV cache is allocated at once
    max_len: int | None = Field(None, ge=2, le=1 << 24)  # tokens of a slot; None: see ``length``
    cores: tuple[PinField, ...] = Field((), strict=False)
    replicas: Replicas = Replicas()
    neff_cache: Annotated[str, AfterValidator(_location)] | None = None
    priority: int = Field(0, ge=-1_000_000, le=1_000_000)  # strict: a lower one never costs a higher one a core
    max_queue: int = Field(256, ge=0, le=1_000_000)  # waiting requests
    threads: Literal["share", "lmi"] | Annotated[StrictInt, Field(ge=1, le=1024)] = "share"
    allow_head_padding: bool = False  # heads that tp_degree does not divide, for engines that pad them with zeros
    allow_degrees: tuple[Annotated[StrictInt, Field(ge=1, le=128)], ...] = Field((), strict=False)
    hbm_overhead_gib: float | None = Field(None, ge=0, le=1024)  # per core; None: the estimate of `memory`
    allow_pickle: bool = False  # read weights that are a pickle, the draft's too, on the cpu engine
    draft: Draft | None = None  # speculative decoding, on the cpu engine
    update: Update = Update()
    deadlines: Deadlines = Deadlines()
    spread: Spread | None = None  # anti-affinity
    host_memory_gib: float | None = Field(None, ge=0, le=1 << 20)  # of one replica; None: the estimate of `memory`
    quantize: Literal["int8"] | None = None  # the weights, on the Neuron engines
    group_query_attention: GroupQueryAttention | None = None  # how KV heads are dealt out; transformers-neuronx only
    engine_options: dict[str, bool | int | float | str] = {}  # what no field says; see `engines.ENGINE_OPTIONS`
    base_dir: str = Field(".", exclude=True)  # relative sources begin here
    broken: frozenset[str] = Field(frozenset(), exclude=True, repr=False)  # fields that could not be read

    @property
    def source_kind(self) -> SourceKind:
        """path, s3 or hub."""
        return source_kind(self.source) if self.source else "path"

    @property
    def source_path(self) -> str | None:
        """The absolute form of a path source as far as ``base_dir`` is absolute; None for S3 and the hub."""
        return self._resolved(self.source) if self.source_kind == "path" else None

    @property
    def draft_kind(self) -> SourceKind | None:
        """path, s3 or hub; None without a draft."""
        return None if self.draft is None else source_kind(self.draft.source)

    @property
    def draft_path(self) -> str | None:
        """The draft's source, as ``source_path``; None without a draft too."""
        return self._resolved(self.draft.source) if self.draft and self.draft_kind == "path" else None

    @property
    def neff_cache_location(self) -> str | None:
        """The NEFF cache: s3://..., or a path resolved like the source."""
        if self.neff_cache is None or self.neff_cache.startswith("s3://"):
            return self.neff_cache
        return self._resolved(self.neff_cache)

    def _resolved(self, path: str) -> str:
        expanded = Path(path).expanduser() if path.startswith("~/") or path == "~" else Path(path)
        return str(Path(self.base_dir) / expanded)

    @property
    def started_with(self) -> tuple[object, ...]:
        """What a replica is told at its start: another value means another process."""
        options = tuple(sorted(self.engine_options.items()))
        source = self.source_path or self.source
        draft = None if self.draft is None else (self.draft_path or self.draft.source, self.draft.k)
        engine = (self.engine, self.dtype, self.tp_degree, self.max_batch, self.max_len, self.threads)
        attention = (self.quantize, self.group_query_attention)
        return (source, *engine, options, draft, self.allow_pickle, *attention)

    def dtype_on(self, engine: Engine) -> Dtype:
        """The weights' and the KV cache's type under a resolved engine (`engines.resolve`)."""
        return self.dtype or default_dtype(engine)

    def length(self, checkpoint: Checkpoint | None) -> int:
        """Tokens of a slot: ``max_len``, or 2048, or what the checkpoint's positions allow if that is less."""
        if self.max_len is not None:
            return self.max_len
        positions = checkpoint.max_positions if checkpoint else None
        return DEFAULT_MAX_LEN if positions is None else min(DEFAULT_MAX_LEN, positions)


class Spec(_Frozen):
    """A whole file. Where its keys are written is no part of its value."""

    version: Literal[1] = 1
    name: Name = "fleet"
    hosts: tuple[HostsSpec, ...] = ()  # (): what is there; see `hosts_for`
    models: tuple[ModelSpec, ...] = ()
    base_dir: str = Field(".", exclude=True)
    places: Places = Field(Places(), exclude=True, repr=False)
    broken: frozenset[str] = Field(frozenset(), exclude=True, repr=False)  # top-level keys that could not be read

    @property
    def filename(self) -> str:
        """The name that problems give as the place."""
        return self.places.filename

    def where(self, *path: str | int) -> str:
        """ "file:line:column" of a key, or of the nearest written key above it."""
        return self.places.where(*path)

    def model(self, name: str) -> ModelSpec | None:
        """The model of that name."""
        return next((model for model in self.models if model.name == name), None)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a spec file, for editors. Looser than `parse` and `checks`, never stricter."""
    internal = {"base_dir", "broken", "places", "name"}
    generated = ModelSpec.model_json_schema()
    definitions = generated.pop("$defs")
    definitions["Replicas"] = {"anyOf": [{"type": "integer", "minimum": 1}, definitions["Replicas"]]}
    model = {key: value for key, value in generated["properties"].items() if key not in internal}
    defaults = {key: value for key, value in model.items() if key not in ("source", "cores", "draft")}
    hosts = HostsSpec.model_json_schema()
    definitions.update(hosts.pop("$defs"))
    name = {"type": "string", "pattern": f"^{NAME.pattern}$"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "corewright spec",
        "type": "object",
        "additionalProperties": False,
        "required": ["models"],
        "properties": {
            "version": {"const": 1},
            "name": name,
            "hosts": hosts,
            "defaults": {"type": "object", "additionalProperties": False, "properties": defaults},
            "models": {
                "type": "object",
                "minProperties": 1,
                "propertyNames": name,
                "additionalProperties": {"type": "object", "additionalProperties": False, "properties": model},
            },
        },
        "$defs": definitions,
    }
