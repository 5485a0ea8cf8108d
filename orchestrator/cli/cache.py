"""The commands of `cache`: list, check, fetch and remove compiled artifacts and models, without a fleet."""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from orchestrator.access.audit_log import recorded_command
from orchestrator.cli.app import FAILED, FormatOption, SpecArgument, argument, group, option, switch
from orchestrator.cli.bars import Bar, bars_on
from orchestrator.cli.listing import Column, Table
from orchestrator.cli.output import Format, complain, fields_of, say, show, stderr
from orchestrator.cluster.settings import store_here
from orchestrator.messages.fleet_status import FetchProgress
from orchestrator.process.failure import Failed
from orchestrator.process.home import Home
from orchestrator.process.text_table import columns
from placements.spec.notation import unusable_path
from placements.spec.problems import has_errors
from workers.artifacts.fetch.progress import Progress, size_text
from workers.artifacts.sources.listing import SourceError
from workers.artifacts.store.store import Store
from workers.compiled import neuron_cache, preparation, pruning
from workers.compiled.graph_sync import cache_of
from workers.compiled.neuron_cache import CacheEntry, listed_entries, read_entries
from workers.compiled.prediction import Difference, Prediction
from workers.compiled.preparation import Warmed, verify
from workers.compiled.pruning import Kept, Removed, kept_in, prune_cache, prune_compiled
from workers.compiled.shared_sets import SharedSet, sets_in
from workers.compiled.storage import S3, storage_at
from workers.messages.status import Failure

if TYPE_CHECKING:  # modules that take 0.3 s, and that only `verify` and `warm` need
    from orchestrator.control.resolve.offline_configs import OfflineConfig
    from orchestrator.control.resolve.spec_file import SpecFile

cache = group("cache", "Manage compiled artifacts and fetched models.")

OLD_DAYS = 30.0
RETRY = "`corewright cache retry"
MAX_DIFFERENCES = 6  # of a model in the table; -o json has all
AT_ONCE = 4  # interpreters that run at the same time
PROGRESS_S = 5.0  # between two lines about a fetch
BARS_S = 0.25  # between two states of its bar

ModelOption = Annotated[
    list[str] | None, option("M", "Name of a model to include. Repeatable.", "--model", default="all models")
]
CacheOption = Annotated[
    str | None,
    option("PLACE", "NEFF cache: a folder or s3://BUCKET/PREFIX.", "--cache", default="the caches on this host"),
]
DryRunOption = Annotated[bool, switch("--dry-run", "Show what would be removed, and remove nothing.")]


