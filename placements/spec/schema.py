"""The schema of a spec: what one YAML file wishes for. Values only; `parse` reads them from text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, get_args
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
    model_validator,
)

from placements.facts.checkpoints import Checkpoint
from placements.facts.core_range import CoreRange
from placements.facts.engines import NAMED_ENGINES, Dtype, Engine, default_dtype
from placements.facts.topology import TOPOLOGIES
from placements.spec.source_positions import SourcePositions

DEFAULT_MAX_LEN = 2048
"""Tokens of a slot when the spec says nothing and the checkpoint allows as many."""

MAX_HOSTS = 4096
"""Machines of one spec, of all types together."""

TYPE_IN_WORDS = "x-type"
"""The keyword of the JSON Schema that holds a field's type as `reference` writes it. Editors take no notice of it."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)
NAME_RULE = "letters, digits, '.', '_' and '-', at most 63 of them, beginning with a letter or digit"
ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}", re.ASCII)
ALIAS_RULE = "letters, digits, '.', '_', '-', ':' and '/', at most 128 of them, beginning with a letter or digit"
_BUCKET = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?", re.ASCII)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][\w.+-]*(/[A-Za-z0-9][\w.+-]*)*", re.ASCII)
_PATH_STARTS = ("/", "./", "../", "~")

SourceKind = Literal["path", "s3", "hub"]
GroupQueryAttention = Literal["shard-over-heads", "shard-over-batch", "replicated-heads", "all-gather-heads"]
GROUP_QUERY_ATTENTIONS: tuple[GroupQueryAttention, ...] = get_args(GroupQueryAttention)
Quantization = Literal["int8", "fp8"]
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
Sampling = Literal["host", "device"]
SAMPLINGS: tuple[Sampling, ...] = get_args(Sampling)
OPTLEVELS = (1, 2, 3)  # of neuronx-cc
ToolParser = Literal["auto", "hermes", "llama3", "mistral", "none"]
TOOL_PARSERS: tuple[ToolParser, ...] = get_args(ToolParser)
Strategy = Literal["auto", "surge", "in_place", "borrow", "hold"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
QueueOrder = Literal["fair", "deadline"]
QUEUE_ORDERS: tuple[QueueOrder, ...] = get_args(QueueOrder)


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


def _alias(value: str) -> str:
    if not ALIAS.fullmatch(value):
        raise ValueError(f'"{value}" is not a usable alias: {ALIAS_RULE}')
    return value


def _source(value: str) -> str:
    source_kind(value)
    return value


def is_path(source: str) -> bool:
    """Whether it is written as a folder of the host."""
    return source.startswith(_PATH_STARTS) or source in (".", "..")


def source_kind(source: str) -> SourceKind:
    """A path begins with / ./ ../ or ~, S3 with s3://, anything else is a hub id. ValueError where it can be none."""
    if is_path(source):
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


def _revision(value: str) -> str:
    if len(value) > 255 or ".." in value or not _REVISION.fullmatch(value):
        raise ValueError(f'"{value}" is no branch, tag or commit of the hub')
    return value


def _location(value: str) -> str:
    if not value.startswith(("s3://", *_PATH_STARTS)):
        raise ValueError(f'"{value}" is neither a path, which begins with / ./ ../ or ~, nor s3://bucket/prefix')
    source_kind(value)
    return value


def _cron(value: str) -> str:
    if len(value.split()) != 5:
        raise ValueError(f'"{value}" is no cron expression of five fields: minute, hour, day, month, weekday')
    try:
        CronSim(value, datetime(2000, 1, 1, tzinfo=timezone.utc))
    except CronSimError as error:
        raise ValueError(f'"{value}" is no cron expression: {str(error).lower()}') from error
    return value


def _zone(value: str) -> str:
    try:
        ZoneInfo(value)
    except (KeyError, ValueError, OSError) as error:
        raise ValueError(f'"{value}" is not the name of a time zone') from error
    return value


def _interpreter(value: str) -> str:
    if not value.strip():
        raise ValueError("an interpreter is a path, like ~/envs/nxdi/bin/python")
    return value


def _or(known: tuple[int, ...]) -> str:
    return " or ".join(filter(None, (", ".join(map(str, known[:-1])), str(known[-1]))))


def _choice(*known: int) -> BeforeValidator:
    """Keeps a boolean from being taken for the number that it equals."""

    def judge(value: object) -> object:
        if isinstance(value, bool):
            raise ValueError(f"{str(value).lower()} is a boolean; it must be {_or(known)}")
        return value

    return BeforeValidator(judge)


Name = Annotated[str, AfterValidator(_name)]
HubRevision = Annotated[str, AfterValidator(_revision)]
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


def _words(type_: str, **more: Any) -> dict[str, Any]:
    """The type in words, for the reference, where the schema alone does not say it well; and further keywords."""
    return {TYPE_IN_WORDS: type_, **more}


_UNITS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
_DURATION = "(?=[0-9])" + "".join(rf"([0-9]{{1,9}}(\.[0-9]{{1,3}})?{unit})?" for unit in _UNITS)
_DURATION_TEXT = re.compile(_DURATION)


def _seconds(value: object) -> object:
    """ "1h30m" -> 5400.0. What is not a duration stays as it is, for the type of the field to reject."""
    match = _DURATION_TEXT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return value
    return sum(float(part[:-1]) * _UNITS[part[-1]] for part in match.groups()[::2] if part)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True)

    @model_validator(mode="before")
    @classmethod
    def _durations(cls, value: Any) -> Any:
        """{"idle_s": "10m"} -> {"idle_s": 600.0}."""
        if not isinstance(value, Mapping):
            return value
        return {key: _seconds(item) if str(key).endswith("_s") else item for key, item in value.items()}


