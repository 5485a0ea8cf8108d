"""What is done ahead of a start, in processes apart from whoever asks: checking what it needs beside its cores, finding
out what would be compiled, and compiling it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import threading
from collections.abc import Iterator
from hashlib import blake2s

import msgspec

from workers.artifacts.fetch.progress import Progress
from workers.artifacts.sources.listing import Stopped
from workers.compiling.build import Built, Checked, Order, Predicted, Told, Trouble, Working
from workers.compiling.start_forecast import verdicts
from workers.host import child_process, host_facts
from workers.host.process_tree import end_marked
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure
from workers.neff_cache.compile_units import compiles as compiles

log = logging.getLogger(__name__)

FORESEE_S = 120.0  # to import an engine's package on a busy host
END_S = 10.0
POLL_S = 0.5
_OF_ONE_REPLICA = {"replica": 0, "epoch": 0, "socket": "", "token": "", "log": "", "credentials": None, "cores": []}


class Foreseen(msgspec.Struct, frozen=True, kw_only=True):
    """What a start would find compiled."""

    missing: list[str] = []  # what could be compiled ahead and is not there, each in words; empty: nothing to do
    trouble: str = ""  # why it could not be told; the start itself will find out, on its cores


def build_key(config: ReplicaConfig) -> str:
    """Equal for configurations whose replicas look for the same compiled artifacts."""
    plain = msgspec.to_builtins(msgspec.structs.replace(config, env={}, **_OF_ONE_REPLICA))
    return blake2s(json.dumps(plain, sort_keys=True).encode(), digest_size=10).hexdigest()


def check(config: ReplicaConfig, stop: threading.Event | None = None) -> Checked | Failure:
    """Whether a start of ``config`` could load what it names; see `build.check`. Blocks, for as long as the engine's
    package takes to import. Raises Stopped soon after ``stop`` is set."""
    try:
        for told in answers("check", config, stop or threading.Event(), FORESEE_S):
            if isinstance(told, Checked):
                return told
            if isinstance(told, Trouble):
                return told.failure
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
        return Failure("start-failed", f"{config.model} cannot be checked: {type(error).__name__}: {error}")
    what = f"the process that checked {config.model} ended without an answer"
    return Failure("start-failed", what, f"its log is {config.log}")


def foresee(config: ReplicaConfig, stop: threading.Event | None = None) -> Foreseen:
    """What would be missing. Blocks, for as long as the engine's package takes to import, and a cache elsewhere to
    answer. Raises Stopped soon after ``stop`` is set."""
    try:
        told = list(answers("predict", config, stop or threading.Event(), FORESEE_S))
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
        return Foreseen(trouble=f"{type(error).__name__}: {error}")
    missing, trouble = [], "" if told else "the process that looked ended without a word"
    for answer in told:
        if isinstance(answer, Trouble):
            trouble = str(answer.failure)
        elif isinstance(answer, Predicted):
            missing += _missing(config, answer)
    return Foreseen(missing=missing, trouble=trouble)


def _missing(config: ReplicaConfig, told: Predicted) -> list[str]:
    """What is to be compiled, or to be brought from where another host has compiled it; with the reason of `verify`."""
    lacking = [one for one in told.wanted if one.ahead and not one.complete]
    if not lacking:
        return []
    verdict = {(one.role, one.source): one.prediction for one in verdicts(config, told, os.environ, ahead=True)}
    found = [(one, verdict[one.role, one.source]) for one in lacking]
    return [f"{one.role}: {why.reason}" for one, why in found if not why.hit or why.where == "elsewhere"]


def build(config: ReplicaConfig, progress: Progress, stop: threading.Event) -> Built | Failure:
    """Compile what is missing. Raises Stopped soon after ``stop`` is set; its compilers are gone then."""
    progress.enter("compiling")
    for told in answers("compile", config, stop):
        if isinstance(told, Working) and told.total:
            progress.expect(told.total, told.done)
        elif isinstance(told, Built):
            return told
        elif isinstance(told, Trouble):
            return told.failure
    return Failure("compile-failed", f"the process that compiled {config.model} ended without a word", config.log)


def answers(
    command: str,
    config: ReplicaConfig,
    stop: threading.Event,
    limit_s: float | None = None,
    *,
    push: bool = False,
    make: bool = True,
) -> Iterator[Told]:
    """What `workers.compiling.build` tells, run in a process of its own; ``push`` and ``make``: as in its ``Order``.
    Blocks. Raises Stopped soon after ``stop`` is set, and OSError where no process can be started."""
    config = msgspec.structs.replace(config, token="", credentials=None)
    order = Order(config=config, parent=os.getpid(), push=push, make=make)
    with _process(command, config) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        watch = threading.Thread(target=_end_when, args=(process, stop, limit_s), name="build", daemon=True)
        watch.start()
        with process.stdin as stdin, contextlib.suppress(BrokenPipeError):
            stdin.write(msgspec.json.encode(order))
        for line in process.stdout:
            yield msgspec.json.decode(line, type=Told)
        process.wait()
        watch.join()
        if stop.is_set():
            raise Stopped(f"nobody waits for {config.model} to be compiled any more")


@contextlib.contextmanager
def _process(command: str, config: ReplicaConfig) -> Iterator[subprocess.Popen[bytes]]:
    process = child_process.start(
        ("workers.compiling.build", command), python=config.python, env=config.env, log_file=config.log
    )
    started = host_facts.process_start(process.pid)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if started is not None:
            end_marked(process.pid, started, END_S)


def _end_when(process: subprocess.Popen[bytes], stop: threading.Event, limit_s: float | None) -> None:
    waited_s = 0.0
    while process.poll() is None:
        if stop.wait(POLL_S):
            process.kill()
            return
        waited_s += POLL_S
        if limit_s is not None and waited_s > limit_s:
            log.warning("process %d has not answered within %.0f s", process.pid, limit_s)
            process.kill()
            return
