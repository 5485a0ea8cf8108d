"""Checks, predicts or compiles for a replica in the engine's interpreter: ``python -m workers.compiling.build CMD``.

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
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from placements.facts.engines import SERVER_ENGINES
from workers.artifacts.sources.listing import SourceError
from workers.artifacts.store.artifact_uses import using
from workers.engines.open_engine import buildables, hide_progress_bars
from workers.engines.weight_files import check_checkpoint
from workers.host import file_lock, host_facts
from workers.host.json_process import ChildRequest, answering, read_request
from workers.host.memory_limits import is_out_of_memory, out_of_memory
from workers.host.neuron_faults import VAGUE, fault_of
from workers.messages.actor_message import actor_message
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import NEVER_SET, ReplicaConfig
from workers.messages.status import Failure
from workers.neff_cache import shared_artifacts
from workers.neff_cache.compiled_artifacts import Buildable, LockedEntry, entry, peek
from workers.neff_cache.sync import log_unavailable
from workers.text.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

GONE = "weights-missing"  # error of ``compile`` without ``make`` for missing artifacts
NEEDS_DEVICE = "compile-needs-device"  # error of ``compile`` for graphs that only a start on its cores can compile


class Order(ChildRequest, frozen=True, kw_only=True):
    """The input of a command."""

    config: ReplicaConfig
    read: bool = False  # ``predict``: read weights whose digests are needed and unknown
    push: bool = False  # ``compile``: push complete artifacts to the config's ``neff_cache``
    make: bool = True  # ``compile``: compile missing artifacts; False: an error, since the weights are not here


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A set of compiled artifacts that a start needs."""

    role: Literal["model", "draft"]
    source: str
    manifest: dict[str, Any]  # everything they depend on
    folder: str  # their folder on this host; empty: kept by the package's own cache only
    complete: bool  # a complete set of exactly this manifest is here
    ahead: bool  # they can be compiled without a device
    # Checkpoint files whose digests are not in the manifest yet; the folder is then unknown and empty.
    unread: list[str] = []

    @property
    def key(self) -> str:
        """The name of the folder; empty if unknown."""
        return Path(self.folder).name


@actor_message
class Checked(msgspec.Struct, frozen=True, kw_only=True, tag="checked"):
    """The result of ``check``: no problem that would prevent a load."""


class Predicted(msgspec.Struct, frozen=True, kw_only=True, tag="predicted"):
    """The result of ``predict``."""

    engine: str
    wanted: list[Wanted]  # empty: the engine compiles nothing


class Working(msgspec.Struct, frozen=True, kw_only=True, tag="working"):
    """The progress of ``compile`` with one set."""

    key: str
    role: str
    phase: Literal["waiting", "looking", "compiling", "sending", "done"]
    done: int = 0  # graphs
    total: int = 0  # graphs; 0: unknown


@actor_message
class Built(msgspec.Struct, frozen=True, kw_only=True, tag="built"):
    """The result of ``compile``: all sets that can be compiled without a device are here."""

    wanted: list[Wanted]
    compiled: list[str] = []  # keys of the sets that were compiled
    pulled: list[str] = []  # keys of the sets fetched from the ``neff_cache``
    pushed: list[str] = []  # keys of the sets pushed to it
    unsent: list[Failure] = []  # failed pushes
    warnings: list[str] = []  # about an unavailable ``neff_cache``
    seconds: float


class BuildTrouble(msgspec.Struct, frozen=True, tag="trouble"):
    """The error of a command."""

    failure: Failure


Reply = Checked | Predicted | Working | Built | BuildTrouble
Report = Callable[[Reply], None]


def check(config: ReplicaConfig) -> Checked:
    """Checks all that a start of ``config`` needs except cores: tokenizer, config.json, headers of weights, the
    engine's package and its view of the settings. Only its command can check the source of the engine server. Raises
    EngineLoadError, and errors of imports."""
    if config.model.engine in ("echo", "server"):
        return Checked()
    hide_progress_bars()
    for folder in (config.source, config.draft_source):
        if folder is not None:
            check_checkpoint(Path(folder), allow_pickle=config.model.allow_pickle)
    load_tokenizer(config.model.engine, config.source)
    if config.model.engine == "cpu":
        from workers.engines.cpu.engine import check as check_cpu

        check_cpu(config)
    elif config.model.engine not in SERVER_ENGINES:
        _buildables(config, read=False)
    return Checked()


def predict(config: ReplicaConfig, read: bool = False) -> Predicted:
    """Returns the artifacts that a start of ``config`` needs, in the replica's environment. Raises EngineLoadError."""
    return Predicted(engine=config.model.engine, wanted=[_wanted(config, unit) for unit in _buildables(config, read)])


def compile_all(config: ReplicaConfig, report: Report, push: bool = False, make: bool = True) -> Built:
    """Provides all artifacts that need no device: missing ones are fetched from the ``neff_cache``, else compiled.

    ``make`` False: compiles nothing, since the weights are not here; missing artifacts raise weights-missing. An
    unavailable ``neff_cache`` is skipped, and failed pushes are returned as ``unsent``. Raises EngineLoadError,
    SourceError, and errors of the package.
    """
    began = time.monotonic()
    if config.run.compiled is None:
        raise EngineLoadError("compiled-unwritable", "there is no folder for compiled artifacts", "set `compiled`")
    done: dict[str, list[Any]] = {"compiled": [], "pulled": [], "pushed": [], "unsent": [], "warnings": []}
    units = _buildables(config, read=make)
    for unit in units:
        if unit.make is None and not unit.kept:
            raise _needs_device(config, unit)
        if unit.kept:
            _provide(config, unit if make else replace(unit, make=_no_weights(unit)), report, push, done)
    wanted = [_wanted(config, unit) for unit in units]
    return Built(wanted=wanted, seconds=round(time.monotonic() - began, 3), **done)


