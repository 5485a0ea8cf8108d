"""A replica's place and resources, and the other statements of a plan about single replicas."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from placements.engines.registry import resolve
from placements.facts.core_range import CoreRange
from placements.facts.topology import Host
from placements.resources.environ import compiling, cpu_mask, environment
from placements.spec.problems import Problem, has_errors
from placements.spec.schema import ModelSpec


@dataclass(frozen=True)
class Placement:
    """The place and resources of one replica."""

    model: str
    replica: int  # index within the model, from 0
    host: str
    cores: CoreRange | None  # None: the engine uses none (cpu on a real host)
    threads: int
    machine: Host | None = field(default=None, compare=False, repr=False)  # None: unknown
    spec: ModelSpec | None = field(default=None, compare=False, repr=False)  # None: unknown

    @property
    def cpus(self) -> tuple[int, ...]:
        """The ids of the CPUs that the replica is bound to; () means not bound."""
        return () if self.machine is None else cpu_mask(self.machine, self.cores, self.threads)

    @property
    def env(self) -> dict[str, str]:
        """The environment variables of the replica's process."""
        topology = None if self.machine is None else self.machine.topology
        lnc = None if topology is None else topology.lnc
        compiler_env: dict[str, str] = {}
        if self.spec is not None and self.machine is not None:
            compiler_env = compiling(self.spec, resolve(self.spec.engine, self.machine, self.spec.kind))
        return environment(self.model, self.replica, self.cores, self.threads, self.cpus, lnc, compiler_env)

    @property
    def running(self) -> Running:
        """The same replica as observed when it runs."""
        return Running(self.model, self.replica, self.host, self.cores)

    def as_dict(self) -> dict[str, Any]:
        """Returns the JSON of `plan -o json`; ``cores`` equals NEURON_RT_VISIBLE_CORES."""
        cores = None if self.cores is None else str(self.cores)
        return {
            "model": self.model,
            "replica": self.replica,
            "host": self.host,
            "cores": cores,
            "threads": self.threads,
            "env": self.env,
        }


@dataclass(frozen=True)
class Unplaced:
    """A replica without a place, and the reasons."""

    model: str
    replica: int
    problems: tuple[Problem, ...]

    @property
    def required(self) -> bool:
        """Returns whether the model has fewer than ``min`` replicas without it."""
        return has_errors(self.problems)

    def as_dict(self) -> dict[str, Any]:
        """Returns the JSON of `plan -o json`."""
        problems = [problem.as_dict() for problem in self.problems]
        return {"model": self.model, "replica": self.replica, "problems": problems}


@dataclass(frozen=True)
class Running:
    """A running replica that holds cores."""

    model: str
    replica: int
    host: str
    cores: CoreRange | None


@dataclass(frozen=True)
class Move:
    """A running replica that gets other cores to make room."""

    before: Running
    after: Placement

    def as_dict(self) -> dict[str, Any]:
        """Returns the JSON of `plan -o json`."""
        return {
            "model": self.after.model,
            "replica": self.after.replica,
            "from": _spot(self.before),
            "to": _spot(self.after),
        }


def _spot(replica: Running | Placement) -> dict[str, str | None]:
    return {"host": replica.host, "cores": None if replica.cores is None else str(replica.cores)}
