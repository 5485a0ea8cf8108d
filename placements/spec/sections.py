"""The mappings in a spec: of engines, servers, updates, deadlines, scaling and request defaults."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, StrictInt, model_serializer

from placements.engines.server.capabilities import placeholders
from placements.engines.vllm.capabilities import RELEASES, version_of
from placements.spec.notation import (
    CRON_WANTED,
    Cron,
    Frozen,
    Interpreter,
    Milliseconds,
    Reported,
    Seconds,
    Zone,
    choice,
    in_words,
)


def _plugin(value: str) -> str:
    if version_of(value) < version_of(RELEASES[0].plugin):
        raise ValueError(
            f'"{value}" is not a release of vllm-neuron: the first supported one is "{RELEASES[0].plugin}"'
        )
    return value


PLUGIN_WANTED = f'a release in quotes, like "{RELEASES[-1].plugin}"'


class EngineSettings(Frozen):
    """Settings of one engine on every host."""

    wanted = "a mapping, like {python: ~/envs/nxdi/bin/python}"
    python: Interpreter | None = None
    """The Python interpreter of its replicas: a path, relative to the spec file. It must have the fleet's Ray version
    and Python minor version, except for `vllm`, whose server is a process of its own. Unset: the fleet's
    interpreter."""
    command: Annotated[
        tuple[str, ...], Field(strict=False), Reported("a list of texts, like [numactl, vllm, serve]")
    ] = Field((), json_schema_extra=in_words("list of texts"))
    """The command that starts the server of `vllm`, before its flags. It must run the vLLM of `python`, whose version
    is checked, and not a container. Unset: `PYTHON -m vllm.entrypoints.cli.main serve`."""
    plugin: Annotated[str, AfterValidator(_plugin), Reported(PLUGIN_WANTED, id="unknown-value")] | None = Field(
        None, json_schema_extra=in_words(", ".join(f"`{release.plugin}`" for release in RELEASES) + ", or another one")
    )
    """The release of `vllm-neuron` that `vllm` plans for, in quotes. One that is not listed is planned as the last one
    before it, with a warning. Unset: `"0.4"` on inf2 and trn1, the newest on trn2 and trn3; none on emulated hosts,
    where vLLM runs on the CPU."""
    warm: bool | None = None
    """Keep a process on each host that has imported the engine's packages: each start forks it, and takes seconds
    less. Unset: true for `cpu`, else false. See [warm processes](engines.md#warm-processes)."""


class Server(Frozen):
    """The command of a server of OpenAI's API, and how it is reached."""

    wanted = "a mapping, like {command: [llama-server, --port, '{port}'], slots: 4}"
    command: Annotated[tuple[str, ...], Field(min_length=1, strict=False), Reported("a list of texts")] = Field(
        ..., json_schema_extra=in_words("list of texts")
    )
    """The program and its arguments. In them and in `env`, `{port}` or `{socket}` is where it must listen, `{model}`
    the folder of `source`, `{cores}` the range of its cores like `4-7`, `{first}` the first of them and `{tp}` their
    number."""
    slots: Annotated[int, Field(ge=1, le=1024)]
    """The most requests that it gets at a time, in place of `max_batch`: what it processes concurrently."""
    listen: Annotated[Literal["port", "unix"], choice("port", "unix")] = "port"
    """`port`: on `{port}` of 127.0.0.1; `unix`: on the unix socket `{socket}`."""
    ready: Annotated[str, Field(pattern="^/")] = "/health"
    """The route that answers 200 when it is ready."""
    env: Annotated[dict[str, str], Reported("a mapping from names to texts")] = Field({})
    """Variables of its environment, beside `PATH`, `HOME`, `LD_LIBRARY_PATH`, `LANG`, `TMPDIR` and proxies."""
    cores_env: Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$")] = "NEURON_RT_VISIBLE_CORES"
    """The variable that gets `{cores}`."""

    @property
    def texts(self) -> dict[tuple[str | int, ...], str]:
        """All texts that may have placeholders, by their paths."""
        parts: dict[tuple[str | int, ...], str] = {("command", i): text for i, text in enumerate(self.command)}
        return parts | {("env", name): text for name, text in self.env.items()}

    @property
    def uses_model(self) -> bool:
        """Returns whether it needs the folder of a checkpoint."""
        return any("model" in placeholders(text) for text in self.texts.values())


Strategy = Literal["auto", "surge", "in_place", "hold"]


class Update(Frozen):
    """How a model's processes are replaced when the spec changes."""

    wanted = "a mapping, like {strategy: surge}"
    strategy: Strategy = "auto"
    """How a new replica gets its cores. `auto` selects the strategy with the least predicted interruption."""
    max_swap_s: Seconds[Annotated[float, Field(ge=0, le=3600)]] = 30.0
    """The longest predicted swap, in seconds, for which `auto` selects `hold`. `scaling.hold_s` limits the wait of
    requests then."""
    progress_deadline_s: Seconds[Annotated[float, Field(gt=0, le=86_400)]] = 900.0
    """Seconds without progress after which the update fails. Progress is a new replica that becomes ready or an old one
    that stops. The start of a new replica, within its `deadlines`, does not count."""
    rollback: bool = True
    """Roll back to the last complete revision automatically if the update fails."""
    max_failures: Annotated[int, Field(ge=1, le=100)] = 3
    """Consecutive failures of a new replica after which the update fails."""


class Deadlines(Frozen):
    """Deadlines of a replica, in seconds."""

    wanted = "a mapping, like {start_s: 600}"
    start_s: Seconds[Annotated[float, Field(gt=0, le=86_400)]] = 900.0
    """Seconds from a replica's start to its first generation, without the time to fetch and compile. Then it fails with
    `start-deadline`."""
    fetch_s: Seconds[Annotated[float, Field(gt=0, le=604_800)]] = 14_400.0
    """Seconds to fetch its artifacts to its host, in addition to `start_s`. Then it fails with `fetch-deadline`.
    Partial downloads are kept."""
    compile_s: Seconds[Annotated[float, Field(gt=0, le=604_800)]] = 14_400.0
    """Seconds to compile, or to wait for another replica that compiles the same, in addition to `start_s`. Then it
    fails with `compile-deadline`."""
    step_s: Seconds[Annotated[float, Field(gt=0, le=86_400)]] = 120.0
    """Seconds for one step of the engine. Then it fails with `step-stuck`."""
    drain_s: Seconds[Annotated[float, Field(ge=0, le=86_400)]] = 300.0
    """Seconds to drain a replica that is replaced, moved or removed. Requests that still run are then aborted."""


class Objectives(Frozen):
    """Objectives of a model's requests."""

    wanted = "a mapping, like {ttft_ms: 500}"
    ttft_ms: Annotated[Milliseconds, Field(gt=0, le=86_400_000)] | None = None
    """Milliseconds until the first token; of encoders, until the answer. Later requests count as late, and the
    autoscaler minimizes them."""
    tpot_ms: Annotated[Milliseconds, Field(gt=0, le=86_400_000)] | None = None
    """Milliseconds between tokens."""
    queue_ms: Annotated[Milliseconds, Field(gt=0, le=86_400_000)] | None = None
    """Milliseconds that a request may wait for a slot."""
    items_per_second: Annotated[float, Field(gt=0, le=1_000_000_000)] | None = None
    """Inputs per second that the replicas of an encoder should be able to encode, whatever the demand. The autoscaler
    measures what one replica encodes, and raises `min` accordingly, up to `max`. A model with `min: 0` still scales to
    zero."""


class Schedule(Frozen):
    """Other bounds of a model's replicas from each ``start`` to the next ``end``."""

    wanted = 'a mapping with a start and an end, like {start: "0 8 * * *", end: "0 18 * * *", min: 2}'
    start: Annotated[Cron, Reported(CRON_WANTED, id="bad-cron", hint='write it like "0 8 * * MON-FRI"')]
    """When it begins: a cron expression of five fields, like `0 8 * * MON-FRI`."""
    end: Annotated[Cron, Reported(CRON_WANTED, id="bad-cron", hint='write it like "0 18 * * MON-FRI"')]
    """When it ends: a cron expression of five fields, like `0 18 * * MON-FRI`."""
    timezone: Zone = "UTC"
    """The time zone of `start` and `end`, like `Europe/Berlin`."""
    min: Annotated[int, Field(ge=0, le=1000)] | None = None
    """The least replicas during the schedule. Unset: `replicas.min`."""
    max: Annotated[int, Field(ge=0, le=1000)] | None = None
    """The most replicas during the schedule. Unset: `replicas.max`."""


class Scaling(Frozen):
    """Automatic scaling of a model's replicas."""

    wanted = "a mapping, like {idle_s: 600}"
    auto: bool = True
    """Makes the number of replicas follow the load, between `replicas.min` and `replicas.max`. With false, `min`
    replicas run; the first request still starts a model with `min: 0`."""
    idle_s: Seconds[Annotated[float, Field(ge=0, le=31_536_000)]] = 600.0
    """Seconds without an inference request after which a model with `min: 0` scales to zero, counted from when its
    first replica was ready."""
    hold_s: Seconds[Annotated[float, Field(ge=0, le=86_400)]] = 300.0
    """The most seconds that a request waits for a model without a ready replica: one with `min: 0` that it
    starts, one whose replica an update swaps with `hold`, or one whose replicas cannot be reached."""
    schedules: Annotated[
        tuple[Schedule, ...],
        Reported('a list, like [{start: "0 8 * * *", end: "0 18 * * *", min: 2}]'),
    ] = Field((), strict=False, json_schema_extra=in_words("list of mappings"))
    """Other bounds on a schedule. See Schedules."""
    worth_per_1000: Annotated[float, Field(ge=0, le=1_000_000_000)] | None = None
    """The value of 1000 requests, in the currency of `hosts.price_per_core_hour`. A replica beyond `min` then starts
    only on a host where its value exceeds the cost of its cores. Unset: on priced hosts it starts only if the load
    exceeds the running replicas."""


MOST = 2**31 - 1
Variable = Annotated[bool | StrictInt | float | str, Reported("a text, a number, true or false")]


class RequestDefaults(Frozen):
    """Values of request fields, each used where a request does not have the field. Unset: as without defaults."""

    wanted = "a mapping, like {temperature: 0.2, max_tokens: 512}, or empty"
    system: Annotated[str, Field(min_length=1), Reported("a text that is not empty")] | None = None
    """A system prompt for chats that have none. Completions do not get it."""
    max_tokens: Annotated[int, Field(ge=1, le=MOST)] | None = None
    """The most tokens of an answer, at most the rest of `max_len`. Messages always have their own."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0 takes the most probable token. This field and the next ones are those of [requests](api.md#request-fields)."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """As in requests."""
    top_k: Annotated[int, Field(ge=-1, le=MOST)] | None = None
    """As in requests."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """As in requests."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    """As in requests."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """As in requests."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """As in requests."""
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    """As in requests."""
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=1024), Reported("a text of 1 to 1024 characters")], ...],
        Field(max_length=16),
        Reported('a list of at most 16 texts, like ["</s>"]'),
    ] = Field((), strict=False, json_schema_extra=in_words("list of texts"))
    """Texts that end the answer."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """How long the model reasons, in chats. With `none` it does not reason, if its chat template supports that."""
    chat_template_kwargs: Annotated[
        dict[str, Variable], Reported("a mapping from variables to texts, numbers, true or false")
    ] = Field({}, json_schema_extra=in_words("a mapping"))
    """Further variables of the chat template, such as `{enable_thinking: false}`. A request that has this field gets
    none of these."""

    @model_serializer(mode="wrap")
    def _given(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Returns the fields that are set."""
        return {name: value for name, value in serialize(self).items() if getattr(self, name) not in (None, (), {})}

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are set, as JSON values."""
        return self.model_dump(mode="json")
