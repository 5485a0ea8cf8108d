"""The schema of a spec: the fields of one YAML file, as values. `parse` reads them from text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StrictInt, Tag, model_validator

from placements.engines.capabilities import DraftMethod, Dtype, Quantization
from placements.engines.registry import Engine, capabilities
from placements.engines.vllm.capabilities import VllmNeuron, release_for
from placements.facts.checkpoints import Checkpoint
from placements.facts.encoders import KINDS, Kind
from placements.facts.topology import TOPOLOGIES, Host
from placements.spec.notation import (
    Alias,
    Frozen,
    Gib,
    HubRevision,
    Lengths,
    Location,
    Name,
    PinField,
    Reported,
    ReservedCores,
    Seconds,
    Source,
    SourceKind,
    T,
    choice,
    in_words,
    is_path,
    resolved,
    source_kind,
)
from placements.spec.problems import SourcePositions
from placements.spec.sections import Deadlines, EngineSettings, Objectives, RequestDefaults, Scaling, Server, Update

DEFAULT_MAX_LEN = 2048
"""The default tokens of a slot, if the checkpoint has as many positions."""

MAX_HOSTS = 4096
"""The most machines of one spec, of all types."""

GroupQueryAttention = Literal["shard-over-heads", "shard-over-batch", "replicated-heads", "all-gather-heads"]
Sampling = Literal["host", "device"]
AnswerFormat = Literal[
    "auto",
    "deepseek",
    "gemma3",
    "glm",
    "gpt-oss",
    "granite",
    "hermes",
    "kimi-k2",
    "llama3",
    "llama4",
    "minimax",
    "mistral",
    "phi4-mini",
    "qwen3-coder",
    "think",
    "none",
]
QueueOrder = Literal["fair", "deadline"]

Aliases = Annotated[
    Annotated[tuple[Alias, ...], Tag("[list]"), Field(strict=False)]
    | Annotated[dict[Alias, RequestDefaults | None], Tag("[mapping]")],
    Discriminator(lambda value: "[mapping]" if isinstance(value, Mapping) else "[list]"),
    Reported("a list of names, like [gpt-4o], or a mapping from names to defaults"),
]
"""The other names of a model; iterating gives the names."""

_START_ON_REQUEST = "to start a model on its first request, write replicas: {min: 0, max: 1}"


class Replicas(Frozen):
    """The bounds of a model's replicas. ``max`` defaults to ``min``, at least 1; ``min`` to 1.

    That min does not exceed max is a rule of `checks`, so that it can be reported beside all other findings.
    """

    wanted = "a whole number, or {min: 1, max: 2}"
    min: Annotated[int, Field(ge=0, le=1000)] = 1
    """The least replicas, unless `scale`, `load`, `unload` or a schedule sets another number. With 0, the first request
    starts one."""
    max: Annotated[int, Field(ge=1, le=1000), Reported(bound_hint=_START_ON_REQUEST)] = 1
    """The most replicas. Unset: `min`, at least 1. Replicas beyond `min` start automatically with the load, unless
    `scaling.auto` is false; `scale` is limited by it too."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, value: Any) -> Any:
        """2 -> {min: 2, max: 2}."""
        if type(value) is int:  # not a bool
            return {"min": value, "max": value}
        if isinstance(value, Mapping) and "max" not in value and type(value.get("min")) is int:
            return {**value, "max": max(1, value["min"])}
        return value


class Reserve(Frozen):
    """Resources reserved for the system. ``vcpus`` None: 4 % of the host, at least 1; 0 on emulated hosts."""

    wanted = "a mapping, like {vcpus: 8, cores: [23]}"
    vcpus: Annotated[int, Field(ge=0, le=4096)] | None = None
    """vCPUs reserved for the system, rounded up to whole physical CPU cores if these are known. Unset: 4 %, rounded up,
    at least 1; on emulated hosts 0."""
    memory_gib: Annotated[Gib, Field(ge=0, le=1 << 20)] = 2.0
    """GiB of host memory reserved for the system, Ray and the gateway. No effect on emulated hosts, which share the
    machine's memory."""
    cores: ReservedCores = Field((), json_schema_extra=in_words("list of core ids and ranges"))
    """NeuronCores that replicas do not use, like `[20, "22-23"]`."""


