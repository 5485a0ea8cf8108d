"""Predicts whether the start of a replica will compile, without claiming cores or reading weights."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from workers.compiling.build import BuildTrouble, Order, Predicted, Reply, Wanted
from workers.host.json_process import environment
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure
from workers.neff_cache.candidates import candidates
from workers.neff_cache.compile_units import compiles
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
    predicted = needed(config, read=read) if compiles(config) else Predicted(engine=config.engine, wanted=[])
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
    env = {**environment, **config.env}
    return [
        Verdict(artifacts.role, artifacts.source, _predicted(config, artifacts, env, ahead))
        for artifacts in predicted.wanted
    ]


def needed(config: ReplicaConfig, *, read: bool = False) -> Predicted | Failure:
    """Returns the result of ``python -m workers.compiling.build predict`` in the replica's interpreter and
    environment."""
    order = Order(config=msgspec.structs.replace(config, token="", credentials=None), parent=os.getpid(), read=read)
    python = config.python or sys.executable
    try:
        done = subprocess.run(
            [python, "-m", "workers.compiling.build", "predict"],
            input=msgspec.json.encode(order),
            capture_output=True,
            env=environment(config.env),
            cwd="/",  # the current folder may have another package `workers`
            timeout=None if read else ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Failure("cache-not-verified", f"cannot run {python} to find out what {config.model} needs: {error}")
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
    if config.compiled is None:
        return Prediction("compile", "nothing", "there is no folder for compiled artifacts")
    root = Path(config.compiled)
    existing = candidates(
        artifacts.manifest, root, Path(artifacts.source), env, kept=bool(artifacts.folder), neff_cache=config.neff_cache
    )
    if artifacts.folder and not artifacts.complete:  # by the engine's own check of the folder
        existing = [_incomplete(candidate, artifacts.folder) for candidate in existing]
    return predict(artifacts.manifest, existing, artifacts.source, ahead=ahead)


def _incomplete(candidate: ArtifactCandidate, folder: str) -> ArtifactCandidate:
    is_it = candidate.where == "compiled" and candidate.place == folder and not candidate.missing
    return replace(candidate, missing=(Path(folder).name,)) if is_it else candidate
