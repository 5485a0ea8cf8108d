"""`corewright generate`: one answer of one model, in a process of its own, without the daemon and without Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import msgspec

from orchestrator.cli.app import FAILED, INTERRUPTED
from orchestrator.cli.output import complain, say, stdout
from orchestrator.process.failure import Failed
from orchestrator.process.home import Home
from orchestrator.revisions.spec_file import SpecFile, start_problems
from orchestrator.starts.offline_configs import OfflineConfigs
from placements.planner.placement import Placement
from placements.spec.problems import has_errors
from workers.host import child_process
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure
from workers.serving.generate_once import End, Job, Piece, Reply, Trouble

END_S = 5.0  # for the process to end by itself; then it is killed


def generate(file: SpecFile, model: str, prompt: str, how: dict[str, Any]) -> int:
    """Gives the exit code. ``how`` are fields of ``Job``. Raises Failed for what prevents the answer."""
    spec = file.spec
    if spec is None or has_errors(file.problems):
        complain(file.problems)
        say(f"{file.name} has errors: nothing was started")
        return FAILED
    one = spec.model(model)
    if one is None:
        known = ", ".join(other.name for other in spec.models)
        raise Failed("model-unknown", f"{file.name} has no model {model}", f"it has {known}")
    problems = start_problems(_only(file, model))
    if has_errors(problems):
        complain(problems)
        return FAILED
    home = Home.from_environment()
    home.prepare()
    offline = OfflineConfigs(file, home)
    if problems := offline.unplaced(model):
        complain(problems)
        say(f"{model} has no place: nothing was started")
        return FAILED
    places = offline.places(one)
    if isinstance(places, Failure):
        raise Failed(places.id, places.what, places.hint)
    with contextlib.ExitStack() as held:
        return _answered(offline, next(iter(places.values())), home, Asked(prompt, how), held)


class Asked(NamedTuple):
    prompt: str
    how: dict[str, Any]  # fields of ``Job``


def _answered(
    offline: OfflineConfigs, placement: Placement, home: Home, asked: Asked, held: contextlib.ExitStack
) -> int:
    model = placement.model
    config = _config(offline, placement, home, held)
    where = placement.host
    if placement.cores is not None:
        where = f"core{'s' if len(placement.cores) > 1 else ''} {placement.cores} of {where}"
    job = Job(config=config, prompt=asked.prompt, parent=os.getpid(), **asked.how)
    try:
        _compile(config)
        say(f"loading {model} ({config.engine}) on {where}")
        with _process(config) as process:
            return _pass_on(process, job)
    except KeyboardInterrupt:
        return INTERRUPTED


def _only(file: SpecFile, model: str) -> SpecFile:
    """The same file without the other models: that one of them cannot be started does not matter here."""
    assert file.spec is not None
    kept = tuple(one for one in file.spec.models if one.name == model)
    return dataclasses.replace(file, spec=file.spec.model_copy(update={"models": kept}))


def _config(offline: OfflineConfigs, placement: Placement, home: Home, held: contextlib.ExitStack) -> ReplicaConfig:
    """As the fleet would tell it to its replica. Raises Failed for a source that cannot be had, and an interpreter or
    an engine that will not do. What it loads is in use until ``held`` ends."""
    found = offline.config(placement)
    if isinstance(found, Failure):
        raise Failed(found.id, found.what, found.hint)
    log = str(home.logs / f"generate-{placement.model}.log")
    return _brought(msgspec.structs.replace(found, log=log), home, held)


def _brought(config: ReplicaConfig, home: Home, held: contextlib.ExitStack) -> ReplicaConfig:
    """With the folders of what was fetched. Raises Failed."""
    from orchestrator.daemon.settings import store_here
    from workers.artifacts.fetch.artifact_fetcher import ArtifactFetcher, FetchedArtifact, wanted_by, with_folders
    from workers.artifacts.fetch.progress import Progress
    from workers.artifacts.sources.listing import SourceError
    from workers.artifacts.store.artifact_uses import using

    wanted = wanted_by(config)
    if wanted == (None, None):
        return config
    bringing, landed = ArtifactFetcher(store_here(home.store).open()), list[FetchedArtifact | None]()
    try:
        for one in wanted:
            if one is not None:
                say(f"fetching {one.source}")
            landed.append(None if one is None else bringing(one, Progress(one.source), threading.Event()))
            if (here := landed[-1]) is not None:
                held.enter_context(using(here.folder))
    except SourceError as error:
        raise Failed(error.id, error.what, error.hint) from None
    return with_folders(config, wanted, (landed[0], landed[1]))


def _compile(config: ReplicaConfig) -> None:
    """What its load would compile comes from the model's ``neff_cache``, or is compiled, before it claims a core: as
    before the start of a replica. Raises Failed."""
    from orchestrator.rollout.preparation import NEEDS_DEVICE
    from workers.artifacts.fetch.progress import Progress
    from workers.compiling import prefetch

    if not prefetch.compiles(config):
        return
    found = prefetch.foresee(config)
    if found.trouble:
        say(f"{config.model}: what it would compile cannot be told: {found.trouble}")
    if not found.missing:
        return
    say(f"compiling {config.model} ({config.engine}): {'; '.join(found.missing)}")
    ended = prefetch.build(config, Progress(config.model), threading.Event())
    if isinstance(ended, Failure) and ended.id != NEEDS_DEVICE:
        raise Failed(ended.id, ended.what, ended.hint)
    if not isinstance(ended, Failure) and ended.pulled and not ended.compiled:
        say(f"nothing had to be compiled: it came from {config.neff_cache}")


@contextlib.contextmanager
def _process(config: ReplicaConfig) -> Iterator[subprocess.Popen[bytes]]:
    """The child with the placement's environment, its complaints in the log; ended in any case."""
    process = child_process.start(
        ("workers.serving.generate_once",), python=config.python, env=config.env, log_file=config.log
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):
                cast(IO[bytes], pipe).close()


def _pass_on(process: subprocess.Popen[bytes], job: Job) -> int:
    """The answer to standard output, as it comes. Raises Failed with what the child tells, or with how it ended."""
    pipe = cast(IO[bytes], process.stdin)
    with contextlib.suppress(BrokenPipeError), pipe:  # broken: it ended at once, and how is told below
        pipe.write(msgspec.json.encode(job))
    for line in cast(IO[bytes], process.stdout):
        told: Reply = msgspec.json.decode(line, type=Reply)
        if isinstance(told, Piece):
            stdout().write(told.text)
            stdout().flush()
        elif isinstance(told, End):
            stdout().write("\n")
            stdout().flush()
            return 0
        else:
            assert isinstance(told, Trouble)
            raise Failed(told.failure.id, told.failure.what, told.failure.hint)
    code = process.wait()
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    raise Failed("replica-died", f"the process of {job.config.model} {how}", f"the log is {Path(job.config.log)}")
