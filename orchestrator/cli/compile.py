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
from orchestrator.columns import columns
from orchestrator.failure import Failed

if TYPE_CHECKING:
    from orchestrator.compileahead import Outcome, Step
    from orchestrator.specfile import SpecFile

GIB = 2**30
WORDS = {"predicting": "looking what is compiled", "queued": "waits for memory", "waiting": "waits for another"}


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
    from orchestrator.specfile import load
    from placements.problems import has_errors

    file = load(spec)
    if file.spec is None or has_errors(file.problems):
        complain(file.problems)
        say(f"{file.name} has errors: nothing was compiled")
        raise typer.Exit(FAILED)
    _check_names(file, model or [], push)
    outcomes = _compile(file, model or [], jobs, _memory_gib(memory_gb), push)
    failed = [one for one in outcomes if one.result == "failed"]
    for one in failed:
        assert one.failure is not None
        complain([Failed(one.failure.id, f"{', '.join(one.models)}: {one.failure.what}", one.failure.hint).problem])
    places: list[str] = []
    if push_to_hub is not None:
        places = _to_hub(push_to_hub, outcomes)
    data = {"models": [one.as_dict() for one in outcomes], "hub": places}
    show(data, output, _table(outcomes))
    raise typer.Exit(FAILED if failed else 0)


def _check_names(file: SpecFile, names: Sequence[str], push: bool) -> None:
    """Raises Failed for a model that there is not, and for one that has no cache to push to."""
    assert file.spec is not None
    known = {one.name: one for one in file.spec.models}
    for name in names:
        if name not in known:
            raise Failed("model-unknown", f"{file.name} has no model {name}", f"it has {', '.join(known)}")
    without = [one.name for one in known.values() if one.neff_cache is None and (not names or one.name in names)]
    if push and len(without) == len(names or known):
        what = f"--push needs a place, and {', '.join(without)} has no neff_cache"
        raise Failed("push-nowhere", what, "neff_cache: s3://BUCKET/PREFIX, or a folder that all hosts have")


def _memory_gib(given: float | None) -> float:
    if given is not None:
        return given
    import psutil

    return float(psutil.virtual_memory().available) / GIB


def _compile(file: SpecFile, names: Sequence[str], jobs: int, memory_gib: float, push: bool) -> list[Outcome]:
    from orchestrator.compileahead import CompileAhead
    from orchestrator.home import Home
    from orchestrator.settings import store_here

    home = Home.from_environment()
    home.prepare()
    with _view() as watch:
        flow = CompileAhead(file, home, store_here(home.store), watch, names=names, push=push)
        prepared = flow.prepare()
        for job in prepared.jobs:
            if job.need_gib > memory_gib and not job.complete:
                need = f"needs some {job.need_gib:.0f} GiB of host memory, and there are {memory_gib:.0f}"
                say(f"{', '.join(job.models)}: {need}: it is compiled alone")
        running = flow.run(prepared.jobs, memory_gib=memory_gib, most=jobs)
        with contextlib.closing(running):
            return [*prepared.outcomes, *running]


@contextlib.contextmanager
def _view() -> Iterator[Callable[[Step], None]]:
    """Progress: bars on a terminal, else a line for each change that a person would want to read."""
    if stderr().isatty():
        with _bars() as watch:
            yield watch
        return
    last: dict[tuple[str, ...], str] = {}
    lock = threading.Lock()

    def tell(step: Step) -> None:
        with lock:
            words = _words(step)
            if last.get(step.models) != words:
                last[step.models] = words
                say(f"{', '.join(step.models)}: {words}")

    yield tell


def _words(step: Step) -> str:
    of = f" graph {step.done + 1} of {step.total}" if step.phase == "compiling" and step.total else ""
    return WORDS.get(step.phase, step.phase) + of


@contextlib.contextmanager
def _bars() -> Iterator[Callable[[Step], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

    tasks: dict[tuple[str, ...], TaskID] = {}
    lock = threading.Lock()
    shown = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[words]}"))
    with Progress(*shown, TimeElapsedColumn(), console=Console(file=stderr())) as progress:

        def tell(step: Step) -> None:
            with lock:
                if step.models not in tasks:
                    tasks[step.models] = progress.add_task(", ".join(step.models), total=None, words="")
                ended = step.phase in ("done", "failed")
                total = 1 if ended else step.total or None
                done = 1 if ended else step.done
                progress.update(tasks[step.models], total=total, completed=done, words=_words(step))
                if ended:
                    progress.stop_task(tasks[step.models])

        yield tell


def _to_hub(repository: str, outcomes: Sequence[Outcome]) -> list[str]:
    from orchestrator.hubpush import push_to_hub

    folders = [Path(folder) for one in outcomes if one.result != "failed" for folder in one.folders if folder]
    if not folders:
        raise Failed("push-nowhere", "there is nothing compiled to push", "see the table above")
    places = push_to_hub(repository, dict.fromkeys(folders))
    say(f"{len(places)} compiled sets are in {repository}")
    return places


def _table(outcomes: Sequence[Outcome]) -> str:
    rows = [
        (", ".join(one.models), one.engine, one.result, f"{one.seconds:.0f} s" if one.seconds else None, key, sent)
        for one in outcomes
        for key in (", ".join(one.keys) or None,)
        for sent in (len(one.pushed) or None,)
    ]
    return columns(("MODELS", "ENGINE", "RESULT", "TIME", "COMPILED", "PUSHED"), rows)
