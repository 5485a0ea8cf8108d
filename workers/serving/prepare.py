"""Checks, predicts or compiles for a replica in the engine's interpreter: ``python -m workers.serving.prepare CMD``.

Reads an ``Order`` as JSON from standard input and writes JSON lines to standard output: ``check`` reports whether a
start of the config can load its files, ``predict`` what it would compile, ``compile`` its progress and result. Imports
the engine's package, claims no core, and ends with its parent. ``check`` reads the headers of weights; ``predict``
reads weights only on request.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from placements.facts.engines import SERVER_ENGINES
from workers.artifacts.sources.listing import SourceError
from workers.artifacts.store.artifact_uses import using
from workers.compiled.compile_process import BuildTrouble, Built, Checked, Order, Predicted, Reply, Wanted
from workers.compiled.host_sets import Buildable, peek
from workers.compiled.places import Ensured, ensure, find, needs_device, places_for
from workers.compiled.prediction import Prediction
from workers.engines.open_engine import buildables, hide_progress_bars
from workers.engines.weight_files import check_checkpoint
from workers.host import host_facts
from workers.host.json_process import answering, read_request
from workers.host.memory_limits import is_out_of_memory, out_of_memory
from workers.host.neuron_faults import VAGUE, fault_of
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import NEVER_SET, ReplicaConfig
from workers.messages.status import Failure
from workers.text.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

Report = Callable[[Reply], None]


def check(config: ReplicaConfig) -> Checked:
    """Checks all that a start of ``config`` needs except cores: tokenizer, config.json, headers of weights, the
    engine's package and its view of the settings. Only its command can check the source of the engine server. Raises
    EngineLoadError, and errors of imports."""
    if config.engine in ("echo", "server"):
        return Checked()
    hide_progress_bars()
    for folder in (config.source, config.draft_source):
        if folder is not None:
            check_checkpoint(Path(folder), allow_pickle=config.allow_pickle)
    load_tokenizer(config.engine, config.source)
    if config.engine == "cpu":
        from workers.engines.cpu.engine import check as check_cpu

        check_cpu(config)
    elif config.engine not in SERVER_ENGINES:
        buildables_of(config, read=False)
    return Checked()


def buildables_of(config: ReplicaConfig, read: bool) -> list[Buildable]:
    """Returns what a start of ``config`` compiles. Raises EngineLoadError."""
    if config.engine == "vllm":
        from workers.servers.vllm_engine import buildables as of_vllm

        return of_vllm(config, read)
    return buildables(config, read)


def predict(config: ReplicaConfig, *, read: bool = False, ahead: bool = False) -> Predicted:
    """Returns the artifacts that a start of ``config`` needs, in the replica's environment, and where it gets them.
    ``read`` and ``ahead``: as in ``Order``. Raises EngineLoadError."""
    wanted = [_wanted(config, unit, _prediction(config, unit, ahead)) for unit in buildables_of(config, read)]
    return Predicted(engine=config.engine, wanted=wanted)


def _prediction(config: ReplicaConfig, unit: Buildable, ahead: bool) -> Prediction:
    if unit.unread:
        reason = f"{len(unit.unread)} files of the checkpoint need digests and are unread; read them with --read"
        return Prediction("compile", "nothing", reason)
    if config.compiled is None:
        return Prediction("compile", "nothing", "there is no folder for compiled artifacts")
    environment = {**os.environ, **config.env}
    return find(unit, places_for(unit, Path(config.compiled), environment, config.neff_cache, ahead=ahead))


def _wanted(config: ReplicaConfig, unit: Buildable, prediction: Prediction) -> Wanted:
    is_kept = config.compiled is not None and unit.kept and not unit.unread
    return Wanted(
        role=unit.role,
        source=str(unit.source),
        manifest=dict(unit.manifest),
        folder=str(peek(Path(config.compiled or ""), unit.manifest).path) if is_kept else "",
        complete=prediction.hit and prediction.where == "compiled",
        ahead=unit.make is not None,
        unread=list(unit.unread),
        prediction=prediction,
    )


def compile_all(config: ReplicaConfig, report: Report, push: bool = False, make: bool = True) -> Built:
    """Provides all artifacts that need no device; see `places.ensure`. ``make`` False: compiles nothing, since the
    weights are not here. Raises EngineLoadError, SourceError, and errors of the package."""
    began = time.monotonic()
    if config.compiled is None:
        raise EngineLoadError("compiled-unwritable", "there is no folder for compiled artifacts", "set `compiled`")
    done, wanted = list[Ensured](), list[Wanted]()
    for unit in buildables_of(config, read=make):
        if unit.make is None and not unit.kept:
            raise needs_device(unit)
        if unit.kept:
            done.append(ensure(unit, Path(config.compiled), config.neff_cache, report, push=push, make=make))
        wanted.append(_wanted(config, unit, Prediction("hit", "compiled" if unit.kept else "neff-cache", "")))
    return Built(
        wanted=wanted,
        compiled=[each.key for each in done if each.how == "compiled"],
        pulled=[each.key for each in done if each.how == "pulled"],
        missing=[each.key for each in done if each.how == "missing"],
        pushed=[each.key for each in done if each.is_pushed],
        unsent=[each.unsent for each in done if each.unsent is not None],
        warnings=[warning for each in done for warning in each.warnings],
        seconds=round(time.monotonic() - began, 3),
    )


def run(command: str, order: Order, report: Report) -> bool:
    """Runs a command and reports its result; False: it failed. Reports errors of the model and the machine.

    The config's sources are not evicted meanwhile.
    """
    config = order.config
    try:
        with contextlib.ExitStack() as uses:
            for folder in filter(None, (config.source, config.draft_source, *config.adapters.values())):
                uses.enter_context(using(folder))
            if command == "check":
                report(check(config))
            elif command == "predict":
                report(predict(config, read=order.read, ahead=order.ahead))
            else:
                report(compile_all(config, report, order.push, order.make))
            return True
    except (EngineLoadError, SourceError) as error:
        failure = Failure(error.id, error.what, error.hint)
        report(BuildTrouble(_with_known_fault(failure, error, config.log) if error.id in VAGUE else failure))
    except Exception as error:
        log.exception("%s of %s failed", command, config.model)
        if is_out_of_memory(error):
            want = out_of_memory(error, f"compiling {config.model}")
            report(BuildTrouble(Failure(want.id, want.what, want.hint)))
        else:
            message = f"{command} of {config.model}: {type(error).__name__}: {error}"
            id = "start-failed" if command == "check" else "compile-failed"
            report(BuildTrouble(_with_known_fault(Failure(id, message, f"the log is {config.log}"), error, config.log)))
    return False


def _with_known_fault(failure: Failure, error: Exception, log_file: str) -> Failure:
    """Returns a more specific failure if the log or the exception shows a known fault."""
    words = host_facts.last_words(Path(log_file)) if log_file else []
    return fault_of(error, words) or failure


def main(arguments: list[str]) -> int:
    """Reads the order and runs it. Exit code 0: done; 1: failed, with a ``BuildTrouble`` line; 2: wrong usage."""
    if arguments not in (["check"], ["predict"], ["compile"]):
        sys.stderr.write("usage: python -m workers.serving.prepare check|predict|compile < JSON\n")
        return 2
    order = read_request(Order)
    for name in NEVER_SET:
        os.environ.pop(name, None)
    os.environ.update(order.config.env)
    return 0 if run(arguments[0], order, answering()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
