"""The process of a replica: its CPU threads, its CPUs, and its environment variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from placements.engines.registry import HOST_ENGINES, Engine
from placements.facts.core_range import CoreRange, contiguous
from placements.facts.topology import Host
from placements.spec.schema import ModelSpec

Policy = Literal["share", "lmi"] | int  # an int is a fixed number of threads


def threads(policy: Policy, tp_degree: int, host: Host) -> int:
    """Returns OMP_NUM_THREADS of one replica, at least 1.

    ``share``: the CPUs of floor(physical cores without the reserve x tp_degree / host cores) physical cores,
    independent of other replicas, so that a start never changes the threads of others. On a plain CPU host: tp_degree
    threads, limited by the budget. ``lmi``: 2 x tp_degree as in LMI's Connection.java. A number: that number.
    """
    if isinstance(policy, int):
        return policy
    if policy == "lmi":
        return 2 * tp_degree
    physical = host.physical_cores
    if not host.cores:
        return max(1, min(tp_degree, len(host.usable_cpus)))
    return max(1, len(physical) * tp_degree // host.cores * len(physical[0])) if physical else 1


def arithmetic(policy: Policy, tp_degree: int, host: Host) -> str:
    """Returns the arithmetic of ``threads`` as text: "floor(92 CPU cores x 8 / 24) x 2 = 60", and if each CPU is a
    physical core "floor((64 - 4) x 8 / 24) = 20"."""
    result = threads(policy, tp_degree, host)
    if isinstance(policy, int):
        return f"fixed = {result}"
    if policy == "lmi":
        return f"2 x {tp_degree} = {result}"
    usable, physical = len(host.usable_cpus), len(host.physical_cores)
    budget = f"({len(host.cpus)} - {len(host.cpus) - usable})"
    if not host.cores:
        return f"min({tp_degree}, {budget}) = {result}"
    floor, siblings = physical * tp_degree // host.cores, usable // max(1, physical)
    rounded = ", at least 1" if floor < 1 else ""
    if siblings <= 1:
        return f"floor({budget} x {tp_degree} / {host.cores}) = {floor}{rounded}"
    return f"floor({physical} CPU cores x {tp_degree} / {host.cores}) x {siblings} = {floor * siblings}{rounded}"


def cpu_mask(host: Host, cores: CoreRange | None, count: int) -> tuple[int, ...]:
    """Returns the CPUs of the replica on ``cores`` with ``count`` threads, ascending; () if it is not bound.

    With P physical cores and C NeuronCores, the range a-b gets the physical cores floor(a*P/C) to floor((b+1)*P/C) - 1
    of the host's order, so that disjoint ranges share no physical core. With more threads than these have CPUs, it gets
    all CPUs of the NUMA nodes of its devices, which it shares with others. The replica is not bound if its share is
    less than one physical core, if these nodes have fewer CPUs than it has threads, or if the layout of a real host is
    unknown: the CPUs could be far from the devices.
    """
    if cores is None or not host.cores or (host.cpu_layout is None and not host.emulated):
        return ()
    physical = host.physical_cores
    if len(physical) * len(cores) < host.cores:
        return ()
    start, stop = cores.first * len(physical) // host.cores, (cores.last + 1) * len(physical) // host.cores
    mask = tuple(sorted(cpu for core in physical[start:stop] for cpu in core))
    return mask if count <= len(mask) else _node_mask(host, cores, count)


def _node_mask(host: Host, cores: CoreRange, count: int) -> tuple[int, ...]:
    """Returns the CPUs of replicas on the NUMA nodes of the devices; () if they are fewer than ``count``, or all."""
    layout = host.cpu_layout
    if layout is None or host.topology is None:
        return ()
    devices = {core // host.topology.cores_per_device for core in range(cores.first, cores.last + 1)}
    nodes = {layout.device_nodes[device] if device < len(layout.device_nodes) else None for device in devices}
    of_nodes = {cpu for core, node in zip(layout.cores, layout.nodes, strict=True) if node in nodes for cpu in core}
    mask = tuple(sorted(of_nodes.intersection(host.usable_cpus)))
    return mask if None not in nodes and count <= len(mask) < len(host.usable_cpus) else ()


def environment(
    model: str,
    replica: int,
    cores: CoreRange | None,
    threads: int,
    cpus: Sequence[int] = (),
    lnc: int | None = None,
    compiling: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Returns the variables of one replica, with the ``compiling`` variables.

    NEURON_RT_VISIBLE_CORES is "a-b" or "a": optimum-neuron accepts no other form. NEURON_RT_NUM_CORES is never set,
    because optimum-neuron uses the smaller of the two. Empty ``cpus``: the process is not bound to CPUs. ``lnc`` is the
    LNC of the host: the range counts logical cores, and a NEFF loads only under the LNC of its compilation.
    """
    env = {
        "NEURON_PROCESS_TAG": f"{model}/{replica}",  # neuron-monitor shows it as neuron_runtime_tag
        "OMP_NUM_THREADS": str(threads),
        "RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES": "1",  # otherwise Ray rewrites the range
        "TOKENIZERS_PARALLELISM": "false",
    }
    if cores is not None:
        env["NEURON_RT_VISIBLE_CORES"] = str(cores)
        if lnc is not None:
            env["NEURON_LOGICAL_NC_CONFIG"] = str(lnc)
    if threads > 1:
        env["OMP_WAIT_POLICY"] = "PASSIVE"  # spinning threads of two processes on shared CPUs cost a factor of 30
    if cpus:
        env["COREWRIGHT_CPUS"] = cpu_list(cpus)
    return dict(sorted({**env, **(compiling or {})}.items()))


def compiling(model: ModelSpec, engine: Engine) -> dict[str, str]:
    """Returns the variables of the Neuron compiler, its cache and fp8; empty for engines that compile nothing.

    NEURON_CC_FLAGS is set only if the spec has flags: the literal flags are part of the cache key of compiled code
    (transformers-neuronx `compiler`), so an empty value or another order would miss the cache. The optimization level
    is written as ``-O2``. The cache has its own variable, because ``--cache_dir`` would change the key from host to
    host. The feature guide of NxD Inference requires the two variables for fp8.
    """
    if engine in HOST_ENGINES:
        return {}
    level = [] if model.compiler.optlevel is None else [f"-O{model.compiler.optlevel}"]
    flags = " ".join([*level, *model.compiler.flags.split()])
    variables = {"NEURON_CC_FLAGS": flags, "NEURON_COMPILE_CACHE_URL": model.neff_cache_location or ""}
    if "fp8" in (model.quantize, model.quantize_kv):
        variables |= {"XLA_HANDLE_SPECIAL_SCALAR": "1", "UNSAFE_FP8FNCAST": "1"}
    return {name: value for name, value in variables.items() if value}


def cpu_list(cpus: Sequence[int]) -> str:
    """Formats CPU ids in their order as a list of taskset and cpuset: "0-2,8-10"."""
    return ",".join(map(str, contiguous(cpus)))