@cache.command("ls")
def list_all(
    spec: Annotated[str | None, argument("SPEC", "Spec whose models' NEFF caches to list too.", default=False)] = None,
    place: CacheOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """List NEFF caches, compiled artifacts and fetched models, with their states."""
    home = Home.from_environment()
    caches = [CacheContents.read(location) for location in _places(home, spec, place)]
    models = [] if place else _store(home).artifacts()
    sources = {model.folder: model.source for model in models}
    compiled = [] if place else [_as_named(artifact, sources) for artifact in kept_in(home.compiled)]
    data = {
        "caches": [contents.as_dict() for contents in caches],
        "compiled": [
            fields_of(artifact, "name state bytes used_at")
            | fields_of(artifact.record, "source engine compiler flags tp_degree dtype shapes layout")
            | {"damaged": artifact.damaged}
            for artifact in compiled
        ],
        "models": [fields_of(model, "key source revision folder bytes fetched_at used_at") for model in models],
    }
    tables = [contents.text() for contents in caches]
    if not place:
        tables.append(f"Compiled artifacts in {home.compiled}\n" + (COMPILED.text(compiled) if compiled else "none"))
    if models:
        rows = [
            (item.key[:12], item.source, item.revision[:12] or None, size_text(item.bytes), age(item.used_at))
            for item in models
        ]
        tables.append("Fetched models\n" + columns(("KEY", "SOURCE", "REVISION", "SIZE", "USED"), rows))
    show(data, output, "\n\n".join(tables))


@cache.command("verify")
def verify_spec(
    spec: SpecArgument,
    model: ModelOption = None,
    read: Annotated[
        bool, switch("--read", "Read the weights if artifacts depend on them and their digest is unknown.")
    ] = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show which models would start without a compilation. Claims no cores; exits with 1 if any would compile."""
    configs = _configs(spec, model, heads=True)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        starts = [start for answers in pool.map(partial(_starts, read=read), configs) for start in answers]
    hit = all(start.hit for start in starts)
    details = [line for start in starts for line in _differences(start)]
    rows = [(start.label, start.outcome, start.where or None, start.reason) for start in starts]
    table = columns(("MODEL", "START", "WHERE", "WHY"), rows)
    show({"hit": hit, "models": starts}, output, "\n".join([table, *([""] if details else []), *details]))
    raise typer.Exit(0 if hit else FAILED)


@cache.command("warm")
def warm(spec: SpecArgument, model: ModelOption = None, output: FormatOption = Format.TABLE) -> None:
    """Fetch models and their compiled graphs to this host, from sources and NEFF caches. Compiles nothing."""
    home = Home.from_environment()
    home.prepare()
    store = _store(home)
    fetches: list[tuple[OfflineConfig, Warmed]] = []
    for offline in _configs(spec, model, heads=False):
        if isinstance(offline.config, Failure):
            fetches.append((offline, Warmed(problem=str(offline.config))))
            continue
        with _fetch_reports(offline.label) as new_progress:
            result = preparation.warm(offline.config, store, new_progress)
        fetched = size_text(result.bytes) if result.bytes or result.problem else "already on this host"
        say(f"{offline.label}: {fetched}" + (f"; {result.problem}" if result.problem else ""))
        fetches.append((offline, result))
    data = [fields_of(of, "model target") | fields_of(result, "bytes brought problem") for of, result in fetches]
    rows = [
        (of.label, size_text(result.bytes) if result.bytes else "", ", ".join(result.brought), result.problem)
        for of, result in fetches
    ]
    table = columns(("MODEL", "SIZE", "BROUGHT", "PROBLEM"), [[cell or None for cell in row] for row in rows])
    show({"models": data}, output, table)
    raise typer.Exit(FAILED if any(result.problem for _, result in fetches) else 0)


@cache.command("prune")
def prune(
    older_than: Annotated[
        float, option("DAYS", "Remove artifacts that were not used for this many days.", min=0)
    ] = OLD_DAYS,
    models: Annotated[
        bool, switch("--models", "Also remove fetched models that no replica uses, regardless of their age.")
    ] = False,
    place: CacheOption = None,
    dry_run: DryRunOption = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Remove unfinished, damaged and old artifacts from this host. Never removes anything from S3."""
    home, old_s = Home.from_environment(), older_than * 86400.0
    removed: list[Removed] = []
    arguments = {"older_than": older_than, "models": models, "cache": place}
    with _audited(home, "cache prune", arguments, dry_run):
        for location in _places(home, None, place):
            if location.startswith(S3):
                hint = "use a lifecycle rule of the bucket"
                raise Failed("cache-elsewhere", f"{location} is in S3, which `prune` does not change", hint)
            removed += prune_cache(Path(location), old_s, dry_run)
        if not place:
            removed += prune_compiled(home.compiled, old_s, dry_run)
        artifacts = _store(home).prune(dry_run=dry_run) if models else []
    removed += [Removed(path=model.folder, why="no replica uses it", bytes=model.bytes) for model in artifacts]
    _show_removed(removed, dry_run, output)


@cache.command("retry")
def retry(
    graphs: Annotated[
        list[str] | None, argument("MODULE", "Graphs, as shown by `cache ls`.", default="all failed graphs")
    ] = None,
    place: CacheOption = None,
    dry_run: DryRunOption = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Remove failed compilations from the cache, so that the next start retries them."""
    home = Home.from_environment()
    removed: list[Removed] = []
    with _audited(home, "cache retry", {"graphs": graphs or [], "cache": place}, dry_run):
        for location in _places(home, None, place):
            removed += pruning.retry(location, graphs or (), dry_run)
    _show_removed(removed, dry_run, output)


@contextlib.contextmanager
def _fetch_reports(label: str) -> Iterator[Callable[[str], Progress]]:
    """Report the progress of the newest fetch, by a bar or a line every ``PROGRESS_S``. Yields the factory of
    progress objects."""
    fetches, ended = list[Progress](), threading.Event()

    def new_progress(source: str) -> Progress:
        fetches.append(Progress(source))
        return fetches[-1]

    def report() -> None:
        while not ended.wait(PROGRESS_S if bars is None else BARS_S):
            if fetches and (status := fetches[-1].status()).phase not in ("done", "failed"):
                progress = FetchProgress.of(status)
                if bars is None:
                    say(f"{label}: {progress.text}")
                else:
                    text = f"{status.phase} {progress.numbers(left=False)}"
                    bars.show([Bar(label, text, status.done, status.total or None, status.left_s)])

    with bars_on(stderr()) as bars:
        reporter = threading.Thread(target=report, name="warm", daemon=True)
        reporter.start()
        try:
            yield new_progress
        finally:
            ended.set()
            reporter.join()


# Reading


def _store(home: Home) -> Store:
    return store_here(home.store).open()


def _places(home: Home, spec: str | None, place: str | None) -> list[str]:
    """Returns the NEFF cache of ``--cache``; else the existing ones of this host, and those that the spec names.

    Raises Failed if the folder of ``--cache`` does not exist."""
    if place:
        if not place.startswith(S3) and (unusable_path(place) or not Path(place).is_dir()):
            hint = "--cache takes a folder, or s3://BUCKET/PREFIX"
            raise Failed("neff-cache-unreadable", f"{place} is not a folder", hint)
        return [place]
    folders = [neuron_cache.location(os.environ), *sorted((home.path / "neff").glob("*"))]
    places = [str(path) for path in folders if path is not None and path.is_dir()]
    if spec is not None:
        file = _loaded(spec)
        assert file.spec is not None
        places += [location for model in file.spec.models if (location := model.neff_cache_location)]
    return list(dict.fromkeys(places))


def _loaded(spec: str) -> SpecFile:
    """Loads a spec and prints its problems. Exits if one is an error."""
    from orchestrator.control.resolve.spec_file import load

    file = load(spec, folders="plan")
    complain(file.problems)
    if file.spec is None or has_errors(file.problems):
        raise typer.Exit(FAILED)
    return file


def _configs(spec: str, models: Sequence[str] | None, *, heads: bool) -> Iterator[OfflineConfig]:
    from orchestrator.control.resolve.offline_configs import configs

    yield from configs(_loaded(spec), Home.from_environment(), models or (), heads=heads)


def _audited(
    home: Home, action: str, arguments: dict[str, Any], dry_run: bool
) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if dry_run else recorded_command(home, action, arguments)


def _show_removed(removed: Sequence[Removed], dry_run: bool, output: Format) -> None:
    size, done = sum(item.bytes for item in removed), "would be removed" if dry_run else "removed"
    table = "nothing to do"
    if removed:
        table = columns(("PATH", "SIZE", "WHY"), [(item.path, size_text(item.bytes), item.why) for item in removed])
        table += f"\n{len(removed)} {done}, {size_text(size)}"
    show({"dry_run": dry_run, "bytes": size, "removed": removed}, output, table)


class StartAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How one start of a model would get its graphs: an entry of `cache verify -o json`."""

    model: str
    target: str
    engine: str | None = None
    role: str = "model"
    source: str
    outcome: str = "fail"
    hit: bool = False
    where: str = ""
    place: str = ""
    reason: str
    why: tuple[Difference, ...] = ()
    missing: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The model, with its target and its role if it has several."""
        role = "" if self.role == "model" else f" ({self.role})"
        return self.model + (f" for {self.target}" if self.target else "") + role


GRAPHS: Table[CacheEntry] = Table(
    lambda entry: entry.name,
    (
        Column("COMPILER", lambda entry: entry.compiler),
        Column("MODULE", lambda entry: entry.module),
        Column("STATE", lambda entry: entry.state.value),
        Column("SIZE", lambda entry: size_text(entry.bytes)),
        Column("AGE", lambda entry: age(entry.changed_at)),
        Column("FLAGS", lambda entry: " ".join(entry.flags or ()) or None),
        Column("LAST WORDS", lambda entry: entry.words or None),
    ),
)
PUSHED: Table[SharedSet] = Table(
    lambda pushed: pushed.name,
    (
        Column("SET", lambda pushed: pushed.name),
        Column("ENGINE", lambda pushed: pushed.record and pushed.record.engine),
        Column("SOURCE", lambda pushed: (pushed.record and pushed.record.source) or None),
        Column("STATE", lambda pushed: pushed.state),
        Column("SIZE", lambda pushed: size_text(pushed.bytes)),
        Column("AGE", lambda pushed: pushed.record and age(pushed.record.made_at)),
    ),
)
COMPILED: Table[Kept] = Table(
    lambda kept: kept.name,
    (
        Column("NAME", lambda kept: kept.name),
        Column("ENGINE", lambda kept: kept.record and kept.record.engine),
        Column("SOURCE", lambda kept: (kept.record and kept.record.source) or None),
        Column("COMPILER", lambda kept: (kept.record and kept.record.compiler) or None),
        Column("TP", lambda kept: kept.record and kept.record.tp_degree),
        Column("DTYPE", lambda kept: kept.record and kept.record.dtype),
        Column("STATE", lambda kept: kept.state),
        Column("SIZE", lambda kept: size_text(kept.bytes)),
        Column("USED", lambda kept: age(kept.used_at)),
    ),
)


@dataclass(frozen=True)
class CacheContents:
    """The contents of the NEFF cache at ``place``."""

    place: str
    entries: Sequence[CacheEntry]  # graphs
    pushed: Sequence[SharedSet]

    @classmethod
    def read(cls, place: str) -> CacheContents:
        """Raises Failed if the cache cannot be read."""
        try:
            is_remote = place.startswith(S3)
            entries = listed_entries(storage_at(place).files()) if is_remote else read_entries(Path(place))
            return cls(place, entries, sets_in(place))
        except SourceError as error:
            raise Failed.of(error) from error

    def as_dict(self) -> dict[str, Any]:
        entries = [
            {
                **fields_of(entry, "name compiler key flags_key"),
                "state": entry.state.value,
                "bytes": entry.bytes,
                "changed_at": entry.changed_at or None,
                **fields_of(entry, "flags words"),
            }
            for entry in self.entries
        ]
        pushed = [
            fields_of(each, "name state bytes") | fields_of(each.record, "made_at source engine compiler")
            for each in self.pushed
        ]
        return {"place": self.place, "entries": entries, "pushed": pushed}

    def text(self) -> str:
        tables = [GRAPHS.text(self.entries)] if self.entries else []
        tables += [PUSHED.text(self.pushed)] if self.pushed else []
        return f"NEFF cache {self.place}\n" + ("\n".join(tables) or "empty")


def _starts(offline: OfflineConfig, read: bool) -> list[StartAnswer]:
    """Returns the answer for each start of a model; a failure is a start that fails before anything is compiled."""
    config = offline.config
    answer = config if isinstance(config, Failure) else verify(config, read=read)
    of = fields_of(offline, "model target")
    if isinstance(config, Failure) or isinstance(answer, Failure):
        return [StartAnswer(**of, source=offline.source, reason=str(answer))]
    return [
        StartAnswer(
            **of,
            engine=config.model.engine,
            role=wanted.role,
            source=offline.draft_source if wanted.role == "draft" else offline.source,
            where=wanted.prediction.where if wanted.prediction.where != "nothing" else "",
            reason=_reason(offline, wanted.prediction),
            **fields_of(wanted.prediction, "outcome hit place why missing failed"),
        )
        for wanted in answer
    ]


def _reason(offline: OfflineConfig, prediction: Prediction) -> str:
    """Returns the reason. Its `cache retry` gets `--cache` for a cache that `retry` does not search by default."""
    config = offline.config
    if not prediction.failed or isinstance(config, Failure) or not Path(prediction.place).is_dir():
        return prediction.reason
    _, localized = cache_of({**os.environ, **config.place.env}, Path(config.run.compiled or ""))
    if localized is not None or Path(prediction.place) == neuron_cache.location(os.environ):
        return prediction.reason
    return prediction.reason.replace(RETRY, f"{RETRY} --cache {shlex.quote(prediction.place)}")


def _differences(start: StartAnswer) -> list[str]:
    """Returns the first lines of what differs, is missing or has failed."""
    lines = [str(why) for why in start.why]
    lines += [f"missing or damaged: {name}" for name in start.missing]
    lines += [f"failed: {name}" for name in start.failed]
    more = [f"and {len(lines) - MAX_DIFFERENCES} more"] if len(lines) > MAX_DIFFERENCES else []
    return [f"{start.label}: {line}" for line in (*lines[:MAX_DIFFERENCES], *more)]


def _as_named(artifact: Kept, sources: Mapping[str, str]) -> Kept:
    """Returns the artifact with its model's source as the spec names it, not the folder that it was fetched to."""
    if artifact.record is None or artifact.record.source not in sources:
        return artifact
    record = msgspec.structs.replace(artifact.record, source=sources[artifact.record.source])
    return msgspec.structs.replace(artifact, record=record)


def age(at: float) -> str | None:
    """Returns the age of a time in its largest unit; None for an unknown time, 0."""
    if not at:
        return None
    age_s = max(0.0, time.time() - at)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= size:
            return f"{age_s / size:.0f} {unit}"
    return f"{age_s:.0f} s"
