"""Checks, predicts or compiles for a replica in the engine's interpreter: ``python -m workers.serving.prepare CMD``.

Reads an ``Order`` as JSON from standard input and writes JSON lines to standard output: ``check`` reports whether a
start of the config can load its files, ``predict`` what it would compile, ``compile`` its progress and result. Imports
the engine's package, claims no core, and ends with its parent. ``check`` reads the headers of weights; ``predict``
reads weights only on request.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path

from placements.engines.registry import ENGINES
from workers.artifacts.sources.listing import SourceError
from workers.artifacts.store.artifact_uses import using
from workers.compiled.orders import Checked, Order, Predicted, Reply
from workers.compiled.places import ensure, find, wanted_of
from workers.engines.open_engine import buildables, hide_progress_bars, runner_of
from workers.engines.weight_files import check_checkpoint
from workers.host.json_process import answering, read_request, set_variables
from workers.host.memory_limits import is_out_of_memory, out_of_memory
from workers.host.neuron_faults import explained
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure, Trouble
from workers.text.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

Report = Callable[[Reply], None]


def check(config: ReplicaConfig) -> Checked:
    """Checks all that a start of ``config`` needs except cores: tokenizer, config.json, headers of weights, the
    engine's package and its view of the settings. Only its command can check the source of the engine server. Raises
    EngineLoadError, and errors of imports."""
    if ENGINES[config.model.engine].tokenizer != "checkpoint":
        return Checked()
    hide_progress_bars()
    for folder in (config.source, config.draft_source):
        if folder is not None:
            check_checkpoint(Path(folder), allow_pickle=config.model.allow_pickle)
    load_tokenizer(config.model.engine, config.source)
    check_engine = runner_of(config.model.engine).check
    if check_engine is None:
        buildables(config, read=False)
    else:
        check_engine(config)
    return Checked()


def predict(config: ReplicaConfig, *, read: bool = False, ahead: bool = False) -> Predicted:
    """Returns the artifacts that a start of ``config`` needs, in the replica's environment, and where it gets them.
    ``read`` and ``ahead``: as in ``Order``. Raises EngineLoadError."""
    wanted = [wanted_of(config, unit, find(unit, config, ahead)) for unit in buildables(config, read)]
    return Predicted(engine=config.model.engine, wanted=wanted)


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
                units = buildables(config, read=order.make)
                report(ensure(units, config, report, push=order.push, make=order.make))
            return True
    except (EngineLoadError, SourceError) as error:
        report(Trouble(explained(Failure(error.id, error.what, error.hint), error, config.run.log)))
    except Exception as error:
        if is_out_of_memory(error):
            want = out_of_memory(error, f"compiling {config.model.name}")
            failure = Failure(want.id, want.what, want.hint)
        else:
            message = f"{command} of {config.model.name}: {type(error).__name__}: {error}"
            id = "start-failed" if command == "check" else "compile-failed"
            failure = Failure(id, message, f"the log is {config.run.log}")
        failure = explained(failure, error, config.run.log)  # before the log ends with a traceback
        log.exception("%s of %s failed", command, config.model.name)
        report(Trouble(failure))
    return False


def main(arguments: list[str]) -> int:
    """Reads the order and runs it. Exit code 0: done; 1: failed, with a ``Trouble`` line; 2: wrong usage."""
    if arguments not in (["check"], ["predict"], ["compile"]):
        sys.stderr.write("usage: python -m workers.serving.prepare check|predict|compile < JSON\n")
        return 2
    order = read_request(Order)
    set_variables(order.config.place.env)
    return 0 if run(arguments[0], order, answering()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
