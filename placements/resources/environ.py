"""Placement -> environment of its process. It is complete before the process imports anything of Neuron or torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from placements.facts.core_range import CoreRange
from placements.facts.engines import HOST_ENGINES, Engine
from placements.spec.schema import ModelSpec


def environment(
    model: str,
    replica: int,
    cores: CoreRange | None,
    threads: int,
    cpus: Sequence[int] = (),
    lnc: int | None = None,
    compiling: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The variables of one replica; those of `compiling` among them.

    NEURON_RT_VISIBLE_CORES is "a-b", or "a": optimum-neuron reads no other form. NEURON_RT_NUM_CORES is never set, for
    optimum-neuron takes the smaller of the two. ``cpus`` empty means that the process is not bound to CPUs. ``lnc`` is
    that of the host's topology: the range counts logical cores, and a NEFF loads only under the LNC of its compilation.
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
    """What the Neuron compiler, its cache and its 8-bit floats are told; nothing for engines that compile nothing.

    NEURON_CC_FLAGS is set only where the spec says something: the flags as they are written are a part of the key by
    which compiled code is found again (transformers-neuronx `compiler`), so an empty value or another order would miss
    it. ``-O2`` is the form of the optimization level. The cache has a variable of its own, for ``--cache_dir`` would
    change the key from host to host. The two of fp8 are asked for by the feature guide of NxD Inference.
    """
    if engine in HOST_ENGINES:
        return {}
    level = [] if model.compiler.optlevel is None else [f"-O{model.compiler.optlevel}"]
    flags = " ".join([*level, *model.compiler.flags.split()])
    told = {"NEURON_CC_FLAGS": flags, "NEURON_COMPILE_CACHE_URL": model.neff_cache_location or ""}
    if "fp8" in (model.quantize, model.quantize_kv):
        told |= {"XLA_HANDLE_SPECIAL_SCALAR": "1", "UNSAFE_FP8FNCAST": "1"}
    return {name: value for name, value in told.items() if value}


def cpu_list(cpus: Sequence[int]) -> str:
    """CPU ids in the list form of taskset and cpuset, in the order given: "0-2,8-10"."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(CoreRange(first, last)) for first, last in runs)
