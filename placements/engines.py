"""Which engines exist, and what of their choice decides a placement: dtype, and whether they take cores."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

from placements.topology import Host

Engine = Literal["auto", "cpu", "echo", "transformers-neuronx", "nxd-inference", "optimum-neuron", "torch-neuronx"]
Dtype = Literal["bf16", "fp16", "fp32"]

ENGINES: tuple[Engine, ...] = get_args(Engine)
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
BYTES: Mapping[Dtype, int] = MappingProxyType({"bf16": 2, "fp16": 2, "fp32": 4})


class Option(NamedTuple):
    """A number that one engine's ``engine_options`` may hold, and its range."""

    least: int
    most: int
    whole: bool


ENGINE_OPTIONS: Mapping[Engine, Mapping[str, Option]] = MappingProxyType(
    {
        "cpu": MappingProxyType({"prefill_chunk": Option(1, 1 << 24, whole=True)}),
        "echo": MappingProxyType({"step_ms": Option(0, 3_600_000, whole=False)}),
    }
)
"""What ``engine_options`` may hold: ``prefill_chunk``, how many tokens of a prompt go through the model together;
``step_ms``, the time that each of echo's steps takes, to play a slow engine."""

HOST_ENGINES: frozenset[Engine] = frozenset({"cpu", "echo"})  # they compute on the host's CPUs
NXD_ENGINES: frozenset[Engine] = frozenset({"nxd-inference", "optimum-neuron"})  # built on NeuronX Distributed


def resolve(engine: Engine, host: Host) -> Engine:
    """What ``auto`` means on this host: cpu where no accelerator is. On Neuron it stays ``auto``.

    Which Neuron engine an image holds is known only on the host itself, and decides no placement.
    """
    return "cpu" if engine == "auto" and (host.emulated or host.topology is None) else engine


def takes_cores(engine: Engine, host: Host) -> bool:
    """Whether a replica holds NeuronCores there: always on an emulated host; on a real one only the Neuron engines."""
    return host.topology is not None and (host.emulated or resolve(engine, host) not in HOST_ENGINES)


def needs_neuron(engine: Engine) -> bool:
    """Whether the engine can run only where real Neuron devices are."""
    return engine != "auto" and engine not in HOST_ENGINES


def default_dtype(engine: Engine) -> Dtype:
    """fp32 for the engines of the host's CPUs, bf16 on Neuron. Expects a resolved engine."""
    return "fp32" if engine in HOST_ENGINES else "bf16"
