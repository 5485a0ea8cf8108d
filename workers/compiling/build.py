"""What a start needs and can be had without its cores: ``python -m workers.compiling.build check``, ``predict`` and
``compile``.

An ``Order`` comes as JSON on standard input, and lines of JSON go to standard output: ``check`` answers whether the
start of that configuration could load what it names, ``predict`` what of it would be compiled, ``compile`` tells how
far it is and how it ended. Runs in the engine's own interpreter, imports the engine's package only here, claims no
core, and ends with its parent. ``check`` reads the headers of weights, ``predict`` no weights unless it is told to.
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

from workers.artifacts.sources.listing import SourceError
from workers.artifacts.store import locks
from workers.artifacts.store.artifact_uses import using
from workers.engines import hide_progress_bars
from workers.engines.checkpoint_files import check_checkpoint
from workers.host import host_facts
from workers.host.child_process import answering
from workers.host.memory_limits import is_out_of_memory, out_of_memory
from workers.host.neuron_faults import VAGUE, fault_of
from workers.host.process_tree import end_with
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import NEVER_SET, ReplicaConfig
from workers.messages.status import Failure
from workers.neff_cache import compiled_cache
from workers.neff_cache.compile_units import Buildable
from workers.neff_cache.compiled_artifacts import Entry, entry, peek
from workers.neff_cache.unavailable import say
from workers.text.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

GONE = "weights-missing"  # what ``compile`` fails with where it may not make what is nowhere


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be predicted or compiled."""

    config: ReplicaConfig
    parent: int = 0  # the pid of whoever waits for the answer; 0: nobody, it goes on by itself
    read: bool = False  # of ``predict``: read the weights, where their digest is wanted and not known
    push: bool = False  # of ``compile``: bring what is complete to the configuration's ``neff_cache``
    make: bool = True  # of ``compile``: compile what is nowhere; False: it is trouble, since the weights are not here


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Compiled artifacts that a start looks for."""

    role: Literal["model", "draft"]
    source: str
    manifest: dict[str, Any]  # all that they depend on
    folder: str  # where they are kept on this host; empty: the package's own cache alone keeps them
    complete: bool  # whether a whole set of that very manifest is there
    ahead: bool  # whether they can be compiled without a device
    # Files of the checkpoint whose digests the manifest lacks, since nobody has read them yet: then the folder is not
    # known either, and is empty.
    unread: list[str] = []

    @property
    def key(self) -> str:
        """The name of its folder; empty where that is not known."""
        return Path(self.folder).name


class Checked(msgspec.Struct, frozen=True, kw_only=True, tag="checked"):
    """The answer to ``check``: nothing was found that would keep a start from loading the model."""


class Predicted(msgspec.Struct, frozen=True, kw_only=True, tag="predicted"):
    """The answer to ``predict``."""

    engine: str
    wanted: list[Wanted]  # empty: that engine compiles nothing


class Working(msgspec.Struct, frozen=True, kw_only=True, tag="working"):
    """How far ``compile`` is with one of the sets."""

    key: str
    role: str
    phase: Literal["waiting", "looking", "compiling", "sending", "done"]
    done: int = 0  # graphs
    total: int = 0  # graphs; 0: the package does not tell


class Built(msgspec.Struct, frozen=True, kw_only=True, tag="built"):
    """All that can be compiled ahead is there."""

    wanted: list[Wanted]
    compiled: list[str] = []  # keys of those that had to be; the others were there
    pulled: list[str] = []  # keys of those that came from the ``neff_cache``
    pushed: list[str] = []  # keys of those that went there
    unsent: list[Failure] = []  # why sets that are compiled did not go there, though they were to
    warnings: list[str] = []  # of a ``neff_cache`` that gave no answer, in words
    seconds: float


class Trouble(msgspec.Struct, frozen=True, tag="trouble"):
    """There is no answer."""

    failure: Failure


Told = Checked | Predicted | Working | Built | Trouble
Tell = Callable[[Told], None]


def check(config: ReplicaConfig) -> Checked:
    """Look at all that a start of ``config`` needs beside its cores: tokenizer, config.json, the header of each file of
    weights, the engine's package and what it says of the settings. Raises EngineLoadError, and what imports raise."""
    if config.engine == "echo":
        return Checked()
    hide_progress_bars()
    for folder in (config.source, config.draft_source):
        if folder is not None:
            check_checkpoint(Path(folder), allow_pickle=config.allow_pickle)
    load_tokenizer(config.engine, config.source)
    if config.engine == "cpu":
        from workers.engines.cpu.engine import check as check_cpu

        check_cpu(config)
    else:
        _buildables(config, read=False)
    return Checked()


