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
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from orchestrator.access.audit_log import recorded_command
from orchestrator.cli.app import FAILED, FormatOption, SpecArgument, group
from orchestrator.cli.bars import Bar, Bars
from orchestrator.cli.output import Format, can_redraw, complain, fields_of, say, show, stderr
from orchestrator.daemon.settings import store_here
from orchestrator.fleet.fleet_status import FetchProgress
from orchestrator.fleet.progress_text import fetch_numbers, fetch_text, size_text
from orchestrator.process.failure import Failed
from orchestrator.process.home import Home
from orchestrator.process.text_table import columns
from placements.spec.notation import unusable_path
from placements.spec.problems import has_errors
from workers.artifacts.fetch.progress import Progress
from workers.artifacts.sources.listing import RemoteFile, SourceError
from workers.artifacts.store.store import Store
from workers.compiling.start_forecast import Verdict, verify
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure
from workers.neff_cache import compiler_cache, pruning
from workers.neff_cache.candidates import keep_of
from workers.neff_cache.compiled_artifacts import MANIFEST
from workers.neff_cache.entries import CacheEntry, listed_entries, read_entries
from workers.neff_cache.predict import Difference, Prediction
from workers.neff_cache.pruning import Kept, Removed, kept_in, prune_cache, prune_compiled
from workers.neff_cache.record import LOCK_FILE, decoded
from workers.neff_cache.shared_artifacts import FOLDER, missing
from workers.neff_cache.sync import S3, localized, place_at

if TYPE_CHECKING:  # modules that take 0.3 s, and that only `verify` and `warm` need
    from orchestrator.revisions.spec_file import SpecFile
    from orchestrator.starts.offline_configs import OfflineConfig

cache = group("cache", "Manage compiled artifacts and fetched models.")

OLD_DAYS = 30.0
AT_ONCE = 4  # interpreters that run at the same time
PROGRESS_S = 5.0  # between two lines about a fetch
BARS_S = 0.25  # between two states of its bar

