"""One trace on one fleet under one policy, on the simulator's virtual clock."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.scaling_parts.fleets import models
from benchmarks.scaling_parts.rivals import Knative, RayServe, Static, static_split
from benchmarks.scaling_parts.scenarios import scenario_of
from benchmarks.scaling_parts.traces import WARM_UP_S, means, trace
from orchestrator.simulate.run import Joint, ScalingPolicy, simulate

OURS = "corewright"
RIVALS = ("static split", "Ray Serve", "KPA")
_HOST_CORES = 24  # of an inf2.48xlarge


@dataclass(frozen=True)
class Run:
    """What is run."""

    kind: str
    hosts: int
    seed: int
    policy: str


@dataclass(frozen=True)
class Result:
    """What a run showed."""

    attained: float  # of all requests, those whose first token came in time; refused ones did not
    loads: int  # starts of replicas, those of the beginning not counted
    core_s: float  # core-seconds that replicas held


def run(what: Run) -> Result:
    """All policies begin with the static split's replicas ready; what comes in the first minutes is not measured."""
    fleet = models()
    arrivals = trace(what.kind, fleet, what.seed)
    split = static_split(fleet, means(what.kind, fleet, what.seed), what.hosts * _HOST_CORES)
    policy: ScalingPolicy
    if what.policy == OURS:
        policy = Joint()
    elif what.policy == "Ray Serve":
        policy = RayServe()
    elif what.policy == "KPA":
        policy = Knative()
    else:
        policy = Static(split)
    scenario = scenario_of(fleet, hosts=what.hosts)
    outcome = simulate(scenario, arrivals, policy, seed=what.seed, initial=split, since=WARM_UP_S)
    return Result(outcome.attainment, sum(outcome.loads.values()), sum(outcome.core_s.values()))