class Replicas(_Frozen):
    """How many replicas of a model may run. ``max`` defaults to ``min``, at least 1; ``min`` to 1.

    That min does not exceed max is a rule of `checks`, so that it can be told beside all other findings.
    """

    min: int = Field(
        1,
        ge=0,
        le=1000,
        description="How many replicas run at least, unless `scale`, `load`, `unload` or a schedule says otherwise. "
        "With 0 the first request starts one.",
    )
    max: int = Field(
        1,
        ge=1,
        le=1000,
        description="The most that may run. Unless given it equals `min`, at least 1. What is above `min` starts by "
        "itself as requests ask for it, unless `scaling.auto` is false; `scale` goes up to it too.",
    )

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

    vcpus: int | None = Field(
        None,
        ge=0,
        le=4096,
        description="vCPUs left to the system: the first ones. Unset: 4 % of them rounded up, at least 1; on emulated "
        "hosts 0.",
    )
    memory_gib: float = Field(
        0.0,
        ge=0,
        le=1 << 20,
        description="GiB of the host's memory left to the system. Emulated hosts share the machine's: there it means "
        "nothing.",
    )
    cores: ReservedCores = Field(
        (),
        description='NeuronCores that no replica gets, like `[20, "22-23"]`.',
        json_schema_extra=_words("list of core ids and ranges"),
    )


class Spread(_Frozen):
    """At most ``host`` replicas of the model on one host. ``spread: host`` is one on each."""

    host: int = Field(1, ge=1, le=1000, description="The most replicas of the model on one host.")

    @model_validator(mode="before")
    @classmethod
    def _word(cls, value: Any) -> Any:
        """ "host" -> {host: 1}."""
        return {"host": 1} if value == "host" else value


class Draft(_Frozen):
    """A smaller model of the same vocabulary, which guesses ``k`` tokens ahead of each step of its model."""

    source: Annotated[str, AfterValidator(_source)] = Field(
        description="A smaller model of the same vocabulary; a path, an S3 address or a hub id, like `source` above."
    )
    k: int = Field(4, ge=1, le=16, description="How many tokens it guesses ahead of each step.")
    revision: HubRevision | None = Field(
        None, description="Of a hub id: a branch, tag or commit, like `revision` of the model."
    )