def _provide(config: ReplicaConfig, unit: Buildable, report: Report, push: bool, outcome: dict[str, list[Any]]) -> None:
    """Provides one set, and adds the outcome to ``outcome``, by fields of ``Built``."""
    assert config.run.compiled is not None
    path = peek(Path(config.run.compiled), unit.manifest).path
    key = path.name

    def working(phase: Any, done: int = 0, total: int = 0) -> None:
        report(Working(key=key, role=unit.role, phase=phase, done=done, total=total))

    if file_lock.is_locked(path.with_name(f"{key}.lock")):
        working("waiting")
    with entry(Path(config.run.compiled), unit.manifest, unit.is_whole) as held:
        if not held.complete:
            working("looking")
            if _is_pulled(config, held, outcome["warnings"]):
                outcome["pulled"].append(key)
            elif unit.make is None:
                held.path.rmdir()  # empty
                raise _needs_device(config, unit)
            else:
                working("compiling")
                unit.make(held, lambda done, total: working("compiling", done, total))
                outcome["compiled"].append(key)
    if push and config.model.neff_cache:
        working("sending")
        with entry(Path(config.run.compiled), unit.manifest, unit.is_whole) as held:  # with a shared lock now
            try:
                if shared_artifacts.push(held, config.model.neff_cache):
                    outcome["pushed"].append(key)
            except SourceError as error:  # the compile succeeded, and the next push sends it
                outcome["unsent"].append(Failure(error.id, error.what, error.hint))
    working("done")


def _needs_device(config: ReplicaConfig, unit: Buildable) -> EngineLoadError:
    message = f"{config.model.engine} can compile {unit.source} only on its cores, when a replica starts"
    return EngineLoadError("compile-needs-device", message, "start a replica: its result is kept for later starts")


def _no_weights(unit: Buildable) -> Callable[..., None]:
    def make(*_: object) -> None:
        message = f"compiled artifacts of {unit.source} were removed, and its weights were not fetched"
        raise EngineLoadError(GONE, message, "compile it again")

    return make


def _is_pulled(config: ReplicaConfig, held: LockedEntry, warnings: list[str]) -> bool:
    """Tries to fetch the set; an unavailable cache is only a warning, since the set can be compiled here."""
    try:
        return config.model.neff_cache is not None and shared_artifacts.pull(held, config.model.neff_cache)
    except SourceError as error:
        warnings.append(log_unavailable(config.model.neff_cache or "", error))
        return False


def _buildables(config: ReplicaConfig, read: bool) -> list[Buildable]:
    if config.model.engine == "vllm":
        from workers.servers.vllm_engine import buildables as of_vllm

        return of_vllm(config, read)
    return buildables(config, read)


def _wanted(config: ReplicaConfig, unit: Buildable) -> Wanted:
    place = None
    if config.run.compiled is not None and unit.kept and not unit.unread:
        place = peek(Path(config.run.compiled), unit.manifest, unit.is_whole)
    return Wanted(
        role=unit.role,
        source=str(unit.source),
        manifest=dict(unit.manifest),
        folder="" if place is None else str(place.path),
        complete=place is not None and place.complete,
        ahead=unit.make is not None,
        unread=list(unit.unread),
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
                report(predict(config, order.read))
            else:
                report(compile_all(config, report, order.push, order.make))
            return True
    except (EngineLoadError, SourceError) as error:
        failure = Failure(error.id, error.what, error.hint)
        report(BuildTrouble(_with_known_fault(failure, error, config.run.log) if error.id in VAGUE else failure))
    except Exception as error:
        log.exception("%s of %s failed", command, config.model.name)
        if is_out_of_memory(error):
            want = out_of_memory(error, f"compiling {config.model.name}")
            report(BuildTrouble(Failure(want.id, want.what, want.hint)))
        else:
            message = f"{command} of {config.model.name}: {type(error).__name__}: {error}"
            id = "start-failed" if command == "check" else "compile-failed"
            report(
                BuildTrouble(
                    _with_known_fault(Failure(id, message, f"the log is {config.run.log}"), error, config.run.log)
                )
            )
    return False


def _with_known_fault(failure: Failure, error: Exception, log_file: str) -> Failure:
    """Returns a more specific failure if the log or the exception shows a known fault."""
    words = host_facts.last_words(Path(log_file)) if log_file else []
    return fault_of(error, words) or failure


def main(arguments: list[str]) -> int:
    """Reads the order and runs it. Exit code 0: done; 1: failed, with a ``BuildTrouble`` line; 2: wrong usage."""
    if arguments not in (["check"], ["predict"], ["compile"]):
        sys.stderr.write("usage: python -m workers.compiling.build check|predict|compile < JSON\n")
        return 2
    order = read_request(Order)
    for name in NEVER_SET:
        os.environ.pop(name, None)
    os.environ.update(order.config.place.env)
    return 0 if run(arguments[0], order, answering()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