class Spread(Frozen):
    """At most ``host`` replicas of the model on one host. ``spread: host`` means one on each."""

    wanted = "host, or a mapping like {host: 2}"
    host: Annotated[int, Field(ge=1, le=1000)] = 1
    """The most replicas of the model on one host."""

    @model_validator(mode="before")
    @classmethod
    def _word(cls, value: Any) -> Any:
        """ "host" -> {host: 1}."""
        return {"host": 1} if value == "host" else value


class Draft(Frozen):
    """A smaller model of the same vocabulary, which proposes ``k`` tokens for each step of its model."""

    wanted = "a mapping with a source, like {source: ./models/draft, k: 4}"
    source: Source
    """A smaller model with the same vocabulary: a path, an S3 URL or a hub id, like `source` above."""
    k: Annotated[int, Field(ge=1, le=16)] = 4
    """Tokens that it proposes for each step."""
    revision: HubRevision | None = None
    """The branch, tag or commit of a hub id, like `revision` of the model."""
    method: DraftMethod = "draft_model"
    """How it proposes tokens. `eagle` and `eagle3` are heads that read the model's hidden states, on the engine `vllm`
    only. See [vllm.md](vllm.md#settings)."""


class Buckets(Frozen):
    """The lengths that a Neuron engine compiles, in tokens, ascending."""

    wanted = "a mapping, like {prefill: [128, 512], decode: [512, 2048]}"
    prefill: Lengths = ()
    """Prompt lengths. The longest is the longest prompt. Unset: 128, 256 and so on, the last `max_len`."""
    decode: Lengths = ()
    """KV cache lengths. The longest is `max_len`. Unset: 128, 256 and so on, the last `max_len`."""


