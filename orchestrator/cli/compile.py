"""The command `compile`: compiles the models of a spec ahead of time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.app import FAILED, FormatOption, SpecArgument, app, known_model, option, switch, valid_spec
from orchestrator.cli.bars import Bar, bars_on
from orchestrator.cli.output import Format, complain, say, show, stderr
from orchestrator.cluster.settings import store_here
from orchestrator.compiling import hub_push
from orchestrator.compiling.compile_ahead import BuildStep, CompileAhead, CompileOutcome, named
from orchestrator.control.resolve.spec_file import SpecFile, load
from orchestrator.process.failure import Failed
from orchestrator.process.home import Home
from orchestrator.process.text_table import columns
from placements.facts.known_failures import KNOWN_FAILURE
from placements.spec.schema import ModelSpec
from workers.artifacts.sources.listing import SourceError
from workers.compiled.memory_gate import free_gib
from workers.compiled.shared_sets import FOLDER
from workers.compiled.storage import S3, is_writable, storage_at

WORDS = {
    "predicting": "checking what is compiled",
    "queued": "waiting for memory",
    "turn": "waiting for its turn",
    "waiting": "waiting for another process that compiles the same",
}


@app.command(name="compile")
def compile_spec(
    spec: SpecArgument,
    model: Annotated[
        list[str] | None, option("NAME", "Name of a model to compile. Repeatable.", "--model", default="all models")
    ] = None,
    jobs: Annotated[int, option("N", "Maximum number of parallel jobs.", min=1, max=256)] = 256,
    memory_gb: Annotated[
        float | None, option("N", "Host memory for all compilations, in GiB.", default="the free memory", min=0.1)
    ] = None,
    push: Annotated[bool, switch("--push", "Upload compiled artifacts to each model's neff_cache.")] = False,
    push_to_hub: Annotated[str | None, option("REPO", "Upload them to this Hugging Face Hub repository.")] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Compile the models of a spec ahead of time. Needs no fleet or devices."""
    file = load(spec, folders="plan")
    names, valid = model or [], valid_spec(file, "nothing was compiled")
    models = [known_model(file, name) for name in names] or valid.models
    sources = {valid.where("models", item.name, "source") for item in models}
    complain([problem for problem in file.problems if problem.id == KNOWN_FAILURE and problem.where in sources])
    if push:
        _check_places(models)
    if push_to_hub is not None:
        hub_push.opened(push_to_hub)
    outcomes = _compile(file, names, jobs, free_gib() if memory_gb is None else memory_gb, push)
    if output is Format.TABLE:
        show(None, output, _table(outcomes))  # before the upload, which may take long and fail
    places: list[str] = []
    problems = []
    for outcome in outcomes:
        name = named(outcome)
        for failure, subject in ((outcome.failure, name), (outcome.unsent, f"{name} is compiled but not pushed")):
            if failure is not None:
                problems.append(Failed(failure.id, f"{subject}: {failure.what}", failure.hint).problem)
    if push_to_hub is not None:
        try:
            places = _push_to_hub(push_to_hub, outcomes)
        except Failed as failed:
            problems.append(failed.problem)
    complain(problems)
    if output is not Format.TABLE:
        show({"models": [outcome.as_dict() for outcome in outcomes], "hub": places}, output, "")
    raise typer.Exit(FAILED if problems else 0)


def _check_places(models: Sequence[ModelSpec]) -> None:
    """Check before hours of compiling that each ``neff_cache`` to push to is writable. Raises Failed."""
    places = dict.fromkeys(model.neff_cache_location for model in models if model.neff_cache_location)
    without = ", ".join(model.name for model in models if not model.neff_cache_location)
    hint = "set neff_cache to s3://BUCKET/PREFIX, or to a folder shared by all hosts"
    if not places:
        raise Failed("push-nowhere", f"--push needs a neff_cache, and {without} has none", hint)
    if without:
        say(f"not pushed, because neff_cache is not set: {without}")
    for place in places:
        try:
            if place.startswith(S3):
                storage_at(f"{place.rstrip('/')}/{FOLDER}").files()
            elif not is_writable(Path(place.removeprefix("file://"))):
                hint = "check that it is mounted, and its owner"
                raise Failed("neff-cache-unwritable", f"{place} cannot be written", hint)
        except SourceError as error:
            raise Failed.of(error) from None


def _compile(file: SpecFile, names: Sequence[str], jobs: int, memory_gib: float, push: bool) -> list[CompileOutcome]:
    home = Home.from_environment()
    home.prepare()
    with _view() as watch:
        flow = CompileAhead(file, home, store_here(home.store), watch, names=names, push=push)
        prepared, outcomes = flow.prepare()
        for job in prepared:
            if job.need_gib > memory_gib and not job.complete:
                need = f"compiling needs about {job.need_gib:.0f} GiB of host memory, of {memory_gib:.0f} available"
                say(f"{named(job)}: {need}: it is compiled alone")
        running = flow.run(prepared, memory_gib=memory_gib, most=jobs)
        with contextlib.closing(running):
            outcomes += running
    for outcome in outcomes:
        for warning in outcome.warnings:
            say(f"{named(outcome)}: {warning}")
    return outcomes


@contextlib.contextmanager
def _view() -> Iterator[Callable[[BuildStep], None]]:
    """Show progress: bars on a terminal, else a line for each change of phase."""
    last: dict[str, Bar] = {}
    lock = threading.Lock()
    with bars_on(stderr(), keep=True) as bars:

        def report(step: BuildStep) -> None:
            bar = _bar(step)
            with lock:
                before, last[bar.name] = last.get(bar.name), bar
                if bars is not None:
                    bars.show(last.values())
                elif before is None or before.text != bar.text:
                    say(f"{bar.name}: {bar.text}")

        yield report


def _bar(step: BuildStep) -> Bar:
    """Returns the progress in graphs; that of an ended step is full."""
    if step.phase in ("done", "failed"):
        return Bar(named(step), _words(step), 1, 1)
    return Bar(named(step), _words(step), step.done, step.total or None)


def _words(step: BuildStep) -> str:
    graph = f" graph {step.done + 1} of {step.total}" if step.phase == "compiling" and step.total else ""
    return WORDS.get(step.phase, step.phase) + graph


def _push_to_hub(repository: str, outcomes: Sequence[CompileOutcome]) -> list[str]:
    outcomes = [outcome for outcome in outcomes if outcome.result != "failed"]
    folders = [Path(folder) for outcome in outcomes for folder in outcome.folders if folder]
    if not folders:
        raise Failed("push-nowhere", f"nothing is compiled to push to {repository}", "the table shows why")
    places = hub_push.push_to_hub(repository, dict.fromkeys(folders))
    say(f"pushed {len(places)} compiled sets to {repository}")
    return places


def _table(outcomes: Sequence[CompileOutcome]) -> str:
    rows = [
        (
            named(outcome),
            outcome.engine,
            outcome.result,
            f"{outcome.seconds:.0f} s" if outcome.seconds else None,
            ", ".join(outcome.keys) or None,
            len(outcome.pushed) or None if outcome.unsent is None else "failed",
        )
        for outcome in outcomes
    ]
    return columns(("MODELS", "ENGINE", "RESULT", "TIME", "COMPILED", "PUSHED"), rows)
