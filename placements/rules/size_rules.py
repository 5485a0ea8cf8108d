"""Rules of sizes: the degree is legal and divides the heads, and a replica fits the memory of cores and host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from placements.engines.memory import costs_of
from placements.engines.registry import capabilities
from placements.facts.plural import counted, joined
from placements.facts.topology import DEGREES, TOPOLOGIES, Topology, degree, doubt
from placements.resources.host_memory import host_memory
from placements.resources.memory import USABLE_HBM, MemoryEstimate, estimate, fits, measured_surplus, usable_hbm
from placements.rules.case import Case, Rule, has_tp, on_each
from placements.spec.problems import Problem
from placements.spec.schema import Buckets


def degree_is_legal(case: Case) -> Iterator[Problem]:
    """A host's family supports the tensor-parallel degree, and the host has the cores."""
    tp, path, types = case.model.tp_degree, ("tp_degree",), case.fleet.types
    if not types:
        return
    legal = [topology for topology in types if case.has_degree(topology)]
    supported = {topology: [tp for tp in DEGREES[topology.family] if tp <= topology.cores] for topology in types}
    if all(tp > topology.cores for topology in types):
        fact = f"tp_degree {tp} exceeds the {counted(types[0].cores, 'core')} of {case.hosts[0].name}"
        if len(types) > 1:
            sizes = on_each(types, lambda topology: counted(topology.cores, "core"))
            fact = f"tp_degree {tp} exceeds the cores of every host: {sizes}"
        every = sorted({tp for degrees in supported.values() for tp in degrees})
        fitting = [tp for tp in every if case.works(tp_degree=tp)]
        hint = f"use {joined(fitting, 'or')}, or a larger instance type" if fitting else "use a larger instance type"
        yield case.problem("degree-exceeds-host", path, fact, hint)
    elif not legal:
        fact = f"tp_degree {tp} is not supported on {types[0].family} ({joined(supported[types[0]])})"
        if len(types) > 1:
            fact = f"tp_degree {tp} is not supported on any host: {on_each(types, lambda t: joined(supported[t]))}"
        every = sorted({tp for degrees in supported.values() for tp in degrees})
        fitting = [tp for tp in every if case.works(tp_degree=tp)]
        hint = f"use {joined(fitting, 'or')}" if fitting else "use another tp_degree"
        if case.works(allow_degrees=(*case.model.allow_degrees, tp)):
            hint += f", or add allow_degrees: [{tp}] if you know that it works"
        yield case.problem("illegal-degree", path, fact, hint)
    elif tp not in case.model.allow_degrees:
        doubts = [doubt(topology, row) for topology in legal if (row := degree(topology.family, tp))]
        if all(doubts):
            fact, hint = f"tp_degree {tp} {doubts[0]}", f"allow_degrees: [{tp}] silences this"
            yield case.problem("undocumented-degree", path, fact, hint, "warning")


def heads_divisible(case: Case) -> Iterator[Problem]:
    """tp_degree divides the attention heads, unless the spec allows padding."""
    tp, checkpoint = case.model.tp_degree, case.checkpoint
    if checkpoint is None or not case.hosts or case.model.allow_head_padding or checkpoint.heads % tp == 0:
        return
    dividing = [degree for degree in degrees_of(case.fleet.types) if checkpoint.heads % degree == 0]
    fact = f"tp_degree {tp} does not divide the {checkpoint.heads} attention heads of {case.model.name}"
    roomy = [degree for degree in dividing if any(case.has_room(degree, topology) for topology in case.fleet.types)]
    roomy = [degree for degree in roomy if case.works(tp_degree=degree)]
    hint = "add allow_head_padding: true for an engine that pads with zeros"
    if roomy:
        hint = f"use {joined(roomy, 'or')}, or {hint}"
    yield case.problem("heads-not-divisible", ("tp_degree",), fact, hint)


def degrees_of(types: Sequence[Topology]) -> list[int]:
    """Returns the degrees that any of the types supports, ascending."""
    return sorted({tp for topology in types for tp in DEGREES[topology.family] if tp <= topology.cores})


def fits_memory(case: Case) -> Iterator[Problem]:
    """Weights, KV cache and overhead fit into a core's HBM on at least one type."""
    model, checkpoint, need = case.model, case.checkpoint, case.memory()
    types = [topology for topology in case.fleet.types if case.has_degree(topology)] or case.fleet.types
    if checkpoint is None or need is None or not types or any(fits(need, topology) for topology in types):
        return
    largest = max(types, key=lambda topology: topology.hbm_per_core_gib)
    hbm, limit = largest.hbm_per_core_gib, usable_hbm(largest, need)
    surplus = measured_surplus(largest, need)
    less = f" - {surplus:g}, measured," if surplus else ""
    of = f" of {largest.instance}" if len(types) > 1 else ""
    terms = (
        f"{need} {need.on_cores(model.tp_degree)}, more than {USABLE_HBM} x {hbm}{less} = {limit:.2f} GiB of HBM{of}"
    )
    setting = f"tp_degree {model.tp_degree}, max_batch {model.max_batch}, max_len {model.length(checkpoint)}"
    fact = f"{model.name} does not fit into memory with {setting}, {model.dtype_on(case.engine)}: {terms}"
    ways = list(_ways_to_fit(case, types))
    hint = "; or ".join(ways) or "use a larger instance type and a greater tp_degree"
    yield case.problem("hbm-exceeded", ("tp_degree",), fact, hint)


