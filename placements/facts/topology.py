"""Instance types, degrees and alignments, each with its source; the hosts of a fleet, and the machine of a command."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from placements.facts.cpu_layout import LAYOUTS, CpuLayout, PhysicalCore, cpus_of_neuron_cores

Link = Literal["none", "line", "ring", "torus", "switch"]


@dataclass(frozen=True)
class MeasuredConstants:
    """The values that `corewright verify` measured on machines of a type, if they are worse than plans assume."""

    hbm_gib: float = 0.0  # HBM that a replica needs on each core beyond its estimate
    host_gib: float = 0.0  # host memory that it needs beyond its estimate
    read_bytes_s: float | None = None  # at which the disk of the home is read


@dataclass(frozen=True)
class Topology:
    """The hardware of an instance type."""

    instance: str
    family: str
    devices: int  # /dev/neuron0 ... /dev/neuron<devices - 1>
    cores_per_device: int  # cores as NEURON_RT_VISIBLE_CORES counts them
    hbm_per_core_gib: int
    vcpus: int
    memory_gib: int  # host memory, without HBM
    link: Link  # topology of the links between devices; a torus is 4 x 4
    lnc: int | None = None  # physical cores in one logical core; None: not configurable
    note: str = ""  # uncertainty of these facts
    measured: MeasuredConstants = field(default=MeasuredConstants(), compare=False)

    @property
    def cores(self) -> int:
        """All cores of the machine."""
        return self.devices * self.cores_per_device

    def at_lnc(self, lnc: int | None) -> Topology:
        """Returns the topology with another number of physical cores in a logical core; None: unchanged.

        LNC 1 has twice as many cores with half of the HBM each. Raises ValueError if the family does not support it.
        """
        if lnc is None or lnc == self.lnc:
            return self
        if self.lnc is None or lnc not in LNC_CHOICES:
            raise ValueError(f"{self.instance} does not support LNC {lnc}")
        cores, hbm = self.cores_per_device * self.lnc // lnc, self.hbm_per_core_gib * lnc // self.lnc
        return replace(self, cores_per_device=cores, hbm_per_core_gib=hbm, lnc=lnc)


DEFAULT_LNC = 2
LNC_CHOICES = (1, DEFAULT_LNC)
LNC_FAMILIES = frozenset({"trn2", "trn3"})
"""The families with logical cores (AWS Neuron SDK docs, arch/neuron-features/logical-neuroncore-config.rst)."""

_TRN3 = "the name is from the Neuron driver; vCPUs and memory are those of an UltraServer, divided by its servers"


def family_of(instance: str) -> str:
    """Returns the family of an instance type, or of a family itself: "trn1" of "trn1n.32xlarge"."""
    return instance.partition(".")[0][:4]


def _type(
    instance: str, devices: int, cores: int, hbm: int, vcpus: int, memory_gib: int, link: Link, note: str = ""
) -> Topology:
    family = family_of(instance)
    lnc = DEFAULT_LNC if family in LNC_FAMILIES else None
    return Topology(instance, family, devices, cores, hbm, vcpus, memory_gib, link, lnc, note)


TOPOLOGIES: Mapping[str, Topology] = {
    topology.instance: topology
    for topology in (  # AWS Neuron SDK docs, about-neuron/arch/neuron-hardware/<family>-arch.rst
        _type("inf2.xlarge", 1, 2, 16, 4, 16, "none"),
        _type("inf2.8xlarge", 1, 2, 16, 32, 128, "none"),
        _type("inf2.24xlarge", 6, 2, 16, 96, 384, "line"),
        _type("inf2.48xlarge", 12, 2, 16, 192, 768, "ring"),
        _type("trn1.2xlarge", 1, 2, 16, 8, 32, "none"),
        _type("trn1.32xlarge", 16, 2, 16, 128, 512, "torus"),
        _type("trn1n.32xlarge", 16, 2, 16, 128, 512, "torus"),
        _type("trn2.3xlarge", 1, 4, 24, 12, 128, "none"),  # deploy/files/manifests/daemonset.yaml
        _type("trn2.48xlarge", 16, 4, 24, 192, 2048, "torus"),
        _type("trn2u.48xlarge", 16, 4, 24, 192, 2048, "torus"),  # an UltraServer has four, each a host
        _type("trn3.48xlarge", 16, 4, 36, 192, 2048, "switch", _TRN3),  # UltraServer Gen1: four
        _type("trn3e.24xlarge", 4, 4, 36, 64, 768, "switch", _TRN3),  # UltraServer Gen2: 36
    )
}
"""The instance types with Neuron devices that serve language models, at their default LNC. At LNC 1 a core of trn2 has
nominally half of the HBM; in practice the halves of a bank are uneven (AWS Neuron SDK docs,
neuron-runtime/explore/device-memory.rst)."""


@dataclass(frozen=True)
class Degree:
    """The alignment of one tensor-parallel degree on the cores of a family."""

    tp: int
    legal: int  # ranges must begin at a multiple of this (hardware)
    preferred: int  # ranges should begin at a multiple of this, itself a multiple of ``legal``
    documented: bool = True  # in the guides of the engines
    doubt: str = ""  # text after "tp_degree N " on why it may not work; "" if nothing is known


_ONE_PAGE = "is documented on one AWS page only, not in the guides of the engines"
_WHOLE_DEVICES = "was rejected for one user with lnc 2: the runtime accepted one core, or whole devices of four"

DEGREES: Mapping[str, Mapping[int, Degree]] = {
    # Transformers NeuronX developer guide and NxD Inference API guide (1, 2, 4, 8, 24), 12 only on the page
    # about-neuron/transformers/generative-llm-inference-with-neuron.rst, 16 only in a README of a contributed model
    # (neuronx-distributed-inference, contrib: gemma-4-31b on inf2.48xlarge). Any even number of cores on consecutive
    # devices, and the full ring: AWS Neuron SDK 2.21 docs, general/arch/neuron-features/collective-communication.rst.
    "inf2": {
        1: Degree(1, 1, 1),
        2: Degree(2, 2, 2),  # both cores of one device
        4: Degree(4, 2, 4),
        8: Degree(8, 2, 8),
        12: Degree(12, 2, 12, False, _ONE_PAGE),  # preferred at 0 and 12: two fill the ring
        16: Degree(16, 2, 8, False, "is not in AWS's documentation, only in the README of one contributed model"),
        24: Degree(24, 24, 24),
    },
    # Transformers NeuronX developer guide (1, 2, 8, 32) and NxD Inference API guide (16 as well). The device sets that
    # AWS Neuron SDK docs, deploy/infrastructure/scheduler.rst, allow.
    "trn1": {tp: Degree(tp, tp, tp) for tp in (1, 2, 8, 16, 32)},
    # NxD Inference API guide, LNC 2: it shows only ranges at multiples of the degree, without calling others illegal.
    # The doubt about 2: neuronx-distributed-inference, contrib/models/Trinity/README.md, on a trn2.3xlarge.
    # Documents of vLLM Neuron show degrees of trn2 for trn3, too.
    **{
        family: {tp: Degree(tp, tp, tp, doubt=_WHOLE_DEVICES if tp == 2 else "") for tp in (1, 2, 4, 8, 16, 32, 64)}
        for family in ("trn2", "trn3")
    },
}


def degree(family: str, tp: int) -> Degree | None:
    """Returns the table's row, or None if the family does not support the degree."""
    return DEGREES[family].get(tp)


