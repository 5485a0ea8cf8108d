"""Models and scenarios for the simulator without a spec file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.simulate.scenario import Scenario, SimModel
from placements.facts.topology import Machine
from placements.planner.spec_hosts import hosts_for
from placements.resources.estimate import Speed
from placements.spec.schema import HostsSpec, ModelSpec, Replicas, Spec
from placements.spec.sections import Objectives, Scaling
from workers.messages.encoder_protocol import EncoderSpec

_MACHINE = Machine(tuple(range(8)))
PATIENCE_S = 86_400.0  # the longest wait for a first replica, unless another is given


def sim_model(
    name: str,
    *,
    slots: int = 4,
    cores: int = 1,
    least: int = 1,
    most: int = 1,
    step_s: float = 0.05,
    prefill_base_s: float = 0.016,
    prefill_token_s: float = 0.0,
    prefill_square_s: float = 0.0,
    load_s: float = 60.0,
    buckets: tuple[int, ...] = (),
    prefill_tokens: int = 0,
    encoder: EncoderSpec | None = None,
    objectives: dict[str, float] | None = None,
    scaling: dict[str, Any] | None = None,
    **fields: Any,
) -> SimModel:
    """Returns a model of ``least`` to ``most`` replicas with these speeds; ``fields`` are others of its spec."""
    spec = ModelSpec(
        name=name,
        source="./model",
        engine="echo",
        tp_degree=cores,
        allow_degrees=(cores,),
        max_batch=slots,
        replicas=Replicas(min=least, max=most),
        objectives=Objectives(**(objectives or {})),
        scaling=Scaling(**{"hold_s": PATIENCE_S, **(scaling or {})}),
        **{"max_queue_bytes": 1 << 40, **fields},
    )
    speed = Speed(step_s, prefill_base_s, prefill_token_s, prefill_square_s, load_s, 0.0, 0.0, "a benchmark")
    return SimModel(spec, speed, cores, buckets, prefill_tokens, encoder)


def scenario_of(
    models: Sequence[SimModel], *, hosts: int, least: int | None = None, price: float = 0.0, host_start_s: float = 60.0
) -> Scenario:
    """Returns the scenario of these models on ``hosts`` emulated inf2.48xlarge; with ``least``, on so many up to
    ``hosts``."""
    wanted = HostsSpec(emulate="inf2.48xlarge", count=hosts, price_per_core_hour=price)
    if least is not None:
        wanted = wanted.model_copy(update={"count": None, "min": least, "max": hosts})
    spec = Spec(hosts=(wanted,), models=tuple(model.spec for model in models))
    return Scenario(spec, hosts_for(spec, _MACHINE), tuple(models), host_start_s=host_start_s)
