"""The schema of a spec: the fields of one YAML file, as values. `parse` reads them from text."""

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
"""The default tokens of a slot, if the checkpoint has as many positions."""

MAX_HOSTS = 4096
"""The most machines of one spec, of all types."""

TYPE_IN_WORDS = "x-type"
"""The JSON Schema keyword that holds a field's type as `reference` writes it. Editors ignore it."""

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
    """The required place of one replica: a range, on one host or (``host`` None) on any."""

    cores: CoreRange
    host: str | None = None

    @classmethod
    def parse(cls, text: str) -> Pin:
        """Parses "0-7" or "inf2.48xlarge/0:0-7". Raises ValueError with a one-sentence reason."""
        host, colon, cores = text.rpartition(":")
        if colon and not host:
            raise ValueError(f'"{text}" has no host before the colon; write "0-7" or "inf2.48xlarge/0:0-7"')
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
    """Whether the source is written as a folder of the host."""
    return source.startswith(_PATH_STARTS) or source in (".", "..")


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


def _revision(value: str) -> str:
    if len(value) > 255 or ".." in value or not _REVISION.fullmatch(value):
        raise ValueError(f'"{value}" is not a branch, tag or commit')
    return value


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


def _or(known: tuple[int, ...]) -> str:
    return " or ".join(filter(None, (", ".join(map(str, known[:-1])), str(known[-1]))))


def _choice(*known: int) -> BeforeValidator:
    """Rejects a boolean, which equals a number."""

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
    """Returns the type in words, for the reference, and further keywords."""
    return {TYPE_IN_WORDS: type_, **more}


_UNITS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
_DURATION = "(?=[0-9])" + "".join(rf"([0-9]{{1,9}}(\.[0-9]{{1,3}})?{unit})?" for unit in _UNITS)
_DURATION_TEXT = re.compile(_DURATION)


def _seconds(value: object) -> object:
    """Parses a duration: "1h30m" -> 5400.0. Returns other values unchanged, for the field's type to reject."""
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
    """The bounds of a model's replicas. ``max`` defaults to ``min``, at least 1; ``min`` to 1.

    That min does not exceed max is a rule of `checks`, so that it can be told beside all other findings.
    """

    min: int = Field(
        1,
        ge=0,
        le=1000,
        description="The least replicas, unless `scale`, `load`, `unload` or a schedule sets another number. With 0, "
        "the first request starts one.",
    )
    max: int = Field(
        1,
        ge=1,
        le=1000,
        description="The most replicas. Unset: `min`, at least 1. Replicas beyond `min` start automatically with the "
        "load, unless `scaling.auto` is false; `scale` is limited by it too.",
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
    """Resources reserved for the system. ``vcpus`` None: 4 % of the host, at least 1; 0 on emulated hosts."""

    vcpus: int | None = Field(
        None,
        ge=0,
        le=4096,
        description="vCPUs reserved for the system, the first ones. Unset: 4 %, rounded up, at least 1; on emulated "
        "hosts 0.",
    )
    memory_gib: float = Field(
        0.0,
        ge=0,
        le=1 << 20,
        description="GiB of host memory reserved for the system. No effect on emulated hosts, which share the "
        "machine's memory.",
    )
    cores: ReservedCores = Field(
        (),
        description='NeuronCores that replicas do not use, like `[20, "22-23"]`.',
        json_schema_extra=_words("list of core ids and ranges"),
    )


class Spread(_Frozen):
    """At most ``host`` replicas of the model on one host. ``spread: host`` means one on each."""

    host: int = Field(1, ge=1, le=1000, description="The most replicas of the model on one host.")

    @model_validator(mode="before")
    @classmethod
    def _word(cls, value: Any) -> Any:
        """ "host" -> {host: 1}."""
        return {"host": 1} if value == "host" else value


class Draft(_Frozen):
    """A smaller model of the same vocabulary, which proposes ``k`` tokens for each step of its model."""

    source: Annotated[str, AfterValidator(_source)] = Field(
        description="A smaller model with the same vocabulary: a path, an S3 URL or a hub id, like `source` above."
    )
    k: int = Field(4, ge=1, le=16, description="Tokens that it proposes for each step.")
    revision: HubRevision | None = Field(
        None, description="The branch, tag or commit of a hub id, like `revision` of the model."
    )


class Buckets(_Frozen):
    """The lengths that a Neuron engine compiles, in tokens, ascending."""

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
    """Options of neuronx-cc for a model."""

    optlevel: Annotated[Literal[1, 2, 3] | None, _choice(*OPTLEVELS)] = Field(
        None, description="1 compiles fastest, 3 generates the fastest code. Unset: the compiler's default, 2."
    )
    flags: str = Field("", description="More flags for neuronx-cc, as in `NEURON_CC_FLAGS`.")
    workers: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Graphs that are compiled in parallel; each needs host memory. Unset: all graphs.",
    )