class Buckets(_Frozen):
    """The lengths that an engine of Neuron devices is compiled for, in tokens, ascending."""

    prefill: tuple[Annotated[StrictInt, Field(ge=1, le=1 << 24)], ...] = Field(
        (),
        strict=False,
        description="Prompt lengths. The longest is the longest prompt. Unset: 128, 256 and so on, the last `max_len`.",
    )
    decode: tuple[Annotated[StrictInt, Field(ge=1, le=1 << 24)], ...] = Field(
        (),
        strict=False,
        description="KV cache lengths. The longest is `max_len`. Unset: 128, 256 and so on, the last `max_len`.",
    )


class Compiler(_Frozen):
    """How neuronx-cc compiles a model."""

    optlevel: Annotated[Literal[1, 2, 3] | None, _choice(*OPTLEVELS)] = Field(
        None, description="1 compiles fast, 3 makes the fastest code. Unset: the compiler's own, 2."
    )
    flags: str = Field("", description="Further flags for neuronx-cc, as in `NEURON_CC_FLAGS`.")
    workers: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Graphs compiled at once; each takes memory of the host. Unset: one for each graph.",
    )


class Update(_Frozen):
    """How a model's processes are replaced when the spec changes."""

    strategy: Strategy = Field(
        "auto",
        description="How a new replica comes by its cores. `auto` takes what is predicted to interrupt least.",
    )
    max_swap_s: float = Field(
        30.0,
        ge=0,
        le=3600,
        description="The longest predicted swap, in seconds, for which `auto` takes `hold`. How long a request then "
        "waits at most is `scaling.hold_s`.",
    )
    progress_deadline_s: float = Field(
        900.0,
        gt=0,
        le=86_400,
        description="Seconds without progress, which is a new replica that becomes ready or an old one that goes; then "
        "the update has failed. The time that a new replica takes to start, within its `deadlines`, does not count.",
    )
    rollback: bool = Field(
        True, description="Go back by itself to the last complete revision when the update has failed."
    )
    max_failures: int = Field(
        3, ge=1, le=100, description="A new replica that fails so often in a row makes the update fail."
    )


class Deadlines(_Frozen):
    """How long a replica may take, in seconds."""

    start_s: float = Field(
        900.0,
        gt=0,
        le=86_400,
        description="Seconds for a replica to come up, until its first generation, without the times that it is "
        "fetched and compiles; then it is `start-deadline`.",
    )
    fetch_s: float = Field(
        14_400.0,
        gt=0,
        le=604_800,
        description="Seconds for what it loads to be fetched to its host, beside `start_s`; then it is "
        "`fetch-deadline`. What has arrived by then is kept.",
    )
    compile_s: float = Field(
        14_400.0,
        gt=0,
        le=604_800,
        description="Seconds that it may compile, or wait for another replica that compiles the same, beside "
        "`start_s`; then it is `compile-deadline`.",
    )
    step_s: float = Field(
        120.0, gt=0, le=86_400, description="Seconds for one step of the engine; then it is `step-stuck`."
    )
    drain_s: float = Field(
        300.0,
        ge=0,
        le=86_400,
        description="Seconds for the requests of a replica to end that is replaced, moved or no longer wanted. What "
        "still runs is cut off then.",
    )


class Objectives(_Frozen):
    """What a request of the model may take, in milliseconds."""

    ttft_ms: float | None = Field(
        None,
        gt=0,
        le=86_400_000,
        description="Milliseconds until the first token. What comes later counts as late; the autoscaler works for few "
        "such requests.",
    )
    tpot_ms: float | None = Field(None, gt=0, le=86_400_000, description="Milliseconds between one token and the next.")
    queue_ms: float | None = Field(
        None, gt=0, le=86_400_000, description="Milliseconds that a request may wait for a slot."
    )