def predict(config: ReplicaConfig, read: bool = False) -> Predicted:
    """What a start of ``config`` would look for. The environment is that of the replica. Raises EngineLoadError."""
    return Predicted(engine=config.engine, wanted=[_wanted(config, one) for one in _buildables(config, read)])


def compile_all(config: ReplicaConfig, tell: Tell, push: bool = False, make: bool = True) -> Built:
    """Make all that can be without a device: what is not there comes from the ``neff_cache``, else it is compiled.

    ``make`` False: nothing is compiled, of a model whose weights are not here; what is nowhere is weights-missing.
    A ``neff_cache`` that gives no answer is gone on without; what was to be pushed there is told as ``unsent``. Raises
    EngineLoadError, SourceError, and what the package raises.
    """
    began = time.monotonic()
    if config.compiled is None:
        raise EngineLoadError("compiled-unwritable", "no folder is named for compiled artifacts", "set `compiled`")
    done: dict[str, list[Any]] = {"compiled": [], "pulled": [], "pushed": [], "unsent": [], "warnings": []}
    found = _buildables(config, read=make)
    for one in found:
        if one.make is None:
            what = f"{config.engine} compiles {one.source} on its cores only, when a replica starts"
            raise EngineLoadError("compile-needs-device", what, "start it: its own cache keeps what was compiled")
        if one.kept:
            _one(config, one if make else replace(one, make=_no_weights(one)), tell, push, done)
    wanted = [_wanted(config, one) for one in found]
    return Built(wanted=wanted, seconds=round(time.monotonic() - began, 3), **done)


def _one(config: ReplicaConfig, one: Buildable, tell: Tell, push: bool, did: dict[str, list[Any]]) -> None:
    """``did``: what was done, the fields of ``Built``; that of this set is added."""
    assert config.compiled is not None
    assert one.make is not None
    path = peek(Path(config.compiled), one.manifest).path
    key = path.name

    def working(phase: Any, done: int = 0, total: int = 0) -> None:
        tell(Working(key=key, role=one.role, phase=phase, done=done, total=total))

    if locks.is_held(path.with_name(f"{key}.lock")):
        working("waiting")
    with entry(Path(config.compiled), one.manifest, one.is_whole) as held:
        if not held.complete:
            working("looking")
            if _is_pulled(config, held, did["warnings"]):
                did["pulled"].append(key)
            else:
                working("compiling")
                one.make(held, lambda done, total: working("compiling", done, total))
                did["compiled"].append(key)
    if push and config.neff_cache:
        working("sending")
        with entry(Path(config.compiled), one.manifest, one.is_whole) as held:  # with others now, and not alone
            try:
                if compiled_cache.push(held, config.neff_cache):
                    did["pushed"].append(key)
            except SourceError as error:  # what is compiled counts, and the next push sends it
                did["unsent"].append(Failure(error.id, error.what, error.hint))
    working("done")


def _no_weights(one: Buildable) -> Callable[..., None]:
    def make(*_: object) -> None:
        what = f"what was compiled of {one.source} is not there any more, and its weights were not fetched"
        raise EngineLoadError(GONE, what, "compile it again")

    return make


