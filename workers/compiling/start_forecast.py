"""Whether the start of a replica will compile, told before any core is claimed and without reading weights."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from workers.compiling.build import Order, Predicted, Told, Trouble, Wanted
from workers.host.child_process import environment
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure
from workers.neff_cache.candidates import candidates
from workers.neff_cache.compile_units import compiles
from workers.neff_cache.predict import Candidate, Prediction, predict

GIVEN = "nxd-inference"  # an engine that compiles, but for a source that is compiled
ASK_S = 120.0  # to import an engine's package on a busy host


@dataclass(frozen=True)
class Verdict:
    """Of one set of artifacts that a replica needs: the model's own, or its draft's."""

    role: str
    source: str
    prediction: Prediction


def verify(config: ReplicaConfig, *, read: bool = False, ahead: bool = False) -> list[Verdict] | Failure:
    """Ask the interpreter of the engine what a start would need, and compare it with what is there. Blocks.

    With ``read`` the weights are read where a digest of them is wanted and not known.
    """
    told = needed(config, read=read) if compiles(config) else Predicted(engine=config.engine, wanted=[])
    return told if isinstance(told, Failure) else verdicts(config, told, os.environ, ahead=ahead)


def verdicts(
    config: ReplicaConfig, told: Predicted, environment: Mapping[str, str], *, ahead: bool = False
) -> list[Verdict]:
    """What ``python -m workers.compiling.build predict`` has answered, against what is there; ``environment`` is that
    of the host. An engine that compiles nothing has one verdict."""
    if not told.wanted:
        source = config.source or ""
        if told.engine == GIVEN:
            as_asked = "the source is compiled already, as the model asks"
            return [Verdict("model", source, Prediction("hit", "source", as_asked, source))]
        return [Verdict("model", source, predict(None, []))]
    env = {**environment, **config.env}
    return [Verdict(one.role, one.source, _predicted(config, one, env, ahead)) for one in told.wanted]


def needed(config: ReplicaConfig, *, read: bool = False) -> Predicted | Failure:
    """The answer of ``python -m workers.compiling.build predict``, in the interpreter and the environment of the
    replica."""
    order = Order(config=msgspec.structs.replace(config, token="", credentials=None), parent=os.getpid(), read=read)
    python = config.python or sys.executable
    try:
        done = subprocess.run(
            [python, "-m", "workers.compiling.build", "predict"],
            input=msgspec.json.encode(order),
            capture_output=True,
            env=environment(config.env),
            cwd="/",  # a folder `workers` where the user stands is not ours
            timeout=None if read else ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Failure("cache-not-verified", f"{python} does not tell what {config.model} needs: {error}")
    for line in done.stdout.splitlines():
        told = msgspec.json.decode(line, type=Told)
        if isinstance(told, Trouble):
            return told.failure
        if isinstance(told, Predicted):
            return told
    words = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    what = f"{python} ended with exit code {done.returncode}: {' '.join(words)[:300]}"
    return Failure("cache-not-verified", what, "`corewright doctor SPEC` looks at that interpreter")


def _predicted(config: ReplicaConfig, one: Wanted, env: Mapping[str, str], ahead: bool) -> Prediction:
    if one.unread:
        reason = f"{len(one.unread)} files of the checkpoint are a part of it and were not read yet; --read reads them"
        return Prediction("compile", "nothing", reason)
    if config.compiled is None:
        return Prediction("compile", "nothing", "nothing is kept")
    root = Path(config.compiled)
    found = candidates(one.manifest, root, Path(one.source), env, kept=bool(one.folder), neff_cache=config.neff_cache)
    if one.folder and not one.complete:  # by the engine's own look at the folder
        found = [_incomplete(candidate, one.folder) for candidate in found]
    return predict(one.manifest, found, one.source, ahead=ahead)


def _incomplete(candidate: Candidate, folder: str) -> Candidate:
    is_it = candidate.where == "compiled" and candidate.place == folder and not candidate.missing
    return replace(candidate, missing=(Path(folder).name,)) if is_it else candidate