class Schedule(_Frozen):
    """Times at which a model has other bounds, from each ``start`` to the next ``end``."""

    start: Annotated[str, AfterValidator(_cron)] = Field(
        description="When it begins to hold: a cron expression of five fields, like `0 8 * * MON-FRI`."
    )
    end: Annotated[str, AfterValidator(_cron)] = Field(
        description="When it ends: a cron expression of five fields, like `0 18 * * MON-FRI`."
    )
    timezone: Annotated[str, AfterValidator(_zone)] = Field(
        "UTC", description="The zone in which `start` and `end` are meant, like `Europe/Berlin`."
    )
    min: int | None = Field(
        None, ge=0, le=1000, description="How many replicas run at least while it holds. Unset: `replicas.min`."
    )
    max: int | None = Field(
        None, ge=0, le=1000, description="The most that may run while it holds. Unset: `replicas.max`."
    )


class Scaling(_Frozen):
    """How the number of replicas follows the requests."""

    auto: bool = Field(
        True,
        description="Whether the number of replicas follows the requests, between `replicas.min` and `replicas.max`. "
        "With false there are `min`; a model of `min: 0` is still started by its first request.",
    )
    idle_s: float = Field(
        600.0,
        ge=0,
        le=31_536_000,
        description="Seconds without a request for inference after which a model of `min: 0` has no replica any more. "
        "They count from when its first replica was ready.",
    )
    hold_s: float = Field(
        300.0,
        ge=0,
        le=86_400,
        description="The longest that a request waits for a model without a ready replica: one of `min: 0` that it "
        "has started, or one whose replica an update swaps by `hold`.",
    )
    schedules: tuple[Schedule, ...] = Field(
        (),
        strict=False,
        description="Other bounds at certain times. See Schedules.",
        json_schema_extra=_words("list of mappings"),
    )
    worth_per_1000: float | None = Field(
        None,
        ge=0,
        le=1_000_000_000,
        description="What 1000 requests are worth, in the money of `hosts.price_per_core_hour`. Then a replica beyond "
        "`min` starts only where it is worth more than its cores cost. Unset: it starts there only if its load does "
        "not fit on those that are there.",
    )


class EngineSettings(_Frozen):
    """What holds for one engine on every host."""

    python: Annotated[str, AfterValidator(_interpreter)] | None = Field(
        None,
        description="The Python interpreter in which its replicas run: a path, relative to the spec file. It must have "
        "the fleet's Ray version and Python minor version. Unset: the fleet's own.",
    )


class HostsSpec(_Frozen):
    """Machines of one type: ``instance`` for real ones, or ``emulate``; exactly one of the two."""

    instance: str | None = Field(
        None,
        description="Real machines of this type. They are planned from a table of facts; none needs to be at hand. "
        "`up` starts only on such a machine.",
        json_schema_extra=_words("an instance type", enum=[*TOPOLOGIES, None]),
    )
    emulate: str | None = Field(
        None,
        description="The cores of this type, emulated on this machine. The CPUs and the memory are the real ones.",
        json_schema_extra=_words("an instance type", enum=[*TOPOLOGIES, None]),
    )
    count: int = Field(
        1,
        ge=1,
        le=MAX_HOSTS,
        description="How many of them. Emulated hosts share this machine's CPUs evenly, and `up` starts each with a "
        "Ray node of its own. Of real ones `up` serves one.",
    )
    lnc: Annotated[Literal[1, 2] | None, _choice(1, 2)] = Field(
        None,
        description="Physical cores in one logical NeuronCore, on trn2, which alone has the choice. With 1 there are "
        "twice as many cores, each with half of the HBM. Unset: 2.",
    )
    reserve: Reserve = Field(Reserve(), description="What replicas may not use, on each host.")
    price_per_core_hour: float = Field(
        0.0,
        ge=0,
        le=1_000_000,
        description="What an hour of one core costs, in any money. 0: the host is paid for anyway.",
    )


class Reach(Enum):
    """How far a change of a model's field reaches."""

    LIVE = "live"  # what runs goes on: the planner, the controller or the gateway takes notice
    PROCESS = "process"  # a replica is told of it at its start, or finds it in its environment
    SHAPE = "shape"  # as that, and a compiled graph depends on it


_T = TypeVar("_T")
Live = Annotated[_T, Reach.LIVE]
Process = Annotated[_T, Reach.PROCESS]
Shape = Annotated[_T, Reach.SHAPE]


