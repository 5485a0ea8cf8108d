"""The command `generate`: one answer of one model, in a separate process without the daemon and Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import subprocess
import threading
from pathlib import Path
from typing import IO, Annotated, Any, cast

import msgspec
import typer

from orchestrator.cli.app import (
    FAILED,
    INTERRUPTED,
    ModelArgument,
    SpecArgument,
    app,
    known_model,
    option,
    switch,
    valid_spec,
)
from orchestrator.cli.output import complain, say, stdout
from orchestrator.cluster.settings import store_here
from orchestrator.control.resolve.offline_configs import OfflineConfigs
from orchestrator.control.resolve.spec_file import SpecFile, load, start_problems
from orchestrator.process.failure import Failed
from orchestrator.process.home import Home
from placements.facts.plural import plural
from placements.planner.placement import Placement
from placements.spec.problems import has_errors
from workers.artifacts.fetch.artifact_fetcher import ArtifactFetcher, wanted_by, with_folders
from workers.artifacts.fetch.progress import Progress
from workers.artifacts.sources.listing import SourceError
from workers.artifacts.store.artifact_uses import using
from workers.compiled import preparation
from workers.compiled.host_sets import compiles
from workers.compiled.orders import NEEDS_DEVICE
from workers.host import json_process
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure, Trouble
from workers.serving.generate_once import End, GenerateJob, Reply, TextPiece


def generate_once(file: SpecFile, model: str, question: dict[str, Any]) -> int:
    """Returns the exit code. ``question`` has fields of ``GenerateJob``. Raises Failed if the model cannot start."""
    valid_spec(file, "nothing was started")
    model_spec = known_model(file, model)
    if model_spec.kind != "generate":
        fact = f"{model} does not generate: its kind is {model_spec.kind}"
        raise Failed("generate-refused", fact, "start the fleet, and send it requests: docs/api.md")
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
    places = offline.places(model_spec)
    if isinstance(places, Failure):
        raise Failed.of(places)
    with contextlib.ExitStack() as resources:
        placement = next(iter(places.values()))
        return _generate(_config(offline, placement, home, resources), placement, question)


def _generate(config: ReplicaConfig, placement: Placement, question: dict[str, Any]) -> int:
    where = placement.host
    if placement.cores is not None:
        where = f"{plural(len(placement.cores), 'core')} {placement.cores} of {where}"
    job = GenerateJob(config=config, **question)
    try:
        _compile(config)
        say(f"loading {config.model.name} ({config.model.engine}) on {where}")
        arguments = ("workers.serving.generate_once",)
        with json_process.running(
            arguments, job, python=config.run.python, env=config.place.env, log_file=config.run.log
        ) as process:
            return _print_answer(process, job)
    except KeyboardInterrupt:
        return INTERRUPTED


def _only(file: SpecFile, model: str) -> SpecFile:
    """Returns the file without its other models, whose problems do not matter here."""
    assert file.spec is not None
    models = tuple(item for item in file.spec.models if item.name == model)
    return dataclasses.replace(file, spec=file.spec.model_copy(update={"models": models}))


def _config(
    offline: OfflineConfigs, placement: Placement, home: Home, resources: contextlib.ExitStack
) -> ReplicaConfig:
    """Returns the configuration that a replica of the fleet would get, with its artifacts fetched.

    The artifacts are marked as in use until ``resources`` closes. Raises Failed for a source that cannot be fetched,
    and for an unusable interpreter or engine."""
    config = offline.config(placement)
    if isinstance(config, Failure):
        raise Failed.of(config)
    log = str(home.logs / f"generate-{placement.model}.log")
    return _fetch(config.with_run(log=log), home, resources)


def _fetch(config: ReplicaConfig, home: Home, resources: contextlib.ExitStack) -> ReplicaConfig:
    """Fetch the artifacts. Returns the configuration with their folders. Raises Failed."""
    artifacts = wanted_by(config)
    if not artifacts:
        return config
    fetch, landed = ArtifactFetcher(store_here(home.store).open()), {}
    try:
        for keys, artifact in artifacts.items():
            say(f"fetching {artifact.source}")
            landed[keys] = fetch(artifact, Progress(artifact.source), threading.Event())
            resources.enter_context(using(landed[keys].folder))
    except SourceError as error:
        raise Failed.of(error) from None
    return with_folders(config, landed)


def _compile(config: ReplicaConfig) -> None:
    """Before the model claims a core, get its graphs from ``neff_cache`` or compile them. Raises Failed."""
    if not compiles(config):
        return
    forecast = preparation.foresee(config, threading.Event())
    if forecast.trouble:
        say(f"{config.model.name}: cannot check which graphs are compiled: {forecast.trouble}")
    if not forecast.missing:
        return
    say(f"compiling {config.model.name} ({config.model.engine}): {'; '.join(forecast.missing)}")
    result = preparation.build(config, Progress(config.model.name), threading.Event())
    if isinstance(result, Failure) and result.id != NEEDS_DEVICE:
        raise Failed.of(result)
    if not isinstance(result, Failure) and result.pulled and not result.compiled:
        say(f"nothing to compile: all graphs came from {config.model.neff_cache}")


def _print_answer(process: subprocess.Popen[bytes], job: GenerateJob) -> int:
    """Stream the answer to stdout. Raises Failed with the child's failure, or if it exits without an answer."""
    for line in cast(IO[bytes], process.stdout):
        message: Reply = msgspec.json.decode(line, type=Reply)
        if isinstance(message, TextPiece):
            stdout().write(message.text)
            stdout().flush()
        elif isinstance(message, End):
            stdout().write("\n")
            stdout().flush()
            return 0
        else:
            assert isinstance(message, Trouble)
            raise Failed.of(message.failure)
    code = process.wait()
    cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    raise Failed("replica-died", f"the process of {job.config.model.name} {cause}", f"see {Path(job.config.run.log)}")


@app.command()
def generate(
    spec: SpecArgument,
    model: ModelArgument,
    prompt: Annotated[str, option("TEXT", "User message; plain text for a model without a chat template.")],
    raw: Annotated[bool, switch("--raw", "Send TEXT without the chat template.")] = False,
    max_tokens: Annotated[int | None, option("N", "Maximum number of output tokens.", default="128", min=1)] = None,
    temperature: Annotated[float, option("T", "Sampling temperature; 0 is greedy.", min=0, max=2)] = 0.0,
    top_k: Annotated[int, option("K", "Sample from the K most probable tokens; 0 disables the limit.", min=0)] = 0,
    top_p: Annotated[
        float, option("P", "Sample from the most probable tokens with a total probability of P.", min=0.001, max=1)
    ] = 1.0,
) -> None:
    """Generate one answer with a model, without a fleet."""
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    raise typer.Exit(generate_once(load(spec, folders="plan"), model, {"prompt": prompt, "raw": raw, **sampling}))