def doubt(topology: Topology, row: Degree) -> str:
    """Returns text after "tp_degree N " on why the degree may not work on the type; "" if nothing is known.

    The guides for the families with logical cores are about LNC 2.
    """
    if topology.lnc == 1 and row.tp > 1:
        return f"is documented for {topology.family} with lnc 2 only, but lnc is 1"
    return row.doubt


def alignment(family: str, tp: int) -> Degree:
    """Returns the table's row, or consecutive whole devices for another degree (the spec's ``allow_degrees``).

    With logical cores the first core is a multiple of every degree: otherwise vLLM Neuron fails in its warm-up (AWS
    Neuron SDK docs, vllm-neuron/docs/tutorials/tutorial-epd-1e-1pd-xeypd.md).
    """
    whole = math.lcm(2, tp)
    return degree(family, tp) or Degree(tp, whole if family in LNC_FAMILIES else 2, whole, documented=False)


@dataclass(frozen=True)
class Host:
    """A machine of a fleet or of a plan.

    ``topology`` is None for a plain CPU host, where replicas use no cores.
    """

    name: str  # "inf2.48xlarge/0"
    topology: Topology | None
    cpus: tuple[int, ...]  # ids of the available CPUs, ascending
    reserve_vcpus: int = 0  # to reserve for the system, before rounding up to whole physical cores
    reserved_cores: frozenset[int] = frozenset()
    emulated: bool = False  # the accelerator only; CPUs are real
    memory_gib: float | None = None  # available to replicas; None: no limit (emulated hosts share the machine's memory)
    layout: CpuLayout | None = None  # as observed on the machine; None: unknown

    @property
    def machine(self) -> str:
        """The kind of machine that measurements apply to. Emulated hosts have kinds of their own, so that what is
        measured there never corrects an estimate for a real instance type."""
        if self.topology is None:
            return "CPU"
        return f"emulated {self.topology.instance}" if self.emulated else self.topology.instance

    @property
    def measured(self) -> MeasuredConstants:
        """The values that were measured on machines of this kind."""
        return MeasuredConstants() if self.topology is None else self.topology.measured

    @property
    def cores(self) -> int:
        """The number of NeuronCores, reserved ones included; 0 on a plain CPU host."""
        return self.topology.cores if self.topology else 0

    @cached_property
    def cpu_layout(self) -> CpuLayout | None:
        """The layout of the CPUs; None: unknown. An emulated host has its type's if the machine has its CPUs."""
        published = None
        if self.topology is not None and self.cpus[: self.topology.vcpus] == tuple(range(self.topology.vcpus)):
            published = LAYOUTS.get(self.topology.instance)
        return (published or self.layout) if self.emulated else (self.layout or published)

    @cached_property
    def physical_cores(self) -> tuple[PhysicalCore, ...]:
        """The physical cores available to replicas, in the order of `cpus_of_neuron_cores`. If the layout is unknown,
        each CPU is one, in the order of the ids."""
        topology = self.topology
        if self.cpu_layout is None:
            return tuple((cpu,) for cpu in self.cpus[max(0, self.reserve_vcpus) :])
        cores, per_device = (topology.cores, topology.cores_per_device) if topology else (1, 1)
        return cpus_of_neuron_cores(self.cpu_layout, self.cpus, self.reserve_vcpus, cores, per_device)

    @cached_property
    def usable_cpus(self) -> tuple[int, ...]:
        """The CPUs available to replicas, ascending."""
        return tuple(sorted(cpu for core in self.physical_cores for cpu in core))


@dataclass(frozen=True)
class Machine:
    """The machine that the command runs on, as observed by the caller."""

    cpus: tuple[int, ...]  # ids of the CPUs this process may use, ascending
    instance: str | None = None  # instance type when it has Neuron devices
    joined: bool = False  # a Ray cluster was joined: each host is a machine of its own, emulated ones with these CPUs
    devices: tuple[int, ...] | None = None  # n of its /dev/neuron<n>, which a container may have some of; None: all
    layout: CpuLayout | None = None  # of all its CPUs; None: unknown
    measured: Mapping[str, MeasuredConstants] = field(default_factory=dict)  # by `Host.machine`