class ModelSpec(_Frozen):
    """One model of the fleet. Each field but its name is `Live`, `Process` or `Shape`."""

    name: Name
    source: Shape[Annotated[str, AfterValidator(_source)]] = Field(
        description="Where the checkpoint is. A path begins with `/`, `./`, `../` or `~` and is relative to the spec "
        "file; `s3://bucket/prefix`; anything else is an id of the Hugging Face hub. The echo engine needs none. See "
        "[artifacts.md](artifacts.md)."
    )
    revision: Process[HubRevision | None] = Field(
        None,
        description="Of a hub id: the branch, tag or commit. A branch is looked up when the spec is applied, and every "
        "replica gets the commit that it stood at. Unset: `main`. Not in `defaults`.",
    )
    engine: Shape[Engine] = Field(
        "auto",
        description="What runs the model. `auto` is `cpu` on an emulated host; on a real one it is the Neuron engine "
        "that the host has and that serves the model. `up` starts no `optimum-neuron` and no `torch-neuronx`. See "
        "Engines.",
    )
    dtype: Shape[Dtype | None] = Field(
        None,
        description="The type of the weights and of the KV cache. Unset: `fp32` for `cpu` and `echo`, else `bf16`.",
    )
    tp_degree: Shape[int] = Field(
        1, ge=1, le=128, description="The tensor-parallel degree: the cores of one replica. See Degrees."
    )
    max_batch: Shape[int] = Field(
        4,
        ge=1,
        le=1024,
        description="Slots: the requests that one replica works on at once. The KV cache of every slot is allocated at "
        "the start.",
    )
    max_len: Shape[int | None] = Field(
        None,
        ge=2,
        le=1 << 24,
        description="Tokens of one slot, prompt and answer together. Unset: 2048, or the checkpoint's positions if "
        "these are fewer.",
    )
    cores: Live[tuple[PinField, ...]] = Field(
        (),
        strict=False,
        description='Pins, one range for each replica in order: `"0-7"` on any host, `"inf2.48xlarge/0:0-7"` on that '
        "one. Replicas beyond the pins lie wherever there is room. Pins beyond the replicas, up to twice "
        "`replicas.max`, stay free for updates.",
        json_schema_extra=_words("list of core ranges"),
    )
    replicas: Live[Replicas] = Field(
        Replicas(),
        description="`2` means `{min: 2, max: 2}`.",
        json_schema_extra=_words("whole number, 1 to 1000, or a mapping"),
    )
    neff_cache: Process[Annotated[str, AfterValidator(_location)] | None] = Field(
        None,
        description="Where the Neuron compiler keeps what it compiled, for `NEURON_COMPILE_CACHE_URL`. Unset: the "
        "compiler's own folder. See Compiler.",
        json_schema_extra=_words("a path or `s3://...`"),
    )
    priority: Live[int] = Field(
        0,
        ge=-1_000_000,
        le=1_000_000,
        description="When cores are short, a model of lower priority never costs one of higher priority a core.",
    )
    max_queue: Live[int] = Field(
        256, ge=0, le=1_000_000, description="Requests that may wait for a slot. One more gets 429."
    )
    max_queue_bytes: Live[int] = Field(
        256 * 2**20,
        ge=0,
        le=1 << 40,
        description="Bytes that the requests which wait for a slot may have together. One that would exceed them gets "
        "429.",
    )
    max_wait_s: Live[float | None] = Field(
        None,
        gt=0,
        le=86_400,
        description="Seconds that a request may wait for its first token. One whose wait is predicted to be longer "
        "gets 429 at once. Unset: no such limit.",
    )
    queue_order: Live[QueueOrder] = Field(
        "fair",
        description="Who goes first among waiting requests of the same priority. `fair`: the API keys in turn, by the "
        "tokens that each has had, by weight; `deadline`: whose deadline is nearest.",
    )
    objectives: Live[Objectives] = Field(
        Objectives(), description="How fast answers ought to be: what the autoscaler works for. See Scaling."
    )
    scaling: Live[Scaling] = Field(
        Scaling(), description="How the number of replicas follows the requests. See Scaling."
    )
    aliases: Live[tuple[Annotated[str, AfterValidator(_alias)], ...]] = Field(
        (),
        strict=False,
        description="Other names that clients may send as `model`, such as `gpt-4o` or `org/model`. Each belongs to "
        "one model of the fleet, and is no model's name. Not in `defaults`.",
        json_schema_extra=_words("list of names"),
    )
    tool_parser: Live[ToolParser] = Field(
        "auto",
        description="How the model writes the calls of tools. `auto` sees it from the chat template; `none`: not at "
        "all. See Tools.",
    )
    threads: Process[Literal["share", "lmi"] | Annotated[StrictInt, Field(ge=1, le=1024)]] = Field(
        "share", description="CPU threads of a replica. See Threads."
    )
    allow_head_padding: Live[bool] = Field(
        False,
        description="Accept a `tp_degree` that does not divide the attention heads, for an engine that pads them with "
        "zeros.",
    )
    allow_degrees: Live[tuple[Annotated[StrictInt, Field(ge=1, le=128)], ...]] = Field(
        (), strict=False, description="Accept these tensor-parallel degrees beside the known ones."
    )
    hbm_overhead_gib: Live[float | None] = Field(
        None,
        ge=0,
        le=1024,
        description="HBM in GiB that a replica needs on each core beside weights and KV cache. Unset: an estimate. See "
        "Memory.",
    )
    allow_pickle: Process[bool] = Field(
        False,
        description="Read `pytorch_model.bin` where a checkpoint has no safetensors; the draft's too. A pickle can "
        "hold code: it is read with torch's `weights_only`, which calls none, but take it from nobody whom you do not "
        "trust. On the engines `cpu` and `transformers-neuronx`.",
    )
    trust_remote_code: Process[bool] = Field(
        False,
        description="Run the Python code that a checkpoint brings, named in the `auto_map` of its `config.json`; the "
        "draft's too. It does there whatever the replica may do. Otherwise such code is neither fetched nor run. On "
        "the engine `cpu`. See [artifacts.md](artifacts.md#code-in-a-checkpoint).",
    )
    draft: Shape[Draft | None] = Field(
        None,
        description="Speculative decoding. Greedy answers stay token for token what they are without it. On `cpu` and "
        "the Neuron engines; not in `defaults`.",
    )
    update: Live[Update] = Field(Update(), description="How replicas are replaced when the spec changes. See Updates.")
    deadlines: Live[Deadlines] = Field(
        Deadlines(), description="How long a replica may take. A change holds at once for what runs."
    )
    spread: Live[Spread | None] = Field(
        None,
        description="Keeps the replicas of the model apart: `host` puts each on a host of its own, `{host: 2}` at most "
        "two on one. Unset: as many as there is room for.",
        json_schema_extra=_words("`host`, or a mapping"),
    )
    host_memory_gib: Live[float | None] = Field(
        None,
        ge=0,
        le=1 << 20,
        description="Host memory in GiB that one replica needs while it loads. Unset: an estimate. See Memory.",
    )
    quantize: Shape[Quantization | None] = Field(
        None, description="Weights of one byte on the cores. On the Neuron engines. Unset: weights of the `dtype`."
    )
    quantize_kv: Shape[Quantization | None] = Field(
        None,
        description="A KV cache of one byte a number, on the Neuron engines: `fp8`. Unset: of the `dtype`.",
    )
    buckets: Shape[Buckets] = Field(Buckets(), description="Compiled lengths. On the Neuron engines. See Buckets.")
    sampling: Shape[Sampling] = Field(
        "host",
        description="Where tokens are chosen. `device` is faster, and takes `temperature`, `top_p` and `top_k` only. "
        "On the Neuron engines.",
    )
    fuse_qkv: Shape[bool | None] = Field(
        None, description="One matrix for query, key and value. On the Neuron engines. Unset: the engine's own choice."
    )
    compiler: Shape[Compiler] = Field(Compiler(), description="How the model is compiled. On the Neuron engines.")
    group_query_attention: Shape[GroupQueryAttention | None] = Field(
        None,
        description="How the KV heads are dealt out to the cores. On the engine `transformers-neuronx`. Unset: the "
        "engine chooses. See Memory.",
    )
    engine_options: Shape[dict[str, Any]] = Field(
        {},
        description="Options that only one engine has. `cpu`: `prefill_chunk`, a whole number, how many tokens of a "
        "prompt go through the model together (unset: all); `prefix_cache`, true or false (the default): a prompt that "
        "begins with what a slot still holds is read from there on only; `compile`, true or false (the default): each "
        "bucket is compiled, by torch.compile. `echo`: `step_ms`, the milliseconds that each "
        "step takes. The Neuron engines: by the packages' own names. See Options.",
    )
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

    @property
    def given_options(self) -> dict[str, Any]:
        """``engine_options``, with the folder of a quantized checkpoint resolved like the source."""
        options = dict(self.engine_options)
        if isinstance(path := options.get("quantized_checkpoints_path"), str) and is_path(path):
            options["quantized_checkpoints_path"] = self._resolved(path)
        return options

    def _resolved(self, path: str) -> str:
        expanded = Path(path).expanduser() if path.startswith("~/") or path == "~" else Path(path)
        return str(Path(self.base_dir) / expanded)

    @property
    def started_with(self) -> tuple[object, ...]:
        """What a replica is told at its start: another value means another process."""
        told = {
            "source": self.source_path or self.source,
            "neff_cache": self.neff_cache_location,
            "draft": None
            if self.draft is None
            else (self.draft_path or self.draft.source, self.draft.revision, self.draft.k),
            "engine_options": tuple(
                (name, repr(_ordered(value))) for name, value in sorted(self.given_options.items())
            ),
        }
        return tuple(told[name] if name in told else getattr(self, name) for name in _STARTED_WITH)

    def dtype_on(self, engine: Engine) -> Dtype:
        """The weights' and the KV cache's type under a resolved engine (`engines.resolve`)."""
        return self.dtype or default_dtype(engine)

    def length(self, checkpoint: Checkpoint | None) -> int:
        """Tokens of a slot: ``max_len``, or 2048, or what the checkpoint's positions allow if that is less."""
        if self.max_len is not None:
            return self.max_len
        positions = checkpoint.max_positions if checkpoint else None
        return DEFAULT_MAX_LEN if positions is None else min(DEFAULT_MAX_LEN, positions)


