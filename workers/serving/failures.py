"""Turns the exceptions of loads and engine steps into failures with a cause and a hint."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec.structs

from workers.artifacts.sources.listing import SourceError
from workers.host import host_facts
from workers.host.core_claims import CoresTaken
from workers.host.facts.reading import who_holds
from workers.host.memory_limits import is_out_of_memory, out_of_memory
from workers.host.neuron_faults import VAGUE, fault_of
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure, Reaction

log = logging.getLogger(__name__)

PERMANENT = ("engine-not-installed", "source-changed")  # until an operator acts
CORES_HINT = "end the process that holds the cores; corewright unload MODEL frees those of a model"


def failure_of(id: str, error: Exception, activity: str, config: ReplicaConfig) -> Failure:
    """Returns why an activity failed; ``id`` where the exception has no better one.

    A vague failure is replaced by a fault that the Neuron runtime reported, in the exception or the log.
    """
    if isinstance(error, CoresTaken):
        return Failure("cores-taken", f"{error} (held: {error.held})", CORES_HINT)
    cause = error
    if not isinstance(cause, EngineLoadError | SourceError):
        log.error("%s failed", activity, exc_info=error)
        cause = EngineLoadError(id, f"{type(error).__name__}: {error}", f"the log is {config.log}")
        if is_out_of_memory(error):
            cause = out_of_memory(error, activity)
    reaction = Reaction.STOP if cause.id in PERMANENT else Reaction.RETRY
    failure = Failure(cause.id, cause.what, cause.hint, reaction)
    fault = fault_of(error, host_facts.last_words(Path(config.log))) if failure.id in VAGUE else None
    if (known := fault_of(error)) is not None and known.id == failure.id:  # the engine has added what it knows
        failure = msgspec.structs.replace(failure, reaction=known.reaction)
    if fault is None or fault.id != "cores-taken":
        return fault or failure
    owners = [f"nc{core} by pid {pid} ({command})" for core, (pid, command) in who_holds(config.cores).items()]
    return msgspec.structs.replace(fault, what=f"{fault.what}; held: {', '.join(owners) or 'by no process now'}")