def _is_pulled(config: ReplicaConfig, held: Entry, warnings: list[str]) -> bool:
    """What is there can be compiled here as well: a cache that gives no answer keeps nobody from starting."""
    try:
        return config.neff_cache is not None and compiled_cache.pull(held, config.neff_cache)
    except SourceError as error:
        warnings.append(say(config.neff_cache or "", error))
        return False


def _buildables(config: ReplicaConfig, read: bool) -> list[Buildable]:
    if config.engine == "echo":
        return []
    hide_progress_bars()
    if config.engine == "cpu":
        from workers.engines.cpu.engine import buildables as of_cpu

        return of_cpu(config)
    if config.engine == "transformers-neuronx":
        from workers.engines.transformers_neuronx.engine import buildables as of_tnx

        return of_tnx(config)
    if config.engine == "nxd-inference":
        from workers.engines.nxd_inference.engine import buildables as of_nxd

        return of_nxd(config, read)
    what = f"this version has no engine {config.engine!r}"
    raise EngineLoadError("engine-not-installed", what, "use cpu, echo, transformers-neuronx or nxd-inference")


def _wanted(config: ReplicaConfig, one: Buildable) -> Wanted:
    place = None
    if config.compiled is not None and one.kept and not one.unread:
        place = peek(Path(config.compiled), one.manifest, one.is_whole)
    return Wanted(
        role=one.role,
        source=str(one.source),
        manifest=dict(one.manifest),
        folder="" if place is None else str(place.path),
        complete=place is not None and place.complete,
        ahead=one.make is not None,
        unread=list(one.unread),
    )


def answer(command: str, order: Order, tell: Tell) -> bool:
    """Do it and tell of it; False: there was trouble. Never raises for what the model or the machine does."""
    config = order.config
    try:
        if command == "check":
            tell(check(config))
        elif command == "predict":
            tell(predict(config, order.read))
        else:
            tell(compile_all(config, tell, order.push, order.make))
        return True
    except (EngineLoadError, SourceError) as error:
        failure = Failure(error.id, error.what, error.hint)
        tell(Trouble(_explained(failure, error, config.log) if error.id in VAGUE else failure))
    except Exception as error:
        log.exception("%s of %s failed", command, config.model)
        if is_out_of_memory(error):
            want = out_of_memory(error, f"compiling {config.model}")
            tell(Trouble(Failure(want.id, want.what, want.hint)))
        else:
            what = f"{command} of {config.model}: {type(error).__name__}: {error}"
            id = "start-failed" if command == "check" else "compile-failed"
            tell(Trouble(_explained(Failure(id, what, f"the log is {config.log}"), error, config.log)))
    return False


def _explained(told: Failure, error: Exception, log_file: str) -> Failure:
    """In the compiler's terms, where its output or the exception tells them."""
    words = host_facts.last_words(Path(log_file)) if log_file else []
    return fault_of(error, words) or told


def main(arguments: list[str]) -> int:
    """Read the order, answer it. Exit code 0: done; 1: trouble, which is told; 2: not asked in the right way."""
    if arguments not in (["check"], ["predict"], ["compile"]):
        sys.stderr.write("usage: python -m workers.compiling.build check|predict|compile < JSON\n")
        return 2
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    if order.parent:
        end_with(order.parent)
    for name in NEVER_SET:
        os.environ.pop(name, None)
    os.environ.update(order.config.env)
    return 0 if _answer_in_use(arguments[0], order, answering()) else 1


def _answer_in_use(command: str, order: Order, tell: Tell) -> bool:
    """What is compiled from stays in the store until that is done."""
    try:
        with contextlib.ExitStack() as uses:
            for folder in (order.config.source, order.config.draft_source):
                if folder is not None:
                    uses.enter_context(using(folder))
            return answer(command, order, tell)
    except SourceError as error:  # it was removed before
        tell(Trouble(Failure(error.id, error.what, error.hint)))
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
