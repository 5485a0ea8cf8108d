"""Checks, predicts and compiles ahead of a start, each in a process of its own, without claiming cores."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2s
from pathlib import Path

import msgspec

from workers.artifacts.fetch.progress import Progress
from workers.artifacts.sources.listing import Stopped
from workers.compiling.build import BuildTrouble, Built, Checked, Order, Predicted, Reply, Wanted, Working
from workers.host import json_process
from workers.messages.actor_message import actor_message
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure
from workers.neff_cache.candidates import candidates
from workers.neff_cache.compiled_artifacts import compiles as compiles
from workers.neff_cache.predict import ArtifactCandidate, Prediction, predict

GIVEN = ("nxd-inference", "optimum-neuron")  # they compile, except for a precompiled source
ASK_S = 120.0  # to import an engine's package on a busy host


@dataclass(frozen=True)
class Verdict:
    """The prediction for one set of artifacts, the model's or its draft's."""

    role: str
    source: str
    prediction: Prediction


def verify(config: ReplicaConfig, *, read: bool = False, ahead: bool = False) -> list[Verdict] | Failure:
    """Gets the needs of a start from the engine's interpreter and compares them with existing artifacts. Blocks.

    ``read``: read weights whose digests are needed and unknown.
    """
    predicted = needed(config, read=read) if compiles(config) else Predicted(engine=config.model.engine, wanted=[])
    return predicted if isinstance(predicted, Failure) else verdicts(config, predicted, os.environ, ahead=ahead)


def verdicts(
    config: ReplicaConfig, predicted: Predicted, environment: Mapping[str, str], *, ahead: bool = False
) -> list[Verdict]:
    """Compares the result of ``python -m workers.compiling.build predict`` with existing artifacts; ``environment``:
    the host's. An engine that compiles nothing has one verdict."""
    if not predicted.wanted:
        source = config.source or ""
        if predicted.engine in GIVEN:
            reason = "the source is precompiled for the model's settings"
            return [Verdict("model", source, Prediction("hit", "source", reason, source))]
        return [Verdict("model", source, predict(None, []))]
    env = {**environment, **config.place.env}
    return [
        Verdict(artifacts.role, artifacts.source, _predicted(config, artifacts, env, ahead))
        for artifacts in predicted.wanted
    ]


def needed(config: ReplicaConfig, *, read: bool = False) -> Predicted | Failure:
    """Returns the result of ``python -m workers.compiling.build predict`` in the replica's interpreter and
    environment."""
    order = Order(config=config.with_run(token="", credentials=None), read=read)
    python = config.run.python or sys.executable
    try:
        done = subprocess.run(
            [python, "-m", "workers.compiling.build", "predict"],
            input=json_process.encoded(order),
            capture_output=True,
            env=json_process.environment(config.place.env),
            cwd="/",  # the current folder may have another package `workers`
            timeout=None if read else ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Failure("cache-not-verified", f"cannot run {python} to find out what {config.model.name} needs: {error}")
    for line in done.stdout.splitlines():
        reply = msgspec.json.decode(line, type=Reply)
        if isinstance(reply, BuildTrouble):
            return reply.failure
        if isinstance(reply, Predicted):
            return reply
    words = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    message = f"{python} ended with exit code {done.returncode}: {' '.join(words)[:300]}"
    return Failure("cache-not-verified", message, "check that interpreter with `corewright doctor SPEC`")


def _predicted(config: ReplicaConfig, artifacts: Wanted, env: Mapping[str, str], ahead: bool) -> Prediction:
    if artifacts.unread:
        reason = f"{len(artifacts.unread)} files of the checkpoint need digests and are unread; read them with --read"
        return Prediction("compile", "nothing", reason)
    if config.run.compiled is None:
        return Prediction("compile", "nothing", "there is no folder for compiled artifacts")
    root = Path(config.run.compiled)
    existing = candidates(
        artifacts.manifest,
        root,
        Path(artifacts.source),
        env,
        kept=bool(artifacts.folder),
        neff_cache=config.model.neff_cache,
    )
    if artifacts.folder and not artifacts.complete:  # by the engine's own check of the folder
        existing = [_incomplete(candidate, artifacts.folder) for candidate in existing]
    return predict(artifacts.manifest, existing, artifacts.source, ahead=ahead)


def _incomplete(candidate: ArtifactCandidate, folder: str) -> ArtifactCandidate:
    is_it = candidate.where == "compiled" and candidate.place == folder and not candidate.missing
    return replace(candidate, missing=(Path(folder).name,)) if is_it else candidate


@actor_message
class Foreseen(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction of what a start would compile."""

    missing: list[str] = []  # missing sets that can be compiled ahead, for display; empty: nothing to do
    trouble: str = ""  # why the prediction failed; the start will find out on its cores


def build_key(config: ReplicaConfig) -> str:
    """Returns a key that is equal for configs whose replicas need the same compiled artifacts."""
    folders = {key: origin.folder for key, origin in config.origins.items()}
    parts = (config.model.started_with, sorted(folders.items()), config.run.python, config.run.server_python)
    return blake2s(repr((*parts, config.run.compiled)).encode(), digest_size=10).hexdigest()


def check(config: ReplicaConfig, stop: threading.Event | None = None, warm: str | None = None) -> Checked | Failure:
    """Checks whether a start of ``config`` could load its files; see `build.check`. Blocks while the engine's package
    is imported; ``warm`` as in `json_process.start`. Raises Stopped soon after ``stop`` is set."""
    try:
        for reply in answers("check", config, stop or threading.Event(), ASK_S, warm=warm):
            if isinstance(reply, Checked):
                return reply
            if isinstance(reply, BuildTrouble):
                return reply.failure
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
        return Failure("start-failed", f"{config.model.name} cannot be checked: {type(error).__name__}: {error}")
    message = f"the process that checked {config.model.name} ended without a result"
    return Failure("start-failed", message, f"its log is {config.run.log}")


def foresee(config: ReplicaConfig, stop: threading.Event | None = None, warm: str | None = None) -> Foreseen:
    """Predicts what would be missing. Blocks while the engine's package is imported and a remote cache answers;
    ``warm`` as in `json_process.start`. Raises Stopped soon after ``stop`` is set."""
    try:
        replies = list(answers("predict", config, stop or threading.Event(), ASK_S, warm=warm))
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
    return Failure(
        "compile-failed", f"the process that compiled {config.model.name} ended without a result", config.run.log
    )


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
    config = config.with_run(token="", credentials=None)
    order = Order(config=config, push=push, make=make)
    arguments = ("workers.compiling.build", command)
    with json_process.running(
        arguments,
        order,
        python=config.run.python,
        env=config.place.env,
        log_file=config.run.log,
        warm=warm,
        stop=stop,
        limit_s=limit_s,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield msgspec.json.decode(line, type=Reply)
        process.wait()
        if stop.is_set():
            raise Stopped(f"stopped {command} of {config.model.name}: it has no waiters left")