class Update(_Frozen):
    """How a model's processes are replaced when the spec changes."""

    strategy: Strategy = Field(
        "auto",
        description="How a new replica gets its cores. `auto` selects the strategy with the least predicted "
        "interruption.",
    )
    max_swap_s: float = Field(
        30.0,
        ge=0,
        le=3600,
        description="The longest predicted swap, in seconds, for which `auto` selects `hold`. `scaling.hold_s` limits "
        "the wait of requests then.",
    )
    progress_deadline_s: float = Field(
        900.0,
        gt=0,
        le=86_400,
        description="Seconds without progress after which the update fails. Progress is a new replica that becomes "
        "ready or an old one that stops. The start of a new replica, within its `deadlines`, does not count.",
    )
    rollback: bool = Field(
        True, description="Roll back to the last complete revision automatically if the update fails."
    )
    max_failures: int = Field(
        3, ge=1, le=100, description="Consecutive failures of a new replica after which the update fails."
    )


class Deadlines(_Frozen):
    """Deadlines of a replica, in seconds."""

    start_s: float = Field(
        900.0,
        gt=0,
        le=86_400,
        description="Seconds from a replica's start to its first generation, without the time to fetch and compile. "
        "Then it fails with `start-deadline`.",
    )
    fetch_s: float = Field(
        14_400.0,
        gt=0,
        le=604_800,
        description="Seconds to fetch its artifacts to its host, in addition to `start_s`. Then it fails with "
        "`fetch-deadline`. Partial downloads are kept.",
    )
    compile_s: float = Field(
        14_400.0,
        gt=0,
        le=604_800,
        description="Seconds to compile, or to wait for another replica that compiles the same, in addition to "
        "`start_s`. Then it fails with `compile-deadline`.",
    )
    step_s: float = Field(
        120.0, gt=0, le=86_400, description="Seconds for one step of the engine. Then it fails with `step-stuck`."
    )
    drain_s: float = Field(
        300.0,
        ge=0,
        le=86_400,
        description="Seconds to drain a replica that is replaced, moved or removed. Requests that still run are then "
        "aborted.",
    )


class Objectives(_Frozen):
    """Latency objectives of a model's requests, in milliseconds."""

    ttft_ms: float | None = Field(
        None,
        gt=0,
        le=86_400_000,
        description="Milliseconds until the first token. Later requests count as late, and the autoscaler minimizes "
        "them.",
    )
    tpot_ms: float | None = Field(None, gt=0, le=86_400_000, description="Milliseconds between tokens.")
    queue_ms: float | None = Field(
        None, gt=0, le=86_400_000, description="Milliseconds that a request may wait for a slot."
    )


class Schedule(_Frozen):
    """Other bounds of a model's replicas from each ``start`` to the next ``end``."""

    start: Annotated[str, AfterValidator(_cron)] = Field(
        description="When it begins: a cron expression of five fields, like `0 8 * * MON-FRI`."
    )
    end: Annotated[str, AfterValidator(_cron)] = Field(
        description="When it ends: a cron expression of five fields, like `0 18 * * MON-FRI`."
    )
    timezone: Annotated[str, AfterValidator(_zone)] = Field(
        "UTC", description="The time zone of `start` and `end`, like `Europe/Berlin`."
    )
    min: int | None = Field(
        None, ge=0, le=1000, description="The least replicas during the schedule. Unset: `replicas.min`."
    )
    max: int | None = Field(
        None, ge=0, le=1000, description="The most replicas during the schedule. Unset: `replicas.max`."
    )


