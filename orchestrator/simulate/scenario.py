"""The scenario of a simulation: the models of a spec, the speeds of their replicas, and the hosts."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from orchestrator.control.decisions.host_demand import START_S
from orchestrator.control.resolve.spec_file import SpecFile
from orchestrator.dispatch.dispatcher import QueueSettings
from orchestrator.process.failure import Failed
from placements.engines.capabilities import SHORTEST_BUCKET
from placements.engines.registry import HOST_ENGINES, Engine, capabilities, resolve, takes_cores
from placements.facts.checkpoints import Checkpoint
from placements.facts.topology import Host, Machine
from placements.planner.spec_hosts import DEFAULT_EMULATION, hosts_for
from placements.resources.calibration import MeasuredSpeed, calibrated
from placements.resources.estimate import Speed
from placements.spec.problems import Problem, has_errors
from placements.spec.schema import HostsSpec, ModelSpec, Spec
from placements.spec.sections import Objectives
from workers.batching.buckets import default_prefill_buckets, ladder
from workers.batching.encode_queue import SLOTS_PER_ROW
from workers.messages.encoder_protocol import EncoderSpec

BEGINS = 1_767_571_200.0  # Monday, 2026-01-05, in UTC
TYPICAL_PROMPT = 512  # tokens
DEFAULT_OBJECTIVES = Objectives(ttft_ms=2000.0)


class Arrival(NamedTuple):
    """One request of a trace."""

    at: float  # seconds since the beginning of the trace
    model: str
    prompt_tokens: int
    output_tokens: int
    key: str = ""  # the id of the API key; "" without one
    priority: int = 0
    session: str = ""


@dataclass(frozen=True)
class SimModel:
    """A model of a spec with the speed of its replicas, whose slots are static. Times are in seconds.

    ``buckets`` are the ascending lengths that prompts are padded to (empty: no padding). ``prefill_tokens`` is the
    largest number of tokens in one prefill of several prompts (`workers.batching.batcher`, step 2c); 0: one prompt per
    prefill.
    """

    spec: ModelSpec
    speed: Speed
    cores: int  # per replica; 0 if no host has NeuronCores for it
    buckets: tuple[int, ...] = ()
    prefill_tokens: int = 0
    encoder: EncoderSpec | None = None  # of a model that encodes; a prefill is then a batch

    @classmethod
    def of(
        cls, model: ModelSpec, speed: Speed, checkpoint: Checkpoint | None, engine: Engine, cores: int | None = None
    ) -> SimModel:
        """Returns a model of a spec; ``engine`` is the resolved engine, ``cores`` are by default the degree.

        A replica of an encoder has more slots than rows, and batches instead of prefills."""
        cores, length = model.tp_degree if cores is None else cores, model.length(checkpoint)
        on_host = engine in HOST_ENGINES
        buckets = model.buckets.prefill or (
            default_prefill_buckets(length) if on_host else ladder(SHORTEST_BUCKET, length)
        )
        if model.kind == "generate":
            return cls(model, speed, cores, buckets, buckets[-1])
        longest, compiled_rows, able = buckets[-1], 0, capabilities(engine)
        if traces := able.traces(model.buckets.prefill, longest, model.max_batch, model.engine_options):
            buckets, compiled_rows = traces
        pads = able.pads_to_longest
        encoder = EncoderSpec(model.max_batch, buckets, 1, 1, pads_to_longest=pads, compiled_rows=compiled_rows)
        return cls(model, speed, cores, buckets, longest, encoder)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def slots(self) -> int:
        """The requests that a replica accepts at a time."""
        return self.spec.max_batch if self.encoder is None else SLOTS_PER_ROW * self.spec.max_batch

    @property
    def gather_s(self) -> float:
        """How long an idle encoder waits until a batch is full."""
        return 0.0 if self.encoder is None else self.spec.max_wait_ms / 1000

    @property
    def queue(self) -> QueueSettings:
        """The settings of the model's queue, as in a gateway."""
        spec = self.spec
        return QueueSettings(
            max_queue=spec.max_queue,
            max_queue_bytes=spec.max_queue_bytes,
            max_wait_s=spec.max_wait_s,
            queue_order=spec.queue_order,
            hold_s=spec.scaling.hold_s,
        )

    @property
    def judged(self) -> Objectives:
        """The objectives that requests are judged by: the spec's, or DEFAULT_OBJECTIVES if it limits no time."""
        own = self.spec.objectives
        return own if own.ttft_ms or own.tpot_ms or own.queue_ms else DEFAULT_OBJECTIVES

    @property
    def typical_prefill_s(self) -> float:
        """The prefill time of one prompt of TYPICAL_PROMPT tokens."""
        if self.encoder is not None:
            return self.gather_s + self.batch_s(self.inputs(TYPICAL_PROMPT))
        return self.prefill_s((TYPICAL_PROMPT,))

    def inputs(self, tokens: int) -> list[int]:
        """Returns the lengths of an encoder's inputs in a request: one, or as few as its length allows, as equal as
        possible."""
        assert self.encoder is not None
        count = math.ceil(tokens / self.encoder.buckets[-1])
        return [tokens * (i + 1) // count - tokens * i // count for i in range(count)]

    def batch_s(self, lengths: Sequence[int]) -> float:
        """Returns the time of a batch of an encoder's inputs."""
        encoder, longest = self.encoder, max(lengths)
        assert encoder is not None
        length = longest if encoder.pads_to_longest else self.padded(longest)
        return self._base_and_rows(length, encoder.filled(len(lengths)))

    def padded(self, tokens: int) -> int:
        """Returns the smallest bucket that holds ``tokens``; ``tokens`` itself beyond the largest."""
        at = bisect_left(self.buckets, tokens)
        return self.buckets[at] if at < len(self.buckets) else tokens

    def prefill_s(self, prompts: Sequence[int]) -> float:
        """Returns the time of one prefill of several prompts, each padded to the bucket of the longest."""
        return self._base_and_rows(self.padded(max(prompts)), len(prompts))

    def service_s(self, prompt_tokens: int, output_tokens: int) -> float:
        """Returns how long a request holds its slot without other requests."""
        return self.prefill_s((prompt_tokens,)) + self.speed.step_s * (output_tokens - 1)

    def _base_and_rows(self, length: int, rows: int) -> float:
        speed = self.speed
        return speed.prefill_base_s + (speed.prefill_token_s + speed.prefill_square_s * length) * length * rows


@dataclass(frozen=True)
class Scenario:
    """A spec and all that a simulation derives from it; ``models`` are those of the spec, in its order."""

    spec: Spec
    hosts: tuple[Host, ...]
    models: tuple[SimModel, ...]
    checkpoints: Mapping[str, Checkpoint] = field(default_factory=dict)
    name: str = ""  # of the spec's file
    gateways: int = 1
    host_start_s: float = START_S  # from the request of a machine until it joins
    begins: float = BEGINS  # when the run begins, for schedules, in seconds since the epoch

    @property
    def cores(self) -> int:
        """The cores of all hosts, without reserved ones."""
        return sum(len(set(range(host.cores)) - set(host.reserved_cores)) for host in self.hosts)


class InvalidSpec(Failed):
    """The spec has errors; ``problems`` are reported before this one."""

    def __init__(self, name: str, problems: tuple[Problem, ...]) -> None:
        super().__init__("spec-invalid", f"{name} has errors", f"corewright validate {name} shows them")
        self.problems = problems


def scenario_of(file: SpecFile, *, hosts: int | None = None, measured: Iterable[MeasuredSpeed] = ()) -> Scenario:
    """Returns the scenario of a spec. ``hosts`` replaces its number of hosts, ``measured`` speeds correct the estimates
    (`calibrated`). Raises Failed."""
    if file.spec is None or has_errors(file.problems):
        raise InvalidSpec(file.name, file.problems)
    spec, fleet_hosts, every = file.spec, file.hosts, tuple(measured)
    if hosts is not None:
        spec, fleet_hosts = _with_hosts(spec, hosts, file.name, file.machine)

    def simulated(model: ModelSpec) -> SimModel:
        checkpoint = file.checkpoints.get(model.name)
        engine = resolve(model.engine, fleet_hosts[0], model.kind)
        speed = calibrated(model, checkpoint, engine, fleet_hosts, every)
        has_cores = any(takes_cores(resolve(model.engine, host, model.kind), host) for host in fleet_hosts)
        return SimModel.of(model, speed, checkpoint, engine, model.tp_degree if has_cores else 0)

    return Scenario(spec, fleet_hosts, tuple(map(simulated, spec.models)), file.checkpoints, file.name)


def _with_hosts(spec: Spec, count: int, name: str, machine: Machine) -> tuple[Spec, tuple[Host, ...]]:
    if len(spec.hosts) > 1:
        raise Failed("hosts-of-two-types", f"{name} has {len(spec.hosts)} entries of hosts: --hosts needs one", "")
    entry = spec.hosts[0] if spec.hosts else HostsSpec(emulate=DEFAULT_EMULATION)
    changed = spec.model_copy(update={"hosts": (entry.model_copy(update={"count": count, "min": None, "max": None}),)})
    return changed, hosts_for(changed, machine)
