"""`corewright compile`: everything that the models of a spec need is compiled before anything starts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.app import FAILED, FormatOption, SpecArgument, app
from orchestrator.cli.output import Format, complain, say, show, stderr
from orchestrator.process.failure import Failed
from orchestrator.process.text_table import columns

if TYPE_CHECKING:
    from orchestrator.compiling.compile_ahead import Outcome, Step
    from orchestrator.revisions.spec_file import SpecFile

WORDS = {
    "predicting": "looking what is compiled",
    "queued": "waits for memory",
    "turn": "waits for its turn",
    "waiting": "waits for another that compiles the same",
}


@app.command(name="compile")
def compile_spec(
    spec: SpecArgument,
    model: Annotated[
        list[str] | None, typer.Option("--model", metavar="NAME", help="Only this model. Repeatable.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, max=256, metavar="N", help="Compile at most so many at once.")] = 256,
    memory_gb: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="N", help="GiB of this host for compiling.", show_default="what is free"),
    ] = None,
    push: Annotated[bool, typer.Option("--push", help="Bring what is compiled to each model's neff_cache.")] = False,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="REPO", help="Bring it to a repository of the Hugging Face hub.")
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Compile what the models of a spec need, ahead of time and without a fleet or devices."""
    from orchestrator.compiling.compile_ahead import named
    from orchestrator.revisions.spec_file import load
    from placements.spec.problems import has_errors

    file = load(spec, folders="plan")
    if file.spec is None or has_errors(file.problems):
        complain(file.problems)
        say(f"{file.name} has errors: nothing was compiled")
        raise typer.Exit(FAILED)
    _check_names(file, model or [])
    if push:
        _check_places(file, model or [])
    if push_to_hub is not None:
        _check_hub(push_to_hub)
    outcomes = _compile(file, model or [], jobs, _memory_gib(memory_gb), push)
    if output is Format.TABLE:
        show(None, output, _table(outcomes))  # an upload may take long, and fail
    places: list[str] = []
    problems = []
    for one in outcomes:
        for failure, of in ((one.failure, named(one)), (one.unsent, f"{named(one)} is compiled, and not pushed")):
            if failure is not None:
                problems.append(Failed(failure.id, f"{of}: {failure.what}", failure.hint).problem)
    if push_to_hub is not None:
        try:
            places = _to_hub(push_to_hub, outcomes)
        except Failed as failed:
            problems.append(failed.problem)
    complain(problems)
    if output is not Format.TABLE:
        show({"models": [one.as_dict() for one in outcomes], "hub": places}, output, "")
    raise typer.Exit(FAILED if problems else 0)


def _check_names(file: SpecFile, names: Sequence[str]) -> None:
    """Raises Failed for a model that there is not."""
    assert file.spec is not None
    known = {one.name: one for one in file.spec.models}
    for name in names:
        if name not in known:
            raise Failed("model-unknown", f"{file.name} has no model {name}", f"it has {', '.join(known)}")


def _check_places(file: SpecFile, names: Sequence[str]) -> None:
    """Whether there is somewhere to push to, and it answers: before hours of compiling, not after. Models without a
    place are named. Raises Failed."""
    from workers.artifacts.sources.listing import SourceError
    from workers.neff_cache.compiled_cache import FOLDER
    from workers.neff_cache.sync import S3, is_writable, place_at

    assert file.spec is not None
    models = [one for one in file.spec.models if not names or one.name in names]
    places = dict.fromkeys(one.neff_cache_location for one in models if one.neff_cache_location)
    without = ", ".join(one.name for one in models if not one.neff_cache_location)
    hint = "neff_cache: s3://BUCKET/PREFIX, or a folder that all hosts have"
    if not places:
        raise Failed("push-nowhere", f"--push needs a place, and there is no neff_cache for {without}", hint)
    if without:
        say(f"not pushed, for want of a neff_cache: {without}")
    for place in places:
        try:
            if place.startswith(S3):
                place_at(f"{place.rstrip('/')}/{FOLDER}").files()
            elif not is_writable(Path(place.removeprefix("file://"))):
                raise Failed("neff-cache-unwritable", f"{place} cannot be written", "is it mounted, and whose is it?")
        except SourceError as error:
            raise Failed(error.id, error.what, error.hint) from None