ModelOption = Annotated[
    list[str] | None,
    typer.Option("--model", metavar="M", help="Name of a model to include. Repeatable.", show_default="all models"),
]
CacheOption = Annotated[
    str | None,
    typer.Option(
        "--cache",
        metavar="PLACE",
        help="NEFF cache: a folder or s3://BUCKET/PREFIX.",
        show_default="the caches on this host",
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")]


@cache.command("ls")
def list_all(
    spec: Annotated[
        str | None,
        typer.Argument(metavar="SPEC", help="Spec whose models' NEFF caches to list too.", show_default=False),
    ] = None,
    place: CacheOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """List NEFF caches, compiled artifacts and fetched models, with their states."""
    home = Home.from_environment()
    caches = [CacheContents.read(location) for location in _places(home, spec, place)]
    compiled = [] if place else kept_in(home.compiled)
    models = [] if place else _store(home).artifacts()
    sources = {model.folder: model.source for model in models}
    data = {
        "caches": [contents.as_dict() for contents in caches],
        "compiled": [compiled_dict(artifact, sources) for artifact in compiled],
        "models": [fields_of(model, MODEL) for model in models],
    }
    tables = [contents.table() for contents in caches]
    tables.append(compiled_table(home.compiled, compiled, sources) if not place else "")
    rows = [
        (model.key[:12], model.source, model.revision[:12] or None, size_text(model.bytes), age(model.used_at))
        for model in models
    ]
    if rows:
        tables.append("Fetched models\n" + columns(("KEY", "SOURCE", "REVISION", "SIZE", "USED"), rows))
    show(data, output, "\n\n".join(table for table in tables if table))


@cache.command("verify")
def verify_spec(
    spec: SpecArgument,
    model: ModelOption = None,
    read: Annotated[
        bool, typer.Option("--read", help="Read the weights if artifacts depend on them and their digest is unknown.")
    ] = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show which models would start without a compilation. Claims no cores; exits with 1 if any would compile."""
    configs = list(_configs(spec, model, heads=True))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda offline: _verdicts(offline.config, read), configs))
    data: list[dict[str, Any]] = []
    rows: list[tuple[object, ...]] = []
    details: list[str] = []
    for offline, answer in zip(configs, answers, strict=True):
        verdicts = verdict_dicts(offline, answer)
        data += verdicts
        for verdict in verdicts:
            label = offline.label if verdict["role"] == "model" else f"{offline.label} ({verdict['role']})"
            rows.append((label, verdict["outcome"], verdict["where"] or None, verdict["reason"]))
            details += differences(label, verdict)
    hit = all(verdict["hit"] for verdict in data)
    table = columns(("MODEL", "START", "WHERE", "WHY"), rows)
    show({"hit": hit, "models": data}, output, "\n".join([table, *([""] if details else []), *details]))
    raise typer.Exit(0 if hit else FAILED)


@cache.command("warm")
def warm(spec: SpecArgument, model: ModelOption = None, output: FormatOption = Format.TABLE) -> None:
    """Fetch models and their compiled graphs to this host, from sources and NEFF caches. Compiles nothing."""
    from workers.compiling.warming import warm as fetch

    home = Home.from_environment()
    home.prepare()
    store, data, failed = _store(home), list[dict[str, Any]](), False
    labels = []
    for offline in _configs(spec, model, heads=False):
        labels.append(offline.label)
        about = {"model": offline.model, "target": offline.target}
        if isinstance(offline.config, Failure):
            data.append({**about, "bytes": 0, "brought": [], "problem": str(offline.config)})
            failed = True
            continue
        with _fetch_reports(offline.label) as new_progress:
            result = fetch(offline.config, store, threading.Event(), new_progress)
        fetched = size_text(result.bytes) if result.bytes or result.problem else "already on this host"
        say(f"{offline.label}: {fetched}" + (f"; {result.problem}" if result.problem else ""))
        data.append({**about, "bytes": result.bytes, "brought": list(result.brought), "problem": result.problem})
        failed = failed or bool(result.problem)
    rows = []
    for label, row in zip(labels, data, strict=True):
        size = size_text(row["bytes"]) if row["bytes"] else None
        rows.append((label, size, ", ".join(row["brought"]) or None, row["problem"] or None))
    show({"models": data}, output, columns(("MODEL", "SIZE", "BROUGHT", "PROBLEM"), rows))
    raise typer.Exit(FAILED if failed else 0)


@cache.command("prune")
def prune(
    older_than: Annotated[
        float, typer.Option(min=0, metavar="DAYS", help="Remove artifacts that were not used for this many days.")
    ] = OLD_DAYS,
    models: Annotated[
        bool, typer.Option("--models", help="Also remove fetched models that no replica uses, regardless of their age.")
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
        list[str] | None,
        typer.Argument(metavar="MODULE", help="Graphs, as shown by `cache ls`.", show_default="all failed graphs"),
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
            if location.startswith(S3):
                removed += pruning.retry_in_bucket(location, graphs or (), dry_run)
            else:
                removed += pruning.retry(Path(location), graphs or (), dry_run)
    _show_removed(removed, dry_run, output)


@contextlib.contextmanager
def _fetch_reports(label: str) -> Iterator[Callable[[str], Progress]]:
    """Report the progress of the newest fetch, by a bar or a line every ``PROGRESS_S``. Yields the factory of
    progress objects."""
    fetches, ended = list[Progress](), threading.Event()
    bars = Bars(stderr()) if can_redraw(stderr()) else None

    def new_progress(source: str) -> Progress:
        fetches.append(Progress(source))
        return fetches[-1]

    def report() -> None:
        while not ended.wait(PROGRESS_S if bars is None else BARS_S):
            if fetches and (status := fetches[-1].status()).phase not in ("done", "failed"):
                progress = FetchProgress.of(status)
                if bars is None:
                    say(f"{label}: {fetch_text(progress)}")
                else:
                    text = f"{status.phase} {fetch_numbers(progress, left=False)}"
                    bars.show([Bar(label, text, status.done, status.total or None, status.left_s)])

    reporter = threading.Thread(target=report, name="warm", daemon=True)
    reporter.start()
    try:
        yield new_progress
    finally:
        ended.set()
        reporter.join()
        if bars is not None:
            bars.close()


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
    folders = [compiler_cache.location(os.environ), *sorted((home.path / "neff").glob("*"))]
    places = [str(path) for path in folders if path is not None and path.is_dir()]
    if spec is not None:
        file = _loaded(spec)
        assert file.spec is not None
        places += [location for model in file.spec.models if (location := model.neff_cache_location)]
    return list(dict.fromkeys(places))


def _loaded(spec: str) -> SpecFile:
    """Loads a spec and prints its problems. Exits if one is an error."""
    from orchestrator.revisions.spec_file import load

    file = load(spec, folders="plan")
    complain(file.problems)
    if file.spec is None or has_errors(file.problems):
        raise typer.Exit(FAILED)
    return file


def _configs(spec: str, models: Sequence[str] | None, *, heads: bool) -> Iterator[OfflineConfig]:
    from orchestrator.starts.offline_configs import configs

    yield from configs(_loaded(spec), Home.from_environment(), models or (), heads=heads)


def _verdicts(config: ReplicaConfig | Failure, read: bool) -> list[Verdict] | Failure:
    return config if isinstance(config, Failure) else verify(config, read=read)


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
    data = [fields_of(item, "path why bytes") for item in removed]
    show({"dry_run": dry_run, "bytes": size, "removed": data}, output, table)


if TYPE_CHECKING:
    from orchestrator.starts.offline_configs import OfflineConfig

RETRY = "`corewright cache retry"
SHOWN = 6  # differences of a model in the table; -o json has all
MODEL = "key source revision folder bytes fetched_at used_at"


@dataclass(frozen=True)
class CacheContents:
    """The contents of the NEFF cache at ``place``."""

    place: str
    entries: Sequence[CacheEntry]  # graphs
    pushed: Sequence[dict[str, Any]]  # sets of `compile --push`

    @classmethod
    def read(cls, place: str) -> CacheContents:
        """Raises Failed if the cache cannot be read."""
        try:
            if place.startswith(S3):
                remote = place_at(place)
                files = remote.files()
                sets = [_below(file, FOLDER) for file in files if file.name.startswith(f"{FOLDER}/")]
                pushed = _pushed_sets(sets, lambda name: remote.read(f"{FOLDER}/{name}"))
                return cls(place, listed_entries(files), pushed)
            folder = Path(place) / FOLDER
            below = place_at(str(folder))
            pushed = _pushed_sets(below.files(), below.read) if folder.is_dir() else []
            return cls(place, read_entries(Path(place)), pushed)
        except SourceError as error:
            raise Failed(error.id, error.what, error.hint) from error

    def as_dict(self) -> dict[str, Any]:
        entries = [
            {
                **fields_of(entry, "name compiler key flags_key"),
                "state": entry.state.value,
                "bytes": entry.bytes,
                "changed_at": entry.changed_at or None,
                "flags": None if entry.flags is None else list(entry.flags),
                "words": entry.words,
            }
            for entry in self.entries
        ]
        return {"place": self.place, "entries": entries, "pushed": list(self.pushed)}

    def table(self) -> str:
        rows = [
            (
                entry.compiler,
                entry.module,
                entry.state.value,
                size_text(entry.bytes),
                age(entry.changed_at),
                " ".join(entry.flags or ()) or None,
                entry.words or None,
            )
            for entry in self.entries
        ]
        sets = [
            (
                *(row["name"], row["engine"], row["source"] or None, row["state"]),
                size_text(row["bytes"]),
                age(row["made_at"] or 0),
            )
            for row in self.pushed
        ]
        header = ("COMPILER", "MODULE", "STATE", "SIZE", "AGE", "FLAGS", "LAST WORDS")
        tables = [columns(header, rows)] if rows else []
        tables += [columns(("SET", "ENGINE", "SOURCE", "STATE", "SIZE", "AGE"), sets)] if sets else []
        return f"NEFF cache {self.place}\n" + ("\n".join(tables) or "empty")


def _pushed_sets(files: Sequence[RemoteFile], read: Callable[[str], bytes]) -> list[dict[str, Any]]:
    """Groups ``files`` into sets by the first part of their names. Raises SourceError."""
    sets: dict[str, list[RemoteFile]] = {}
    for file in files:
        name, slash, _ = file.name.partition("/")
        if slash:
            sets.setdefault(name, []).append(_below(file, name))
    rows = []
    for name, parts in sorted(sets.items()):
        names = {part.name for part in parts}
        record = decoded(read(f"{name}/{LOCK_FILE}")) if {MANIFEST, LOCK_FILE} <= names else None
        rows.append(
            {
                "name": name,
                "state": "unfinished" if record is None else "damaged" if missing(parts, record) else "whole",
                "bytes": sum(part.size for part in parts),
                **fields_of(record, "made_at source engine compiler"),
            }
        )
    return rows


def _below(file: RemoteFile, folder: str) -> RemoteFile:
    return msgspec.structs.replace(file, name=file.name[len(folder) + 1 :])


def verdict_dicts(offline: OfflineConfig, answer: list[Verdict] | Failure) -> list[dict[str, Any]]:
    """Returns the entry of each start of a model; a failure is a start that fails before anything is compiled."""
    about = fields_of(offline, "model target")
    if isinstance(answer, list):
        return [about | _verdict_dict(offline, verdict) for verdict in answer]
    entry = about | {"engine": None, "role": "model", "source": offline.source, "outcome": "fail", "hit": False}
    return [entry | {"where": "", "place": "", "reason": str(answer), "why": [], "missing": [], "failed": []}]


def _verdict_dict(offline: OfflineConfig, verdict: Verdict) -> dict[str, Any]:
    prediction = verdict.prediction
    return {
        "engine": getattr(offline.config, "engine", None),
        "role": verdict.role,
        "source": offline.draft_source if verdict.role == "draft" else offline.source,
        **fields_of(prediction, "outcome hit"),
        "where": prediction.where if prediction.where != "nothing" else "",
        "place": prediction.place,
        "reason": _reason(offline, prediction),
        "why": [fields_of(why, "field wanted found") for why in prediction.why],
        "missing": list(prediction.missing),
        "failed": list(prediction.failed),
    }


def _reason(offline: OfflineConfig, prediction: Prediction) -> str:
    """Returns the reason. Its `cache retry` gets `--cache` for a cache that `retry` does not search by default."""
    config = offline.config
    if not prediction.failed or isinstance(config, Failure) or not Path(prediction.place).is_dir():
        return prediction.reason
    is_local = localized({**os.environ, **config.env}, keep_of(Path(config.compiled or ""))) is not None
    if is_local or Path(prediction.place) == compiler_cache.location(os.environ):
        return prediction.reason
    return prediction.reason.replace(RETRY, f"{RETRY} --cache {shlex.quote(prediction.place)}")


def differences(label: str, verdict: dict[str, Any]) -> list[str]:
    """Returns the first lines of what differs, is missing or has failed."""
    lines = [str(Difference(**why)) for why in verdict["why"]]
    lines += [f"missing or damaged: {name}" for name in verdict["missing"]]
    lines += [f"failed: {name}" for name in verdict["failed"]]
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return [f"{label}: {line}" for line in (*lines[:SHOWN], *more)]


def _source(artifact: Kept, sources: Mapping[str, str]) -> str | None:
    """Returns the model's source as the spec names it, not the folder that it was fetched to."""
    return None if artifact.record is None else sources.get(artifact.record.source, artifact.record.source)


def compiled_dict(artifact: Kept, sources: Mapping[str, str]) -> dict[str, Any]:
    return {
        **fields_of(artifact, "name state bytes used_at"),
        "source": _source(artifact, sources),
        **fields_of(artifact.record, "engine compiler flags tp_degree dtype shapes layout"),
        "damaged": list(artifact.damaged),
    }


def compiled_table(folder: Path, artifacts: Sequence[Kept], sources: Mapping[str, str]) -> str:
    header = ("NAME", "ENGINE", "SOURCE", "COMPILER", "TP", "DTYPE", "STATE", "SIZE", "USED")
    rows = []
    for artifact in artifacts:
        engine, compiler, tp_degree, dtype = fields_of(artifact.record, "engine compiler tp_degree dtype").values()
        made = (artifact.name, engine, _source(artifact, sources) or None, compiler or None, tp_degree, dtype)
        rows.append((*made, artifact.state, size_text(artifact.bytes), age(artifact.used_at)))
    return f"Compiled artifacts in {folder}\n" + (columns(header, rows) if rows else "none")


def age(at: float) -> str | None:
    """Returns the age of a time in its largest unit; None for an unknown time, 0."""
    if not at:
        return None
    age_s = max(0.0, time.time() - at)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= size:
            return f"{age_s / size:.0f} {unit}"
    return f"{age_s:.0f} s"
