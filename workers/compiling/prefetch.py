"""Runs checks, predictions and compiles ahead of a start, each in a process of its own."""

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
from workers.compiling.build import BuildTrouble, Built, Checked, Order, Predicted, Reply, Working
from workers.compiling.start_forecast import verdicts
from workers.host import host_facts, json_process
from workers.host.process_tree import end_marked
from workers.messages.actor_message import actor_message
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure
from workers.neff_cache.compile_units import compiles as compiles

log = logging.getLogger(__name__)

FORESEE_S = 120.0  # to import an engine's package on a busy host
END_S = 10.0
POLL_S = 0.5
_OF_ONE_REPLICA = {"replica": 0, "epoch": 0, "socket": "", "token": "", "log": "", "credentials": None, "cores": []}


@actor_message
class Foreseen(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction of what a start would compile."""

    missing: list[str] = []  # missing sets that can be compiled ahead, for display; empty: nothing to do
    trouble: str = ""  # why the prediction failed; the start will find out on its cores


def build_key(config: ReplicaConfig) -> str:
    """Returns a key that is equal for configs whose replicas need the same compiled artifacts."""
    plain = msgspec.to_builtins(msgspec.structs.replace(config, env={}, **_OF_ONE_REPLICA))
    return blake2s(json.dumps(plain, sort_keys=True).encode(), digest_size=10).hexdigest()


def check(config: ReplicaConfig, stop: threading.Event | None = None, warm: str | None = None) -> Checked | Failure:
    """Checks whether a start of ``config`` could load its files; see `build.check`. Blocks while the engine's package
    is imported; ``warm`` as in `json_process.start`. Raises Stopped soon after ``stop`` is set."""
    try:
        for reply in answers("check", config, stop or threading.Event(), FORESEE_S, warm=warm):
            if isinstance(reply, Checked):
                return reply
            if isinstance(reply, BuildTrouble):
                return reply.failure
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
        return Failure("start-failed", f"{config.model} cannot be checked: {type(error).__name__}: {error}")
    message = f"the process that checked {config.model} ended without a result"
    return Failure("start-failed", message, f"its log is {config.log}")


def foresee(config: ReplicaConfig, stop: threading.Event | None = None, warm: str | None = None) -> Foreseen:
    """Predicts what would be missing. Blocks while the engine's package is imported and a remote cache answers;
    ``warm`` as in `json_process.start`. Raises Stopped soon after ``stop`` is set."""
    try:
        replies = list(answers("predict", config, stop or threading.Event(), FORESEE_S, warm=warm))
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
        return Foreseen(trouble=f"{type(error).__name__}: {error}")
    missing, trouble = [], "" if replies else "the process that predicts ended without a result"
    for answer in replies:
        if isinstance(answer, BuildTrouble):
            trouble = str(answer.failure)
        elif isinstance(answer, Predicted):
            missing += _missing(config, answer)
    return Foreseen(missing=missing, trouble=trouble)


def _missing(config: ReplicaConfig, predicted: Predicted) -> list[str]:
    """Returns the sets to compile or to fetch from another host's push, each with the reason of its prediction.

    One that only a device compiles is fetched, too: the start would otherwise do it on its cores."""
    lacking = [
        artifacts for artifacts in predicted.wanted if not artifacts.complete and (artifacts.ahead or artifacts.folder)
    ]
    if not lacking:
        return []
    verdict = {
        (artifacts.role, artifacts.source): artifacts.prediction
        for artifacts in verdicts(config, predicted, os.environ, ahead=True)
    }
    predictions = [(artifacts, verdict[artifacts.role, artifacts.source]) for artifacts in lacking]
    return [
        f"{artifacts.role}: {why.reason}"
        for artifacts, why in predictions
        if why.where == "elsewhere" or (artifacts.ahead and not why.hit)
    ]


def build(config: ReplicaConfig, progress: Progress, stop: threading.Event) -> Built | Failure:
    """Compiles missing sets. Raises Stopped soon after ``stop`` is set, when its compilers have ended."""
    progress.enter("compiling")
    for reply in answers("compile", config, stop):
        if isinstance(reply, Working) and reply.total:
            progress.expect(reply.total, reply.done)
        elif isinstance(reply, Built):
            return reply
        elif isinstance(reply, BuildTrouble):
            return reply.failure
    return Failure("compile-failed", f"the process that compiled {config.model} ended without a result", config.log)


def answers(
    command: str,
    config: ReplicaConfig,
    stop: threading.Event,
    limit_s: float | None = None,
    *,
    push: bool = False,
    make: bool = True,
    warm: str | None = None,
) -> Iterator[Reply]:
    """Yields the output of `workers.compiling.build` in a process of its own; ``push``, ``make``: as in ``Order``,
    ``warm``: as in `json_process.start`.

    Blocks. Raises Stopped soon after ``stop`` is set, and OSError if the process cannot be started.
    """
    config = msgspec.structs.replace(config, token="", credentials=None)
    order = Order(config=config, parent=os.getpid(), push=push, make=make)
    with _process(command, config, warm) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        watch = threading.Thread(target=_end_when, args=(process, stop, limit_s), name="build", daemon=True)
        watch.start()
        with process.stdin as stdin, contextlib.suppress(BrokenPipeError):
            stdin.write(msgspec.json.encode(order))
        for line in process.stdout:
            yield msgspec.json.decode(line, type=Reply)
        process.wait()
        watch.join()
        if stop.is_set():
            raise Stopped(f"stopped {command} of {config.model}: it has no waiters left")


@contextlib.contextmanager
def _process(command: str, config: ReplicaConfig, warm: str | None) -> Iterator[subprocess.Popen[bytes]]:
    arguments = ("workers.compiling.build", command)
    process = json_process.start(arguments, python=config.python, env=config.env, log_file=config.log, warm=warm)
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