def _check_hub(repository: str) -> None:
    """Raises Failed."""
    from orchestrator.compiling.hub_push import opened

    opened(repository)


def _memory_gib(given: float | None) -> float:
    from workers.compiling.memory_gate import free_gib

    return free_gib() if given is None else given


def _compile(file: SpecFile, names: Sequence[str], jobs: int, memory_gib: float, push: bool) -> list[Outcome]:
    from orchestrator.compiling.compile_ahead import CompileAhead, named
    from orchestrator.daemon.settings import store_here
    from orchestrator.process.home import Home

    home = Home.from_environment()
    home.prepare()
    with _view() as watch:
        flow = CompileAhead(file, home, store_here(home.store), watch, names=names, push=push)
        prepared = flow.prepare()
        for job in prepared.jobs:
            if job.need_gib > memory_gib and not job.complete:
                need = f"to compile it takes some {job.need_gib:.0f} GiB of host memory, and there are {memory_gib:.0f}"
                say(f"{named(job)}: {need}: it is compiled alone")
        running = flow.run(prepared.jobs, memory_gib=memory_gib, most=jobs)
        with contextlib.closing(running):
            outcomes = [*prepared.outcomes, *running]
    for one in outcomes:
        for warning in one.warnings:
            say(f"{named(one)}: {warning}")
    return outcomes


@contextlib.contextmanager
def _view() -> Iterator[Callable[[Step], None]]:
    """Progress: bars on a terminal, else a line for each change that a person would want to read."""
    if stderr().isatty():
        with _bars() as watch:
            yield watch
        return
    from orchestrator.compiling.compile_ahead import named

    last: dict[str, str] = {}
    lock = threading.Lock()

    def tell(step: Step) -> None:
        with lock:
            words = _words(step)
            if last.get(named(step)) != words:
                last[named(step)] = words
                say(f"{named(step)}: {words}")

    yield tell


def _words(step: Step) -> str:
    of = f" graph {step.done + 1} of {step.total}" if step.phase == "compiling" and step.total else ""
    return WORDS.get(step.phase, step.phase) + of


@contextlib.contextmanager
def _bars() -> Iterator[Callable[[Step], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

    from orchestrator.compiling.compile_ahead import named

    tasks: dict[str, TaskID] = {}
    lock = threading.Lock()
    shown = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[words]}"))
    with Progress(*shown, TimeElapsedColumn(), console=Console(file=stderr())) as progress:

        def tell(step: Step) -> None:
            with lock:
                if (name := named(step)) not in tasks:
                    tasks[name] = progress.add_task(name, total=None, words="")
                ended = step.phase in ("done", "failed")
                total = 1 if ended else step.total or None
                done = 1 if ended else step.done
                progress.update(tasks[name], total=total, completed=done, words=_words(step))
                if ended:
                    progress.stop_task(tasks[name])

        yield tell


def _to_hub(repository: str, outcomes: Sequence[Outcome]) -> list[str]:
    from orchestrator.compiling.hub_push import push_to_hub

    folders = [Path(folder) for one in outcomes if one.result != "failed" for folder in one.folders if folder]
    if not folders:
        raise Failed("push-nowhere", f"there is nothing compiled to push to {repository}", "the table says why")
    places = push_to_hub(repository, dict.fromkeys(folders))
    say(f"{len(places)} compiled sets are in {repository}")
    return places


def _table(outcomes: Sequence[Outcome]) -> str:
    from orchestrator.compiling.compile_ahead import named

    rows = [
        (named(one), one.engine, one.result, f"{one.seconds:.0f} s" if one.seconds else None, key, sent)
        for one in outcomes
        for key in (", ".join(one.keys) or None,)
        for sent in (len(one.pushed) or None if one.unsent is None else "failed",)
    ]
    return columns(("MODELS", "ENGINE", "RESULT", "TIME", "COMPILED", "PUSHED"), rows)