class Scaling(_Frozen):
    """Automatic scaling of a model's replicas."""

    auto: bool = Field(
        True,
        description="Whether the number of replicas follows the load, between `replicas.min` and `replicas.max`. With "
        "false, `min` replicas run; the first request still starts a model with `min: 0`.",
    )
    idle_s: float = Field(
        600.0,
        ge=0,
        le=31_536_000,
        description="Seconds without an inference request after which a model with `min: 0` scales to zero, counted "
        "from when its first replica was ready.",
    )
    hold_s: float = Field(
        300.0,
        ge=0,
        le=86_400,
        description="The most seconds that a request waits for a model without a ready replica: one with `min: 0` that "
        "it starts, or one whose replica an update swaps with `hold`.",
    )
    schedules: tuple[Schedule, ...] = Field(
        (),
        strict=False,
        description="Other bounds on a schedule. See Schedules.",
        json_schema_extra=_words("list of mappings"),
    )
    worth_per_1000: float | None = Field(
        None,
        ge=0,
        le=1_000_000_000,
        description="The value of 1000 requests, in the currency of `hosts.price_per_core_hour`. A replica beyond "
        "`min` then starts only on a host where its value exceeds the cost of its cores. Unset: on priced hosts it "
        "starts only if the load exceeds the running replicas.",
    )


class EngineSettings(_Frozen):
    """Settings of one engine on every host."""

    python: Annotated[str, AfterValidator(_interpreter)] | None = Field(
        None,
        description="The Python interpreter of its replicas: a path, relative to the spec file. It must have the "
        "fleet's Ray version and Python minor version. Unset: the fleet's interpreter.",
    )


class HostsSpec(_Frozen):
    """Machines of one type: ``instance`` for real ones, or ``emulate``; exactly one of the two."""

    instance: str | None = Field(
        None,
        description="The type of real machines. Plans use a table of facts and need no machine. `up` starts only on a "
        "machine of this type.",
        json_schema_extra=_words("an instance type", enum=[*TOPOLOGIES, None]),
    )
    emulate: str | None = Field(
        None,
        description="The type whose cores are emulated on this machine, with its real CPUs and memory.",
        json_schema_extra=_words("an instance type", enum=[*TOPOLOGIES, None]),
    )
    count: int = Field(
        1,
        ge=1,
        le=MAX_HOSTS,
        description="The number of machines. Emulated hosts share this machine's CPUs evenly, and `up` starts a Ray "
        "node for each. `up` serves one real machine.",
    )
    lnc: Annotated[Literal[1, 2] | None, _choice(1, 2)] = Field(
        None,
        description="Physical cores in one logical NeuronCore, configurable on trn2 only. With 1 there are twice as "
        "many cores, each with half of the HBM. Unset: 2.",
    )
    reserve: Reserve = Field(Reserve(), description="Resources of each host reserved for the system.")
    price_per_core_hour: float = Field(
        0.0,
        ge=0,
        le=1_000_000,
        description="The price of one core hour, in any currency. 0: a fixed cost.",
    )


class Reach(Enum):
    """What a change of a model's field affects."""

    LIVE = "live"  # the planner, the controller or the gateway: replicas keep running
    PROCESS = "process"  # a replica's start parameters or environment
    SHAPE = "shape"  # the same, and compiled graphs


_T = TypeVar("_T")
Live = Annotated[_T, Reach.LIVE]
Process = Annotated[_T, Reach.PROCESS]
Shape = Annotated[_T, Reach.SHAPE]


