"""Hosts, specs and checkpoints for the tests of placements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from placements.facts.checkpoints import Checkpoint
from placements.facts.topology import TOPOLOGIES, Host, Machine
from placements.planner.plan import Plan, plan
from placements.planner.spec_hosts import hosts_for
from placements.rules.checks import check
from placements.spec.parse import parse
from placements.spec.problems import Problem
from placements.spec.schema import HostsSpec, ModelSpec, Spec

LAPTOP = Machine(cpus=(0, 1))
BIG = "inf2.48xlarge"

LLAMA_2_7B = Checkpoint("llama", 32, 32, 32, 4096, 11008, 128, 32000, 4096, False, 6_738_415_616)
GPT2_XL = Checkpoint("gpt2", 25, 25, 48, 1600, 6400, 64, 50257, 1024, True, 1_557_611_200)


def model(name: str, tp: int = 1, *pins: str, **fields: Any) -> ModelSpec:
    """A model with the fewest words."""
    return ModelSpec(name=name, source="./m", tp_degree=tp, cores=list(pins), **fields)


def spec(*models: ModelSpec, instance: str = BIG, count: int = 1, **reserve: Any) -> Spec:
    """Models on real hosts of one type."""
    return Spec(models=models, hosts=(HostsSpec(instance=instance, count=count, reserve=reserve),))  # type: ignore[arg-type]


def host(instance: str = BIG, i: int = 0, cpus: int = 192, reserve: int = 8, emulated: bool = False) -> Host:
    """A host as ``hosts_for`` makes it."""
    return Host(f"{instance}/{i}", TOPOLOGIES[instance], tuple(range(cpus)), reserve, frozenset(), emulated)


PLAIN = Host("plain", None, tuple(range(8)), 1)


def planned(wish: Spec, **more: Any) -> Plan:
    """The plan on the hosts that the spec names."""
    return plan(wish, hosts_for(wish, LAPTOP), **more)


def places(drawn: Plan) -> list[tuple[str, str, str]]:
    """(model/replica, host, cores) of each placement."""
    return [(f"{p.model}/{p.replica}", p.host, str(p.cores)) for p in drawn.placements]


def problems_of(
    text: str, checkpoints: Mapping[str, Checkpoint] | None = None, machine: Machine = LAPTOP
) -> Sequence[Problem]:
    """Everything that `validate` says about a text."""
    parsed = parse(text, "f.yaml")
    if parsed.spec is None:
        return parsed.problems
    return [*parsed.problems, *check(parsed.spec, hosts_for(parsed.spec, machine), checkpoints)]


def brief(problems: Sequence[Problem]) -> list[str]:
    """["pin-length 3:5", ...]"""
    return [f"{problem.id} {problem.where.removeprefix('f.yaml:')}" for problem in problems]