class Compiler(Frozen):
    """Options of neuronx-cc for a model."""

    wanted = "a mapping, like {optlevel: 1}"
    optlevel: Annotated[Literal[1, 2, 3] | None, choice(1, 2, 3)] = None
    """1 compiles fastest, 3 generates the fastest code. Unset: the compiler's default, 2."""
    flags: str = ""
    """More flags for neuronx-cc, as in `NEURON_CC_FLAGS`."""
    workers: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Graphs that are compiled in parallel; each needs host memory. Unset: all graphs."""


class HostsSpec(Frozen):
    """Machines of one type: ``instance`` for real ones, or ``emulate``; exactly one of the two."""

    wanted = "a mapping, like {instance: inf2.48xlarge, count: 2}"
    instance: str | None = Field(None, json_schema_extra=in_words("an instance type", enum=[*TOPOLOGIES, None]))
    """The type of real machines. Plans use tables of facts and need no machine; on a machine of this type they use its
    CPUs. `up` starts only on a machine of this type."""
    emulate: str | None = Field(None, json_schema_extra=in_words("an instance type", enum=[*TOPOLOGIES, None]))
    """The type whose cores are emulated on this machine, with its real CPUs and memory."""
    count: Annotated[int, Field(ge=1, le=MAX_HOSTS)] | None = None
    """The number of machines. Emulated hosts share this machine's CPUs evenly, and `up` starts a Ray node for each.
    `up` serves one real machine. Unset: 1, without `max`."""
    min: Annotated[int, Field(ge=0, le=MAX_HOSTS)] | None = None
    """With `max`: the machines that the fleet keeps. Unset: 0."""
    max: Annotated[int, Field(ge=1, le=MAX_HOSTS)] | None = None
    """The machines that the fleet uses at most, in place of `count`. The planner adds those beyond `min` only if
    replicas need them. See [Hosts that come and go](#hosts-that-come-and-go)."""
    lnc: Annotated[Literal[1, 2] | None, choice(1, 2)] = None
    """Physical cores in one logical NeuronCore, configurable on trn2 and trn3 only. With 1 there are twice as many
    cores, each with half of the HBM. Unset: 2."""
    reserve: Reserve = Reserve()
    """Resources of each host reserved for the system."""
    price_per_core_hour: Annotated[float, Field(ge=0, le=1_000_000)] = 0.0
    """The price of one core hour, in any currency, of which a machine costs its number of cores. 0: a fixed cost."""

    @property
    def least(self) -> int:
        """The machines that the fleet relies on; a missing one is lost."""
        return (self.count or 1) if self.max is None else (self.min or 0)

    @property
    def most(self) -> int:
        """The machines that the fleet uses at most."""
        return (self.count or 1) if self.max is None else self.max


class Reach(Enum):
    """What a change of a model's field affects."""

    LIVE = "live"  # the planner, the controller or the gateway: replicas keep running
    PROCESS = "process"  # a replica's start parameters or environment
    SHAPE = "shape"  # the same, and compiled graphs


Live = Annotated[T, Reach.LIVE]
Process = Annotated[T, Reach.PROCESS]
Shape = Annotated[T, Reach.SHAPE]


class ModelSpec(Frozen):
    """One model of the fleet. Each field except its name is `Live`, `Process` or `Shape`."""

    wanted = "a mapping, like {source: ./models/tiny}"
    name: Name
    source: Shape[Source]
    """The checkpoint: a path, which begins with `/`, `./`, `../` or `~` and is relative to the spec file;
    `s3://bucket/prefix`; or an id of the Hugging Face Hub. The echo engine needs none. See
    [artifacts.md](artifacts.md)."""
    revision: Process[HubRevision | None] = None
    """The branch, tag or commit of a hub id. A branch is resolved when the spec is applied, and every replica gets that
    commit. Unset: `main`. Not in `defaults`."""
    engine: Shape[Engine] = "auto"
    """The engine. `auto` is `cpu` on an emulated host; on a real one it is `nxd-inference` or `transformers-neuronx`,
    whichever is installed and serves the model, and `torch-neuronx` for encoders. See Engines."""
    kind: Shape[Annotated[Kind, choice(*KINDS)]] = "generate"
    """What the model does: it generates text, or it encodes texts into vectors (`embedding`), scores of pairs
    (`rerank`) or classes. See Encoders."""
    dtype: Shape[Dtype | None] = None
    """The type of the weights and the KV cache. Unset: `fp32` for `cpu` and `echo`, else `bf16`."""
    tp_degree: Shape[Annotated[int, Field(ge=1, le=128)]] = 1
    """The tensor-parallel degree: the cores of one replica. See Degrees."""
    max_batch: Shape[Annotated[int, Field(ge=1, le=1024)]] = 4
    """Slots: the requests that one replica processes concurrently. The KV cache of every slot is allocated at the
    start. Of encoders: the inputs of a batch, 32 if unset."""
    max_len: Shape[Annotated[int, Field(ge=2, le=1 << 24)] | None] = None
    """Tokens of one slot, prompt and answer together; of encoders, tokens of one input. Unset: 2048, or the
    checkpoint's positions if fewer."""
    cores: Live[Annotated[tuple[PinField, ...], Reported('a list of ranges, like ["0-7"]')]] = Field(
        (), strict=False, json_schema_extra=in_words("list of core ranges")
    )
    """Pins, one range for each replica in order: `"0-7"` on any host, `"inf2.48xlarge/0:0-7"` on that host. Replicas
    beyond the pins are placed automatically. Pins beyond the replicas, up to twice `replicas.max`, stay free for
    updates."""
    replicas: Live[Annotated[Replicas, Reported(bound_hint=_START_ON_REQUEST)]] = Field(
        Replicas(), json_schema_extra=in_words("whole number, 1 to 1000, or a mapping")
    )
    """`2` means `{min: 2, max: 2}`."""
    neff_cache: Process[Location | None] = Field(None, json_schema_extra=in_words("a path or `s3://...`"))
    """The Neuron compiler's cache, as in `NEURON_COMPILE_CACHE_URL`. Unset: the compiler's default folder. See
    Compiler."""
    priority: Live[Annotated[int, Field(ge=-1_000_000, le=1_000_000)]] = 0
    """When cores are short, models with a higher priority get them first."""
    max_queue: Live[Annotated[int, Field(ge=0, le=1_000_000)]] = 256
    """The most requests that wait for a slot. Further requests get 429."""
    max_queue_bytes: Live[Annotated[int, Field(ge=0, le=1 << 40)]] = 256 * 2**20
    """The most bytes of all requests that wait for a slot. Further requests get 429."""
    max_wait_ms: Process[Annotated[float, Field(ge=0, le=10_000)]] = 1.0
    """How long an idle replica of an encoder waits until a batch is full, in milliseconds. See Encoders."""
    max_wait_s: Live[Seconds[Annotated[float, Field(gt=0, le=86_400)]] | None] = None
    """The most seconds that a request waits for its first token. A request with a longer predicted wait gets 429 at
    once. Unset: no limit."""
    queue_order: Live[QueueOrder] = "fair"
    """The order of waiting requests of the same priority. `fair`: fair shares of tokens among API keys, by weight;
    `deadline`: earliest deadline first."""
    objectives: Live[Objectives] = Objectives()
    """Objectives, the targets of the autoscaler. See Scaling."""
    scaling: Live[Scaling] = Scaling()
    """Automatic scaling of the replicas. See Scaling."""
    aliases: Live[Aliases] = Field((), json_schema_extra=in_words("list of names, or a mapping from names to defaults"))
    """Other names that clients may send as `model`, such as `gpt-4o` or `org/model`. Each must be unique among all
    names and aliases. A mapping gives each of them `request_defaults` of its own. Not in `defaults`. See Aliases."""
    request_defaults: Live[RequestDefaults] = RequestDefaults()
    """Values of request fields, each used where a request to the model, by any name, does not have the field. See
    Aliases."""
    adapters: Live[
        Annotated[dict[Name, Source], Reported("a mapping from names to sources, like {support: ./lora/support}")]
    ] = Field({}, json_schema_extra=in_words("a mapping from names to sources"))
    """LoRA adapters by name, as peft saves them: paths, S3 URLs or hub ids, like `source`. The adapter `support` of the
    model `big` is the model `big:support` of clients and API keys. On the engine `vllm`. Not in `defaults`. See
    [engines.md](engines.md#lora-adapters)."""
    managed_by: Live[Name | None] = None
    """The system that added the model to the running fleet, and removes it: `sagemaker`
    ([sagemaker.md](sagemaker.md)). Not in `defaults`."""
    response_template: Live[AnswerFormat] = "auto"
    """The format of the model's reasoning and tool calls. With `auto` it is the tokenizer's own, or else detected from
    the chat template. With `none`, neither is read. See Tools."""
    threads: Process[
        Annotated[
            Literal["share", "lmi"] | Annotated[StrictInt, Field(ge=1, le=1024)],
            Reported("share, lmi or a whole number from 1 to 1024"),
        ]
    ] = "share"
    """CPU threads of a replica. See Threads."""
    allow_head_padding: Live[bool] = False
    """Accept a `tp_degree` that does not divide the attention heads, for an engine that pads them with zeros."""
    allow_degrees: Live[
        Annotated[tuple[Annotated[StrictInt, Field(ge=1, le=128)], ...], Reported("a list of whole numbers, like [6]")]
    ] = Field((), strict=False)
    """Additional tensor-parallel degrees to accept."""
    hbm_overhead_gib: Live[Annotated[Gib, Field(ge=0, le=1024)] | None] = None
    """HBM in GiB that a replica needs on each core in addition to weights and KV cache. Unset: an estimate. See
    Memory."""
    allow_pickle: Process[bool] = False
    """Read `pytorch_model.bin` if a checkpoint, or that of the draft, has no safetensors. A pickle can hold code: it is
    read with torch's `weights_only`, which runs none, but use only sources that you trust. On the engines `cpu` and
    `transformers-neuronx`."""
    trust_remote_code: Process[bool] = False
    """Run the Python code of a checkpoint, named in the `auto_map` of its `config.json`, and that of the draft, with
    all permissions of the replica. With false, such code is neither fetched nor run. On the engines `cpu` and
    `vllm`. See [artifacts.md](artifacts.md#code-in-a-checkpoint)."""
    draft: Shape[Draft | None] = None
    """Speculative decoding. Greedy answers are the same, token for token, as without it. On `cpu`, `vllm` and the
    Neuron engines; not in `defaults`."""
    update: Live[Update] = Update()
    """How replicas are replaced when the spec changes. See Updates."""
    deadlines: Live[Deadlines] = Deadlines()
    """Deadlines of replicas. A change applies to running replicas at once."""
    spread: Live[Spread | None] = Field(None, json_schema_extra=in_words("`host`, or a mapping"))
    """Spreads the replicas of the model: `host` places each on another host, `{host: 2}` at most two on one. Unset: no
    limit."""
    host_memory_gib: Live[Annotated[Gib, Field(ge=0, le=1 << 20)] | None] = None
    """Host memory in GiB that one replica needs while it loads. Unset: an estimate. See Memory."""
    quantize: Shape[Quantization | None] = None
    """One-byte weights on the cores. On the Neuron engines. Unset: the `dtype`."""
    quantize_kv: Shape[Quantization | None] = None
    """A one-byte KV cache: `fp8`. On the Neuron engines. Unset: the `dtype`."""
    buckets: Shape[Buckets] = Buckets()
    """Compiled lengths. On the Neuron engines. See Buckets."""
    sampling: Shape[Sampling] = "host"
    """Where tokens are sampled. `device` is faster, and supports `temperature`, `top_p` and `top_k` only. On the Neuron
    engines."""
    fuse_qkv: Shape[bool | None] = None
    """One matrix for query, key and value. On the Neuron engines. Unset: the engine's default."""
    compiler: Shape[Compiler] = Compiler()
    """Compiler options. On the Neuron engines."""
    group_query_attention: Shape[GroupQueryAttention | None] = None
    """How the KV heads are divided among the cores. On the engine `transformers-neuronx`. Unset: the engine's default.
    See Memory."""
    engine_options: Shape[Annotated[dict[str, Any], Reported("a mapping from option names to values")]] = Field({})
    """Options that only one engine has. `cpu`: `prefill_chunk`, a whole number, how many tokens of a prompt go through
    the model together (unset: all); `prefix_cache`, true or false (the default): a prompt that begins with what a slot
    still holds is read from there on only; `compile`, true or false (the default): each bucket is compiled, by
    torch.compile. `echo`: `step_ms`, the milliseconds that each step takes. `optimum-neuron`: `prefill_chunk_size`, a
    whole number, how many tokens of a prompt are run together, from Optimum Neuron 0.4.6 on (unset: 1024 for longer
    slots; 0: all). `torch-neuronx`: `compiled_batch`, a whole number, the inputs of a compiled batch (unset: 8, or all
    of a batch if fewer). The other Neuron engines: by the packages' own names, and `prefix_cache` for NxD Inference;
    vLLM: flags of its command ([vllm.md](vllm.md#settings)). See Options."""
    server: Shape[Server | None] = None
    """The command of a server of OpenAI's API, for the engine `server`. Not in `defaults`. See
    [engines.md](engines.md#server)."""
    base_dir: str = Field(".", exclude=True)  # relative sources begin here
    broken: frozenset[str] = Field(frozenset(), exclude=True, repr=False)  # fields that could not be read

    @property
    def has_source(self) -> bool:
        """Returns whether its replicas read a checkpoint: not on echo, nor with a server command without `{model}`."""
        engine = capabilities(self.engine)
        return engine.reads_checkpoint and (not engine.forwards or self.server is None or self.server.uses_model)

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
    def adapter_places(self) -> dict[str, str]:
        """The sources of the adapters, paths resolved like the source."""
        return {name: self._resolved(source) if is_path(source) else source for name, source in self.adapters.items()}

    @property
    def served_adapters(self) -> tuple[str, ...]:
        """The names by which clients use the adapters."""
        return tuple(f"{name}:{adapter}" for name in (self.name, *self.aliases) for adapter in self.adapters)

    @property
    def alias_defaults(self) -> dict[str, RequestDefaults]:
        """The defaults of the aliases that have any of their own."""
        held = self.aliases if isinstance(self.aliases, Mapping) else {}
        return {name: defaults for name, defaults in held.items() if defaults is not None and defaults.given}

    @property
    def defaults_by_name(self) -> dict[str, dict[str, Any]]:
        """The fields that requests get, as JSON values, by the name to which they are sent: those of an alias, else the
        model's. Without names that have none."""
        own, aliases = self.request_defaults.given, self.alias_defaults
        fields = {name: own | (aliases[name].given if name in aliases else {}) for name in (self.name, *self.aliases)}
        return {name: given for name, given in fields.items() if given}

    @property
    def neff_cache_location(self) -> str | None:
        """The NEFF cache: s3://... or a path, resolved like the source."""
        if self.neff_cache is None or self.neff_cache.startswith("s3://"):
            return self.neff_cache
        return self._resolved(self.neff_cache)

    @property
    def server_command(self) -> list[str]:
        """The command of the server, whose program is resolved like the source if it is a relative path."""
        program, *arguments = () if self.server is None else self.server.command
        return [self._resolved(program) if is_path(program) else program, *arguments]

    @property
    def given_options(self) -> dict[str, Any]:
        """``engine_options`` with the folder of a quantized checkpoint resolved like the source."""
        options = dict(self.engine_options)
        if isinstance(path := options.get("quantized_checkpoints_path"), str) and is_path(path):
            options["quantized_checkpoints_path"] = self._resolved(path)
        return options

    def _resolved(self, path: str) -> str:
        return resolved(path, self.base_dir)

    @property
    def started_with(self) -> tuple[object, ...]:
        """The start parameters of a replica: a change requires a new process."""
        parameters = {
            "source": self.source_path or self.source,
            "neff_cache": self.neff_cache_location,
            "draft": None
            if self.draft is None
            else (self.draft_path or self.draft.source, self.draft.revision, self.draft.k)
            + (() if self.draft.method == "draft_model" else (self.draft.method,)),
            "engine_options": tuple(
                (name, repr(_ordered(value))) for name, value in sorted(self.given_options.items())
            ),
        }
        return tuple(parameters[name] if name in parameters else getattr(self, name) for name in _STARTED_WITH)

    def resolved(self, engine: Engine, checkpoint: Checkpoint | None) -> ModelSpec:
        """Returns the record that replicas get: with the resolved engine, its dtype, the tokens of a slot, and absolute
        paths."""
        draft, server = self.draft, self.server
        changes = {
            "source": self.source_path or self.source,
            "engine": engine,
            "dtype": self.dtype_on(engine),
            "max_len": self.length(checkpoint),
            "neff_cache": self.neff_cache_location,
            "engine_options": self.given_options,
            "adapters": self.adapter_places,
            "draft": draft and draft.model_copy(update={"source": self.draft_path or draft.source}),
            "server": server and server.model_copy(update={"command": tuple(self.server_command)}),
        }
        return self.model_copy(update=changes)

    def dtype_on(self, engine: Engine) -> Dtype:
        """Returns the dtype of weights and KV cache on a resolved engine (`registry.resolve`)."""
        return self.dtype or capabilities(engine).dtype

    def length(self, checkpoint: Checkpoint | None) -> int:
        """Returns the tokens of a slot: ``max_len``, or 2048, or the checkpoint's positions if fewer."""
        if self.max_len is not None:
            return self.max_len
        positions = checkpoint.max_positions if checkpoint else None
        return DEFAULT_MAX_LEN if positions is None else min(DEFAULT_MAX_LEN, positions)


REACHES: Mapping[str, Reach] = {
    name: reach
    for name, field in ModelSpec.model_fields.items()
    for reach in field.metadata
    if isinstance(reach, Reach)
}
"""What a change of each field of `ModelSpec` affects."""

_STARTED_WITH = tuple(name for name, reach in REACHES.items() if reach is not Reach.LIVE)


def _ordered(value: object) -> object:
    """Returns the value with the keys of every mapping sorted: their order has no meaning."""
    if isinstance(value, Mapping):
        return {key: _ordered(value[key]) for key in sorted(value)}
    return [_ordered(item) for item in value] if isinstance(value, list) else value


class Spec(Frozen):
    """A whole spec file. The positions of its keys are not part of its value."""

    version: Annotated[Literal[1], choice(1)] = 1
    """The version of the schema."""
    name: Name = "fleet"
    """The fleet's name, shown in `status`."""
    hosts: tuple[HostsSpec, ...] = ()
    """The machines; a list for machines of several types. Unset: this machine if its instance type is known, else one
    emulated inf2.48xlarge. See Hosts."""
    engines: Annotated[
        dict[Engine, EngineSettings],
        Reported("a mapping from engines to settings, like {nxd-inference: {python: ~/envs/nxdi/bin/python}}"),
    ] = Field({}, json_schema_extra=in_words("a mapping from engines to settings"))
    """Settings by engine: `python` is the interpreter of its replicas. See Engines."""
    models: tuple[ModelSpec, ...] = ()
    """The models by name. Clients send the name as `model`. With `{}` a fleet starts without any."""
    base_dir: str = Field(".", exclude=True)
    places: SourcePositions = Field(SourcePositions(), exclude=True, repr=False)
    broken: frozenset[str] = Field(frozenset(), exclude=True, repr=False)  # top-level keys that could not be read

    def where(self, *path: str | int) -> str:
        """Returns "file:line:column" of a key, or of the nearest key above it in the file."""
        return self.places.where(*path)

    def python_for(self, engine: Engine) -> str | None:
        """Returns the path of an engine's interpreter, absolute if ``base_dir`` is; None: the fleet's interpreter."""
        settings = self.engines.get(engine)
        if settings is None or settings.python is None:
            return None
        return resolved(settings.python, self.base_dir)

    def vllm_release_on(self, host: Host) -> VllmNeuron | None:
        """Returns the planned release of vllm-neuron on a host; None: vLLM runs on the CPU there."""
        settings = self.engines.get("vllm")
        plugin = None if settings is None else settings.plugin
        if host.topology is None or (host.emulated and plugin is None):
            return None
        return release_for(host.topology.family, plugin)

    def is_warm(self, engine: Engine) -> bool:
        """Returns whether hosts keep a warm process of the engine."""
        settings = self.engines.get(engine)
        return capabilities(engine).warm if settings is None or settings.warm is None else settings.warm

    def warm_engines(self, engines: Iterable[Engine]) -> dict[str, str | None]:
        """Returns those of the engines of which hosts keep a warm process, with the Python of each."""
        return {engine: self.python_for(engine) for engine in sorted(engines) if self.is_warm(engine)}

    def launch_of(self, engine: Engine) -> list[str]:
        """Returns the command of an engine's server, whose program is resolved like the source; [] if it is unset."""
        settings = self.engines.get(engine)
        program, *arguments = settings.command if settings is not None and settings.command else ("",)
        if not program:
            return []
        return [resolved(program, self.base_dir) if is_path(program) else program, *arguments]

    def model(self, name: str) -> ModelSpec | None:
        """Returns the model with a name, or None."""
        return next((model for model in self.models if model.name == name), None)


OWN_FIELDS = ("source", "revision", "cores", "aliases", "adapters", "managed_by", "draft", "server")
"""Fields that `defaults` cannot set."""