REACHES: Mapping[str, Reach] = MappingProxyType(
    {
        name: reach
        for name, field in ModelSpec.model_fields.items()
        for reach in field.metadata
        if isinstance(reach, Reach)
    }
)
"""How far each field of `ModelSpec` reaches that a spec may give."""

_STARTED_WITH = tuple(name for name, reach in REACHES.items() if reach is not Reach.LIVE)


def _ordered(value: object) -> object:
    """The same with the keys of every mapping in order: in which order they are written means nothing."""
    if isinstance(value, Mapping):
        return {key: _ordered(value[key]) for key in sorted(value)}
    return [_ordered(item) for item in value] if isinstance(value, list) else value


class Spec(_Frozen):
    """A whole file. Where its keys are written is no part of its value."""

    version: Annotated[Literal[1], _choice(1)] = Field(1, description="The version of this form.")
    name: Name = Field("fleet", description="The fleet's name, shown in `status`.")
    hosts: tuple[HostsSpec, ...] = Field(
        (),  # what is there; see `hosts_for`
        description="The machines; a list for machines of several types. Unset: this machine if it has Neuron devices "
        "of a known type, else one emulated inf2.48xlarge. See Hosts.",
    )
    engines: dict[Engine, EngineSettings] = Field(
        {},
        description="Settings by engine: `python` is the interpreter in which its replicas run. See Engines.",
        json_schema_extra=_words("a mapping from engines to settings"),
    )
    models: tuple[ModelSpec, ...] = Field(
        (),
        description="The models by name, at least one. Clients send the name as `model`.",
    )
    base_dir: str = Field(".", exclude=True)
    places: SourcePositions = Field(SourcePositions(), exclude=True, repr=False)
    broken: frozenset[str] = Field(frozenset(), exclude=True, repr=False)  # top-level keys that could not be read

    @property
    def filename(self) -> str:
        """The name that problems give as the place."""
        return self.places.filename

    def where(self, *path: str | int) -> str:
        """ "file:line:column" of a key, or of the nearest written key above it."""
        return self.places.where(*path)

    def python_for(self, engine: Engine) -> str | None:
        """The absolute path of that engine's interpreter, as far as ``base_dir`` is absolute; None: the fleet's own."""
        settings = self.engines.get(engine)
        if settings is None or settings.python is None:
            return None
        return str(Path(self.base_dir) / Path(settings.python).expanduser())

    def model(self, name: str) -> ModelSpec | None:
        """The model of that name."""
        return next((model for model in self.models if model.name == name), None)