def _ways_to_fit(case: Case, types: Sequence[Topology]) -> Iterator[str]:
    """Yields changes that would make the model fit the HBM of these types."""
    model, checkpoint = case.model, case.checkpoint
    assert checkpoint is not None

    def needs(**fields: object) -> MemoryEstimate:
        return estimate(model.model_copy(update=fields), checkpoint, case.engine, case.draft)

    lengths = Buckets(prefill=(model.length(checkpoint),))
    copies = costs_of(case.engine).copies(model, model.length(checkpoint))
    if copies > 1 and any(fits(needs(buckets=lengths), topology) for topology in types):
        total = needs(buckets=lengths).total
        yield f"one length needs {total:.2f} GiB: buckets: {{prefill: [{lengths.prefill[0]}]}}"
        return
    divided = model.kind == "generate" or capabilities(case.engine).runs_on == "server"
    for tp in degrees_of(case.fleet.types) if divided else ():
        larger = needs(tp_degree=tp)
        divides = tp > model.tp_degree and checkpoint.heads % tp == 0
        has_room = any(fits(larger, topology) for topology in case.fleet.types if has_tp(topology, tp))
        if divides and has_room and case.works(tp_degree=tp):
            yield f"tp_degree {tp} needs {larger.total:.2f} GiB {larger.on_cores(tp)}"
            break
    if any(fits(needs(max_batch=1, max_len=1), topology) for topology in types):
        yield "lower max_batch or max_len, or set hbm_overhead_gib if you measured the overhead"
        return
    smaller = needs(quantize="int8")
    has_room = any(fits(smaller, topology) for topology in types)
    if (
        model.quantize is None
        and "int8" in capabilities(case.engine).quantize
        and has_room
        and case.works(quantize="int8")
    ):
        yield f"quantize: int8 needs {smaller.total:.2f} GiB {smaller.on_cores(model.tp_degree)}"
    need = needs()
    for topology in TOPOLOGIES.values():
        served = not topology.note and capabilities(case.engine).runs_in(topology.family)
        if served and topology not in types and case.has_degree(topology) and fits(need, topology):
            usable = f"{usable_hbm(topology, need):.2f} GiB usable"
            yield f"use a host of type {topology.instance}, whose cores have {usable}"
            break


def fits_host_memory(case: Case) -> Iterator[Problem]:
    """One replica fits into the memory of at least one host while it loads; a compile should, too."""
    model, checkpoint = case.model, case.checkpoint
    hosts = [host for host, _ in (case.fleet if case.hosts else case.all_hosts).kinds]
    hosts = [host for host in hosts if case.suits(host)]
    memory = [host.memory_gib for host in hosts if host.memory_gib is not None]
    if not memory or len(memory) < len(hosts):
        return
    largest = max(hosts, key=lambda host: host.memory_gib or 0.0)
    estimated = None
    if checkpoint is not None:
        release, surplus_gib = case.spec.vllm_release_on(largest), largest.measured.host_gib
        estimated = host_memory(model, checkpoint, case.engine, case.draft, release, surplus_gib)
    if model.host_memory_gib is not None:
        need, path = model.host_memory_gib, "host_memory_gib"
    elif estimated is not None:
        need, path = estimated.load, "source"
    else:
        return
    if need > max(memory):
        fact = f"a replica of {model.name} needs {need:.2f} GiB of host memory to load"
        fact += f", but {largest.name} has {max(memory):g} GiB for replicas"
        hint = "use a larger instance type, or set host_memory_gib if you measured less"
        yield case.problem("host-memory-exceeded", (path,), fact, hint)
    # encoders are traced one by one, which AWS does on inf2.xlarge; with a neff_cache another machine can compile
    compiling = estimated.compile if estimated is not None and model.kind == "generate" else 0.0
    if compiling > max(memory) and model.neff_cache is None:
        fact = f"a compile of {model.name} may need {compiling:.0f} GiB of host memory"
        fact += f", but {largest.name} has {max(memory):g} GiB: the kernel may kill the compiler"
        hint = "set neff_cache, and run `corewright compile SPEC --push` on a larger machine"
        yield case.problem("compile-memory-exceeded", ("source",), fact, hint, "warning")


SIZE_RULES: tuple[Rule, ...] = (degree_is_legal, heads_divisible, fits_memory, fits_host_memory)
