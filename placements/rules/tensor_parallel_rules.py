"""Rules of tensor parallelism: the degree is legal on an instance type and divides heads and experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from placements.facts.plural import counted
from placements.facts.topology import DEGREES, Topology, degree, documented
from placements.rules.case import Case, joined, on_each
from placements.spec.problems import Problem


def degree_is_legal(case: Case) -> Iterator[Problem]:
    """A host's family supports the tensor-parallel degree, and the host has the cores."""
    tp, path, types = case.model.tp_degree, ("tp_degree",), case.fleet.types
    if not types:
        return
    legal = [topology for topology in types if case.has_degree(topology)]
    supported = {topology: [tp for tp in DEGREES[topology.family] if tp <= topology.cores] for topology in types}
    if all(tp > topology.cores for topology in types):
        what = f"tp_degree {tp} exceeds the {counted(types[0].cores, 'core')} of {case.hosts[0].name}"
        if len(types) > 1:
            sizes = on_each(types, lambda topology: counted(topology.cores, "core"))
            what = f"tp_degree {tp} exceeds the cores of every host: {sizes}"
        every = sorted({tp for degrees in supported.values() for tp in degrees})
        fitting = [tp for tp in every if case.works(tp_degree=tp)]
        hint = f"use {joined(fitting, 'or')}, or a larger instance type" if fitting else "use a larger instance type"
        yield case.problem("degree-exceeds-host", path, what, hint)
    elif not legal:
        what = f"tp_degree {tp} is not supported on {types[0].family} ({joined(supported[types[0]])})"
        if len(types) > 1:
            what = f"tp_degree {tp} is not supported on any host: {on_each(types, lambda t: joined(supported[t]))}"
        every = sorted({tp for degrees in supported.values() for tp in degrees})
        fitting = [tp for tp in every if case.works(tp_degree=tp)]
        hint = f"use {joined(fitting, 'or')}" if fitting else "use another tp_degree"
        if case.works(allow_degrees=(*case.model.allow_degrees, tp)):
            hint += f", or add allow_degrees: [{tp}] if you know that it works"
        yield case.problem("illegal-degree", path, what, hint)
    elif tp not in case.model.allow_degrees and not any(_is_documented(topology, tp) for topology in legal):
        what = f"tp_degree {tp} is documented on one AWS page only, not in the guides of the engines"
        if legal[0].lnc == 1:
            what = f"tp_degree {tp} is documented for {legal[0].family} with lnc 2 only, but lnc is 1"
        yield case.problem("undocumented-degree", path, what, f"allow_degrees: [{tp}] silences this", "warning")


def heads_divisible(case: Case) -> Iterator[Problem]:
    """tp_degree divides the attention heads, unless the spec allows padding."""
    tp, checkpoint = case.model.tp_degree, case.checkpoint
    if checkpoint is None or not case.hosts or case.model.allow_head_padding or checkpoint.heads % tp == 0:
        return
    dividing = [degree for degree in degrees_of(case.fleet.types) if checkpoint.heads % degree == 0]
    what = f"tp_degree {tp} does not divide the {checkpoint.heads} attention heads of {case.model.name}"
    roomy = [degree for degree in dividing if any(case.has_room(degree, topology) for topology in case.fleet.types)]
    roomy = [degree for degree in roomy if case.works(tp_degree=degree)]
    hint = "add allow_head_padding: true for an engine that pads with zeros"
    if roomy:
        hint = f"use {joined(roomy, 'or')}, or {hint}"
    yield case.problem("heads-not-divisible", ("tp_degree",), what, hint)


def experts_divisible(case: Case) -> Iterator[Problem]:
    """transformers-neuronx assigns whole experts to cores, or groups of cores to experts."""
    tp, experts = case.model.tp_degree, case.checkpoint.experts if case.checkpoint else None
    if case.engine != "transformers-neuronx" or not experts or experts % tp == 0 or tp % experts == 0:
        return
    dividing = [degree for degree in degrees_of(case.fleet.types) if experts % degree == 0 or degree % experts == 0]
    what = f"tp_degree {tp} and the {experts} experts of {case.model.name} do not divide each other"
    dividing = [degree for degree in dividing if case.works(tp_degree=degree)]
    hint = f"use {joined(dividing, 'or')}" if dividing else "use another degree or engine"
    yield case.problem("experts-not-divisible", ("tp_degree",), what, hint)


# Formatting


def _is_documented(topology: Topology, tp: int) -> bool:
    row = degree(topology.family, tp)
    return row is not None and documented(topology, row)


def degrees_of(types: Sequence[Topology]) -> list[int]:
    """Returns the degrees that any of the types supports, ascending."""
    return sorted({tp for topology in types for tp in DEGREES[topology.family] if tp <= topology.cores})