_DEFAULTS = (
    "Fields for every model that does not give them itself. Any field of a model but `source`, `revision`, `cores`, "
    "`aliases` and `draft`. A field counts as a whole: a model's own `replicas` replaces all of the default's."
)
OWN_FIELDS = ("source", "revision", "cores", "aliases", "draft")
"""What a model gives for itself: `defaults` have no such field."""

_INTERNAL = frozenset({"base_dir", "broken", "places"})


def _with_units(field: dict[str, Any]) -> dict[str, Any]:
    """The schema of a number of seconds that may also be a duration."""
    number = {key: field[key] for key in ("type", "minimum", "exclusiveMinimum", "maximum") if key in field}
    rest = {key: value for key, value in field.items() if key not in number}
    duration = {"type": "string", "pattern": f"^{_DURATION}$", **_words("a duration")}
    return {**rest, "anyOf": [*(field.get("anyOf") or [number]), duration]}


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a spec file, for editors. Looser than `parse` and `checks`, never stricter."""
    model, hosts = ModelSpec.model_json_schema(), HostsSpec.model_json_schema()
    definitions = {**model.pop("$defs"), **hosts.pop("$defs"), "Hosts": hosts}
    definitions["EngineSettings"] = EngineSettings.model_json_schema()
    definitions["Replicas"] = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 1000}, definitions["Replicas"]]}
    definitions["Spread"] = {"anyOf": [{"const": "host"}, definitions["Spread"]]}
    fields = {key: value for key, value in model["properties"].items() if key not in {*_INTERNAL, "name"}}
    fields["replicas"]["default"] = 1
    for held in (fields, *(definition.get("properties", {}) for definition in definitions.values())):
        for key in held:
            if key.endswith("_s"):
                held[key] = _with_units(held[key])
    defaults = {key: value for key, value in fields.items() if key not in OWN_FIELDS}
    one = {"$ref": "#/$defs/Hosts"}
    name = {"type": "string", "pattern": f"^{NAME.pattern}$"}
    told = {key: {"description": field.description} for key, field in Spec.model_fields.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "corewright spec",
        "type": "object",
        "additionalProperties": False,
        "required": ["models"],
        "properties": {
            "version": {**told["version"], "const": 1, "default": 1},
            "name": {**told["name"], **name, **_words("a name"), "default": "fleet"},
            "hosts": {
                **told["hosts"],
                **_words("a mapping, or a list of mappings"),
                "anyOf": [one, {"type": "array", "minItems": 1, "items": one}],
            },
            "engines": {
                **told["engines"],
                **_words("a mapping from engines to settings"),
                "type": ["object", "null"],
                "additionalProperties": False,
                "properties": {engine: {"$ref": "#/$defs/EngineSettings"} for engine in NAMED_ENGINES},
                "default": {},
            },
            "defaults": {
                "description": _DEFAULTS,
                **_words("a mapping"),
                "type": ["object", "null"],
                "additionalProperties": False,
                "properties": defaults,
            },
            "models": {
                **told["models"],
                "type": "object",
                "minProperties": 1,
                "propertyNames": name,
                "additionalProperties": {"$ref": "#/$defs/Model"},
            },
        },
        "$defs": {
            **definitions,
            "Model": {"type": "object", "additionalProperties": False, "properties": fields},
        },
    }
