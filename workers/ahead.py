"""Compiling ahead of a start, in processes apart from whoever asks: what would be compiled, and compiling it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from hashlib import blake2s
from pathlib import Path

import msgspec

from workers import host
from workers.artifacts.listing import SourceError, Stopped
from workers.artifacts.progress import Progress
from workers.build import Built, Order, Predicted, Told, Trouble, Working
from workers.config import NEVER_SET, ReplicaConfig
from workers.offspring import end_marked
from workers.status import Failure

log = logging.getLogger(__name__)

FORESEE_S = 120.0  # to import an engine's package on a busy host
END_S = 10.0
POLL_S = 0.5
_OF_ONE_REPLICA = {"replica": 0, "epoch": 0, "socket": "", "token": "", "log": "", "credentials": None, "cores": []}


class Foreseen(msgspec.Struct, frozen=True, kw_only=True):
    """What a start would find compiled."""

    missing: list[str] = []  # what could be compiled ahead and is not there, each in words; empty: nothing to do


def compiles(config: ReplicaConfig) -> bool:
    """Whether its engine compiles anything that is kept."""
    return config.engine != "echo" and (config.engine != "cpu" or bool(config.engine_options.get("compile")))


def build_key(config: ReplicaConfig) -> str:
    """Equal for configurations whose replicas look for the same compiled artifacts."""
    plain = msgspec.to_builtins(msgspec.structs.replace(config, env={}, **_OF_ONE_REPLICA))
    return blake2s(json.dumps(plain, sort_keys=True).encode(), digest_size=10).hexdigest()


def foresee(config: ReplicaConfig) -> Foreseen:
    """What would be missing. Blocks, for as long as the engine's package takes to import. Where it cannot be told,
    nothing is: the start itself will."""
    try:
        told = list(answers("predict", config, threading.Event(), FORESEE_S))
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError, Stopped) as error:
        log.warning("what %s would compile cannot be told: %s", config.model, error)
        return Foreseen()
    missing = []
    for answer in told:
        if isinstance(answer, Trouble):
            log.warning("what %s would compile cannot be told: %s", config.model, answer.failure)
        elif isinstance(answer, Predicted):
            missing += _missing(config, answer)
    return Foreseen(missing=missing)


def _missing(config: ReplicaConfig, told: Predicted) -> list[str]:
    """What is to be compiled, or to be brought from where another host has compiled it; with the reason of `verify`."""
    from workers.neff_cache.verify import verdicts  # which imports this module

    lacking = [one for one in told.wanted if one.ahead and not one.complete]
    if not lacking:
        return []
    try:
        verdict = {(one.role, one.source): one.prediction for one in verdicts(config, told, os.environ, ahead=True)}
    except SourceError as error:
        return [f"{one.role}: whether its neff_cache holds it cannot be told: {error}" for one in lacking]
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
    command: str, config: ReplicaConfig, stop: threading.Event, limit_s: float | None = None, *, push: bool = False
) -> Iterator[Told]:
    """What `workers.build` tells, run in a process of its own; ``push``: as in its ``Order``. Blocks. Raises Stopped
    soon after ``stop`` is set, and OSError where no process can be started."""
    order = Order(config=msgspec.structs.replace(config, token="", credentials=None), parent=os.getpid(), push=push)
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
    log_file = Path(config.log)
    log_file.parent.mkdir(parents=True, exist_ok=True)
    words = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        process = subprocess.Popen(
            [config.python or sys.executable, "-m", "workers.build", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
            env={name: value for name, value in os.environ.items() if name not in NEVER_SET} | config.env,
            cwd="/",  # a folder `workers` where somebody stands is not ours
            start_new_session=True,
        )
    finally:
        os.close(words)
    started = host.process_start(process.pid)
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
