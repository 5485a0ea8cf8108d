"""`corewright generate`: one answer of one model, in a process of its own, without the daemon and without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import msgspec

from orchestrator.cli.app import FAILED, INTERRUPTED
from orchestrator.cli.output import complain, say, stdout
from orchestrator.failure import Failed
from orchestrator.generation import Generation
from orchestrator.home import Home
from orchestrator.journal import Revision
from orchestrator.replica_config import replica_config
from orchestrator.specfile import SpecFile, start_problems
from orchestrator.starting import prepared
from placements.plan import Placement, plan
from placements.problems import has_errors
from workers.config import NEVER_SET, ReplicaConfig
from workers.interpreter import Interpreter, Interpreters
from workers.oneoff import End, Job, Piece, Told, Trouble
from workers.status import Failure

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
    found = plan(spec, file.hosts, file.checkpoints)
    placement = next((placement for placement in found.placements if placement.model == model), None)
    if placement is None:
        complain([problem for missing in found.unplaced if missing.model == model for problem in missing.problems])
        say(f"{model} has no place: nothing was started")
        return FAILED
    home = Home.from_environment()
    home.prepare()
    with contextlib.ExitStack() as held:
        return _answered(file, placement, home, Asked(prompt, how), held)


class Asked(NamedTuple):
    prompt: str
    how: dict[str, Any]  # fields of ``Job``


def _answered(file: SpecFile, placement: Placement, home: Home, asked: Asked, held: contextlib.ExitStack) -> int:
    model = placement.model
    config = _config(file, placement, home, held)
    where = placement.host
    if placement.cores is not None:
        where = f"core{'s' if len(placement.cores) > 1 else ''} {placement.cores} of {where}"
    say(f"loading {model} ({config.engine}) on {where}")
    job = Job(config=config, prompt=asked.prompt, parent=os.getpid(), **asked.how)
    try:
        with _process(config) as process:
            return _pass_on(process, job)
    except KeyboardInterrupt:
        return INTERRUPTED


def _only(file: SpecFile, model: str) -> SpecFile:
    """The same file without the other models: that one of them cannot be started does not matter here."""
    assert file.spec is not None
    kept = tuple(one for one in file.spec.models if one.name == model)
    return dataclasses.replace(file, spec=file.spec.model_copy(update={"models": kept}))


def _config(file: SpecFile, placement: Placement, home: Home, held: contextlib.ExitStack) -> ReplicaConfig:
    """As the fleet would tell it to its replica. Raises Failed for a source that cannot be had, and an interpreter or
    an engine that will not do. What it loads is in use until ``held`` ends."""
    assert file.spec is not None
    revision = Revision(
        number=0, cause="apply", by="", text=file.text, file=file.name, base_dir=file.base_dir, of=None, plan={}
    )
    tokenizers = {model.name: "" for model in file.spec.models}
    generation = Generation(revision, file.spec, file.hosts, file.checkpoints, tokenizers)
    config = replica_config(generation, placement, home)
    config = msgspec.structs.replace(config, log=str(home.logs / f"generate-{placement.model}.log"))
    config = _brought(config, home, held)
    found = asyncio.run(prepared(config, generation, _ThisMachine()))
    if isinstance(found, Failure):
        raise Failed(found.id, found.what, found.hint)
    return found


def _brought(config: ReplicaConfig, home: Home, held: contextlib.ExitStack) -> ReplicaConfig:
    """With the folders of what was fetched. Raises Failed."""
    from orchestrator.settings import store_here
    from workers.artifacts.bringing import Bringing, Landed, wanted_by, with_folders
    from workers.artifacts.listing import SourceError
    from workers.artifacts.progress import Progress
    from workers.artifacts.uses import using

    wanted = wanted_by(config)
    if wanted == (None, None):
        return config
    bringing, landed = Bringing(store_here(home.store).open()), list[Landed | None]()
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


class _ThisMachine:
    """What is asked of a cluster before a start, answered by this machine."""

    def __init__(self) -> None:
        self._interpreters = Interpreters()

    async def interpreter(self, python: str | None, host: str) -> Interpreter:
        return self._interpreters.ask(python)


@contextlib.contextmanager
def _process(config: ReplicaConfig) -> Iterator[subprocess.Popen[bytes]]:
    """The child with the placement's environment, its complaints in the log; ended in any case.

    A session of its own: Ctrl-C on the terminal reaches this process alone, which then ends the child.
    """
    env = {name: value for name, value in os.environ.items() if name not in NEVER_SET} | config.env
    descriptor = os.open(config.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        process = subprocess.Popen(
            [config.python or sys.executable, "-m", "workers.oneoff"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=descriptor,
            env=env,
            cwd="/",  # a folder `workers` where the user stands is not ours
            start_new_session=True,
        )
    finally:
        os.close(descriptor)
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
        told: Told = msgspec.json.decode(line, type=Told)
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