class ModelSpec(_Frozen):
    """One model of the fleet. Each field except its name is `Live`, `Process` or `Shape`."""

    name: Name
    source: Shape[Annotated[str, AfterValidator(_source)]] = Field(
        description="The checkpoint: a path, which begins with `/`, `./`, `../` or `~` and is relative to the spec "
        "file; `s3://bucket/prefix`; or an id of the Hugging Face Hub. The echo engine needs none. See "
        "[artifacts.md](artifacts.md)."
    )
    revision: Process[HubRevision | None] = Field(
        None,
        description="The branch, tag or commit of a hub id. A branch is resolved when the spec is applied, and every "
        "replica gets that commit. Unset: `main`. Not in `defaults`.",
    )
    engine: Shape[Engine] = Field(
        "auto",
        description="The engine. `auto` is `cpu` on an emulated host; on a real one it is the installed Neuron engine "
        "that serves the model. `up` does not start `optimum-neuron` and `torch-neuronx`. See Engines.",
    )
    dtype: Shape[Dtype | None] = Field(
        None,
        description="The type of the weights and the KV cache. Unset: `fp32` for `cpu` and `echo`, else `bf16`.",
    )
    tp_degree: Shape[int] = Field(
        1, ge=1, le=128, description="The tensor-parallel degree: the cores of one replica. See Degrees."
    )
    max_batch: Shape[int] = Field(
        4,
        ge=1,
        le=1024,
        description="Slots: the requests that one replica processes concurrently. The KV cache of every slot is "
        "allocated at the start.",
    )
    max_len: Shape[int | None] = Field(
        None,
        ge=2,
        le=1 << 24,
        description="Tokens of one slot, prompt and answer together. Unset: 2048, or the checkpoint's positions if "
        "fewer.",
    )
    cores: Live[tuple[PinField, ...]] = Field(
        (),
        strict=False,
        description='Pins, one range for each replica in order: `"0-7"` on any host, `"inf2.48xlarge/0:0-7"` on that '
        "host. Replicas beyond the pins are placed automatically. Pins beyond the replicas, up to twice "
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
        description="The Neuron compiler's cache, as in `NEURON_COMPILE_CACHE_URL`. Unset: the compiler's default "
        "folder. See Compiler.",
        json_schema_extra=_words("a path or `s3://...`"),
    )
    priority: Live[int] = Field(
        0,
        ge=-1_000_000,
        le=1_000_000,
        description="When cores are short, models with a higher priority get them first.",
    )
    max_queue: Live[int] = Field(
        256, ge=0, le=1_000_000, description="The most requests that wait for a slot. Further requests get 429."
    )
    max_queue_bytes: Live[int] = Field(
        256 * 2**20,
        ge=0,
        le=1 << 40,
        description="The most bytes of all requests that wait for a slot. Further requests get 429.",
    )
    max_wait_s: Live[float | None] = Field(
        None,
        gt=0,
        le=86_400,
        description="The most seconds that a request waits for its first token. A request with a longer predicted wait "
        "gets 429 at once. Unset: no limit.",
    )
    queue_order: Live[QueueOrder] = Field(
        "fair",
        description="The order of waiting requests of the same priority. `fair`: fair shares of tokens among API keys, "
        "by weight; `deadline`: earliest deadline first.",
    )
    objectives: Live[Objectives] = Field(
        Objectives(), description="Latency objectives, the targets of the autoscaler. See Scaling."
    )
    scaling: Live[Scaling] = Field(Scaling(), description="Automatic scaling of the replicas. See Scaling.")
    aliases: Live[tuple[Annotated[str, AfterValidator(_alias)], ...]] = Field(
        (),
        strict=False,
        description="Other names that clients may send as `model`, such as `gpt-4o` or `org/model`. Each must be "
        "unique among all names and aliases. Not in `defaults`.",
        json_schema_extra=_words("list of names"),
    )
    tool_parser: Live[ToolParser] = Field(
        "auto",
        description="The format of the model's tool calls. `auto` detects it from the chat template; `none` disables "
        "tools. See Tools.",
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
        (), strict=False, description="Additional tensor-parallel degrees to accept."
    )
    hbm_overhead_gib: Live[float | None] = Field(
        None,
        ge=0,
        le=1024,
        description="HBM in GiB that a replica needs on each core in addition to weights and KV cache. Unset: an "
        "estimate. See Memory.",
    )
    allow_pickle: Process[bool] = Field(
        False,
        description="Read `pytorch_model.bin` if a checkpoint, or that of the draft, has no safetensors. A pickle can "
        "hold code: it is read with torch's `weights_only`, which runs none, but use only sources that you trust. On "
        "the engines `cpu` and `transformers-neuronx`.",
    )
    trust_remote_code: Process[bool] = Field(
        False,
        description="Run the Python code of a checkpoint, named in the `auto_map` of its `config.json`, and that of "
        "the draft, with all permissions of the replica. With false, such code is neither fetched nor run. On the "
        "engine `cpu`. See [artifacts.md](artifacts.md#code-in-a-checkpoint).",
    )
    draft: Shape[Draft | None] = Field(
        None,
        description="Speculative decoding. Greedy answers are the same, token for token, as without it. On `cpu` and "
        "the Neuron engines; not in `defaults`.",
    )
    update: Live[Update] = Field(Update(), description="How replicas are replaced when the spec changes. See Updates.")
    deadlines: Live[Deadlines] = Field(
        Deadlines(), description="Deadlines of replicas. A change applies to running replicas at once."
    )
    spread: Live[Spread | None] = Field(
        None,
        description="Spreads the replicas of the model: `host` places each on another host, `{host: 2}` at most two on "
        "one. Unset: no limit.",
        json_schema_extra=_words("`host`, or a mapping"),
    )
    host_memory_gib: Live[float | None] = Field(
        None,
        ge=0,
        le=1 << 20,
        description="Host memory in GiB that one replica needs while it loads. Unset: an estimate. See Memory.",
    )
    quantize: Shape[Quantization | None] = Field(
        None, description="One-byte weights on the cores. On the Neuron engines. Unset: the `dtype`."
    )
    quantize_kv: Shape[Quantization | None] = Field(
        None,
        description="A one-byte KV cache: `fp8`. On the Neuron engines. Unset: the `dtype`.",
    )
    buckets: Shape[Buckets] = Field(Buckets(), description="Compiled lengths. On the Neuron engines. See Buckets.")
    sampling: Shape[Sampling] = Field(
        "host",
        description="Where tokens are sampled. `device` is faster, and supports `temperature`, `top_p` and `top_k` "
        "only. On the Neuron engines.",
    )
    fuse_qkv: Shape[bool | None] = Field(
        None, description="One matrix for query, key and value. On the Neuron engines. Unset: the engine's default."
    )
    compiler: Shape[Compiler] = Field(Compiler(), description="Compiler options. On the Neuron engines.")
    group_query_attention: Shape[GroupQueryAttention | None] = Field(
        None,
        description="How the KV heads are divided among the cores. On the engine `transformers-neuronx`. Unset: the "
        "engine's default. See Memory.",
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
        """The source's kind: path, s3 or hub."""
        return source_kind(self.source) if self.source else "path"

    @property
    def source_path(self) -> str | None:
        """The path of a path source, absolute if ``base_dir`` is; None for S3 and the hub."""
        return self._resolved(self.source) if self.source_kind == "path" else None

    @property
    def draft_kind(self) -> SourceKind | None:
        """The draft source's kind; None without a draft."""
        return None if self.draft is None else source_kind(self.draft.source)

    @property
    def draft_path(self) -> str | None:
        """The draft's ``source_path``; None without a draft."""
        return self._resolved(self.draft.source) if self.draft and self.draft_kind == "path" else None

    @property
    def neff_cache_location(self) -> str | None:
        """The NEFF cache: s3://... or a path, resolved like the source."""
        if self.neff_cache is None or self.neff_cache.startswith("s3://"):
            return self.neff_cache
        return self._resolved(self.neff_cache)

    @property
    def given_options(self) -> dict[str, Any]:
        """``engine_options`` with the folder of a quantized checkpoint resolved like the source."""
        options = dict(self.engine_options)
        if isinstance(path := options.get("quantized_checkpoints_path"), str) and is_path(path):
            options["quantized_checkpoints_path"] = self._resolved(path)
        return options

    def _resolved(self, path: str) -> str:
        expanded = Path(path).expanduser() if path.startswith("~/") or path == "~" else Path(path)
        return str(Path(self.base_dir) / expanded)

    @property
    def started_with(self) -> tuple[object, ...]:
        """The start parameters of a replica: a change requires a new process."""
        parameters = {
            "source": self.source_path or self.source,
            "neff_cache": self.neff_cache_location,
            "draft": None
            if self.draft is None
            else (self.draft_path or self.draft.source, self.draft.revision, self.draft.k),
            "engine_options": tuple(
                (name, repr(_ordered(value))) for name, value in sorted(self.given_options.items())
            ),
        }
        return tuple(parameters[name] if name in parameters else getattr(self, name) for name in _STARTED_WITH)

    def dtype_on(self, engine: Engine) -> Dtype:
        """Returns the dtype of weights and KV cache on a resolved engine (`engines.resolve`)."""
        return self.dtype or default_dtype(engine)

    def length(self, checkpoint: Checkpoint | None) -> int:
        """Returns the tokens of a slot: ``max_len``, or 2048, or the checkpoint's positions if fewer."""
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
"""What a change of each field of `ModelSpec` affects."""

_STARTED_WITH = tuple(name for name, reach in REACHES.items() if reach is not Reach.LIVE)


def _ordered(value: object) -> object:
    """Returns the value with the keys of every mapping sorted: their order has no meaning."""
    if isinstance(value, Mapping):
        return {key: _ordered(value[key]) for key in sorted(value)}
    return [_ordered(item) for item in value] if isinstance(value, list) else value


class Spec(_Frozen):
    """A whole spec file. The positions of its keys are not part of its value."""

    version: Annotated[Literal[1], _choice(1)] = Field(1, description="The version of the schema.")
    name: Name = Field("fleet", description="The fleet's name, shown in `status`.")
    hosts: tuple[HostsSpec, ...] = Field(
        (),  # see `hosts_for`
        description="The machines; a list for machines of several types. Unset: this machine if its instance type is "
        "known, else one emulated inf2.48xlarge. See Hosts.",
    )
    engines: dict[Engine, EngineSettings] = Field(
        {},
        description="Settings by engine: `python` is the interpreter of its replicas. See Engines.",
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
        """The file name in the positions of problems."""
        return self.places.filename

    def where(self, *path: str | int) -> str:
        """Returns "file:line:column" of a key, or of the nearest key above it in the file."""
        return self.places.where(*path)

    def python_for(self, engine: Engine) -> str | None:
        """Returns the path of an engine's interpreter, absolute if ``base_dir`` is; None: the fleet's interpreter."""
        settings = self.engines.get(engine)
        if settings is None or settings.python is None:
            return None
        return str(Path(self.base_dir) / Path(settings.python).expanduser())

    def model(self, name: str) -> ModelSpec | None:
        """Returns the model with a name, or None."""
        return next((model for model in self.models if model.name == name), None)


_DEFAULTS = (
    "Default values of the models' fields, except `source`, `revision`, `cores`, `aliases` and `draft`. A field counts "
    "as a whole: a model's `replicas` replaces the default's completely."
)
OWN_FIELDS = ("source", "revision", "cores", "aliases", "draft")
"""Fields that `defaults` cannot set."""

_INTERNAL = frozenset({"base_dir", "broken", "places"})


def _with_units(field: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a number of seconds that may also be a duration."""
    number = {key: field[key] for key in ("type", "minimum", "exclusiveMinimum", "maximum") if key in field}
    rest = {key: value for key, value in field.items() if key not in number}
    duration = {"type": "string", "pattern": f"^{_DURATION}$", **_words("a duration")}
    return {**rest, "anyOf": [*(field.get("anyOf") or [number]), duration]}


def json_schema() -> dict[str, Any]:
    """Returns the JSON Schema of a spec file, for editors. Looser than `parse` and `checks`, never stricter."""
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
