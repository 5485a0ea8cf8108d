"""What is known of machines: instance types, tensor-parallel degrees and alignments, each with its source; and Host."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

_ARCH = "AWS Neuron SDK docs, about-neuron/arch/neuron-hardware/inf2-arch.rst"
_COLLECTIVES = "AWS Neuron SDK 2.21 docs, general/arch/neuron-features/collective-communication.rst"
_GUIDES = "Transformers NeuronX developer guide and NxD Inference API guide (inf2: 1, 2, 4, 8, 24)"
_LLM_PAGE = "AWS Neuron SDK docs, about-neuron/transformers/generative-llm-inference-with-neuron.rst"


@dataclass(frozen=True)
class Topology:
    """An instance type. Immutable facts, none of which needs the machine at hand."""

    instance: str
    family: str
    devices: int  # /dev/neuron0 ... /dev/neuron<devices - 1>
    cores_per_device: int  # cores as NEURON_RT_VISIBLE_CORES counts them
    hbm_per_core_gib: int
    vcpus: int
    memory_gib: int  # of the host, not of the devices
    link: Literal["none", "line", "ring"]  # how the devices are joined
    source: str

    @property
    def cores(self) -> int:
        """Cores of the whole machine."""
        return self.devices * self.cores_per_device


def _inf2(size: str, devices: int, vcpus: int, memory_gib: int, link: Literal["none", "line", "ring"]) -> Topology:
    return Topology(f"inf2.{size}", "inf2", devices, 2, 16, vcpus, memory_gib, link, _ARCH)


TOPOLOGIES: Mapping[str, Topology] = MappingProxyType(
    {
        topology.instance: topology
        for topology in (
            _inf2("xlarge", 1, 4, 16, "none"),
            _inf2("8xlarge", 1, 32, 128, "none"),
            _inf2("24xlarge", 6, 96, 384, "line"),
            _inf2("48xlarge", 12, 192, 768, "ring"),
        )
    }
)


@dataclass(frozen=True)
class Degree:
    """How one tensor-parallel degree may lie on the cores of a family."""

    tp: int
    legal: int  # a range begins at a multiple of this many cores: what the hardware allows
    preferred: int  # a range had better begin at a multiple of this; always a multiple of ``legal``
    documented: bool
    source: str


DEGREES: Mapping[str, Mapping[int, Degree]] = MappingProxyType(
    {
        "inf2": MappingProxyType(
            {
                1: Degree(1, 1, 1, True, _GUIDES),
                2: Degree(2, 2, 2, True, _GUIDES),  # both cores of one device
                4: Degree(4, 2, 4, True, f"{_GUIDES}; any consecutive devices: {_COLLECTIVES}"),
                8: Degree(8, 2, 8, True, f"{_GUIDES}; any consecutive devices: {_COLLECTIVES}"),
                12: Degree(12, 12, 12, False, _LLM_PAGE),  # named on that one page only
                24: Degree(24, 24, 24, True, f"{_GUIDES}; the full ring: {_COLLECTIVES}"),
            }
        )
    }
)


def degree(family: str, tp: int) -> Degree | None:
    """The table's row, or None when the family has no such degree."""
    return DEGREES[family].get(tp)


def alignment(family: str, tp: int) -> Degree:
    """The table's row; for a degree outside it (the spec's ``allow_degrees``) consecutive whole devices."""
    known = degree(family, tp)
    return known or Degree(tp, 2, math.lcm(2, tp), False, "the spec's allow_degrees; consecutive devices")


@dataclass(frozen=True)
class Host:
    """A machine that replicas run on, or one that is planned for.

    ``topology`` is None for a plain CPU host, where replicas take no cores.
    """

    name: str  # "inf2.48xlarge/0"
    topology: Topology | None
    cpus: tuple[int, ...]  # ids of the CPUs that may be used, ordered by NUMA node
    reserve_vcpus: int = 0  # left to the system: the first of ``cpus``
    reserved_cores: frozenset[int] = frozenset()
    emulated: bool = False  # the accelerator only; CPUs are real

    @property
    def cores(self) -> int:
        """NeuronCores, reserved ones included; 0 on a plain CPU host."""
        return self.topology.cores if self.topology else 0

    @property
    def usable_cpus(self) -> tuple[int, ...]:
        """The CPUs left for replicas."""
        return self.cpus[max(0, self.reserve_vcpus) :]
