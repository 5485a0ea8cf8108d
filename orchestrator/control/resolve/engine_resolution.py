"""Resolves the engine of a replica before its start, and checks its interpreter."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import version
from typing import Protocol

import msgspec.structs

from orchestrator.control.resolve.resolved_revision import ResolvedRevision
from orchestrator.process.version import corewright_version
from placements.engines.registry import (
    AUTO_ENGINES,
    HOST_ENGINES,
    SERVER_ENGINES,
    Engine,
    NoEngine,
    capabilities,
    choose_engine,
    needs_neuron,
)
from placements.engines.transformers_neuronx.capabilities import MISREAD_HINT
from placements.facts.topology import Host
from workers.compiled import neuron_target
from workers.host.interpreter import FleetVersions, Interpreter, refusal, vllm_refusal
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure


class Hosts(Protocol):
    """Access to the interpreters of hosts: `effects.ClusterClient`, or this machine without a fleet."""

    async def interpreter(self, python: str | None, host: str) -> Interpreter:
        """Returns an interpreter of the host; ``python`` None: the fleet's own. Raises HostLost."""


async def resolve_engine(config: ReplicaConfig, generation: ResolvedRevision, hosts: Hosts) -> ReplicaConfig | Failure:
    """Returns the configuration with its engine resolved; or why the replica cannot start.

    1. ``auto`` becomes an engine that the host has, in its own interpreter or in the one that the spec names.
    2. An interpreter that the spec names is checked, and the host's own if the engine needs a package of AWS. With its
       version of transformers, transformers-neuronx must read the model's rotary positions correctly. The interpreter
       of vLLM must have the release that the plan is for. No variable may set another target of the compiler.
    Raises HostLost.
    """
    if config.model.engine == "auto":  # 1
        return await _chosen(config, generation, hosts)
    engine = config.model.engine
    if config.run.python is not None or needs_neuron(engine):
        interpreter = await hosts.interpreter(config.run.python, config.place.host)
        if refused := _refusal(interpreter, engine) or _unfit(interpreter, engine, config, generation):  # 2
            return refused
    if capabilities(engine).launches:
        interpreter = await hosts.interpreter(config.run.server_python, config.place.host)
        release = generation.spec.vllm_release_on(_host_of(config, generation))
        return vllm_refusal(interpreter, release) or _unfit(interpreter, engine, config, generation) or config
    return config


async def _chosen(config: ReplicaConfig, generation: ResolvedRevision, hosts: Hosts) -> ReplicaConfig | Failure:
    spec = generation.spec
    model = spec.model(config.model.name)
    assert model is not None
    usable: dict[Engine, Interpreter] = {}
    refusals: list[Failure] = []
    for engine in AUTO_ENGINES:
        python = spec.python_for(engine)
        interpreter = await hosts.interpreter(python, config.place.host)
        refused = _refusal(interpreter, engine)
        if refused is None:
            usable[engine] = interpreter
        elif python is not None:  # the spec names it, so it should work
            refusals.append(refused)
    host = _host_of(config, generation)
    checkpoint = generation.checkpoints.get(config.model.name)
    chosen = choose_engine(
        None if checkpoint is None else checkpoint.model_type,
        None if host.topology is None else host.topology.instance,
        {engine: interpreter.engines[engine] for engine, interpreter in usable.items()},
    )
    if isinstance(chosen, NoEngine):
        also = "".join(f"; {refused.id}: {refused.what}" for refused in refusals)
        return Failure(chosen.id, chosen.what + also, chosen.hint)
    if chosen in usable and (refused := _unfit(usable[chosen], chosen, config, generation)):
        return refused
    config = msgspec.structs.replace(config, model=model.resolved(chosen, checkpoint))
    return config.with_run(python=spec.python_for(chosen), warm=spec.is_warm(chosen))


def _refusal(interpreter: Interpreter, engine: str) -> Failure | None:
    needs = None if engine in SERVER_ENGINES else engine  # the server has an interpreter of its own
    return refusal(interpreter, fleet_versions(), needs)


def _unfit(
    interpreter: Interpreter, engine: Engine, config: ReplicaConfig, generation: ResolvedRevision
) -> Failure | None:
    """Returns why the engine in the interpreter would compute or compile the model wrongly on the host."""
    checkpoint, host = generation.checkpoints.get(config.model.name), _host_of(config, generation)
    transformers = interpreter.packages.get("transformers")
    if checkpoint is not None and (how := capabilities(engine).misread(checkpoint.config, transformers)):
        fact = f"{engine} misreads the rotary positions of {config.model.name} in {interpreter.python}: {how}"
        return Failure("rotary-misread", fact, MISREAD_HINT)
    if host.topology is None or host.emulated or engine in HOST_ENGINES:
        return None  # nothing is compiled for devices
    return neuron_target.refusal(interpreter.target, host.topology.instance)


@cache
def fleet_versions() -> FleetVersions:
    """Returns the versions of a fleet that this process starts or controls."""
    return FleetVersions(corewright_version(), platform.python_version(), version("ray"))


def _host_of(config: ReplicaConfig, generation: ResolvedRevision) -> Host:
    return next(host for host in generation.hosts if host.name == config.place.host)
