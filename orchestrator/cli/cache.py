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

import typer

from orchestrator.cli.app import FAILED, FormatOption, SpecArgument, group
from orchestrator.cli.output import Format, complain, say, show
from orchestrator.fleet.progress_text import fetch_text, size_text
from orchestrator.process.failure import Failed
from orchestrator.process.text_table import columns

if TYPE_CHECKING:
    from orchestrator.process.home import Home
    from orchestrator.revisions.spec_file import SpecFile
    from orchestrator.starts.offline_configs import OfflineConfig
    from workers.artifacts.fetch.progress import Progress
    from workers.artifacts.sources.listing import RemoteFile
    from workers.artifacts.store.store import Store
    from workers.compiling.start_forecast import Verdict
    from workers.messages.replica_config import ReplicaConfig
    from workers.messages.status import Failure
    from workers.neff_cache.entries import CacheEntry
    from workers.neff_cache.predict import Prediction
    from workers.neff_cache.pruning import Kept, Removed

cache = group("cache", "Manage compiled artifacts and fetched models.")

OLD_DAYS = 30.0
AT_ONCE = 4  # interpreters that run at the same time
S3 = "s3://"
RETRY = "`corewright cache retry"
PROGRESS_S = 5.0  # between two lines about a fetch
SHOWN = 6  # differences of a model in the table; -o json has all

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
    from workers.neff_cache.pruning import kept_in

    home = _home()
    caches = {location: _read(location) for location in ([_checked(place)] if place else _places(home, spec))}
    compiled = [] if place else kept_in(home.compiled)
    models = [] if place else _store(home).artifacts()
    sources = {model.folder: model.source for model in models}
    data = {
        "caches": [
            {
                "place": location,
                "entries": [_entry_dict(entry) for entry in contents.entries],
                "pushed": list(contents.pushed),
            }
            for location, contents in caches.items()
        ],
        "compiled": [_compiled_dict(artifact, sources) for artifact in compiled],
        "models": [
            {
                "key": model.key,
                "source": model.source,
                "revision": model.revision,
                "folder": model.folder,
                "bytes": model.bytes,
                "fetched_at": model.fetched_at,
                "used_at": model.used_at,
            }
            for model in models
        ],
    }
    tables = [_cache_table(location, contents) for location, contents in caches.items()]
    tables.append(_compiled_table(home, compiled, sources) if not place else "")
    rows = [
        (model.key[:12], model.source, model.revision[:12] or None, size_text(model.bytes), _age(model.used_at))
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
        if isinstance(answer, list):
            verdicts = [_verdict_dict(offline, verdict) for verdict in answer]
        else:
            verdicts = [_failure_dict(offline, answer)]
        data += verdicts
        for verdict in verdicts:
            label = offline.label if verdict["role"] == "model" else f"{offline.label} ({verdict['role']})"
            rows.append((label, verdict["outcome"], verdict["where"] or None, verdict["reason"]))
            details += _details(label, verdict)
    hit = all(verdict["hit"] for verdict in data)
    table = columns(("MODEL", "START", "WHERE", "WHY"), rows)
    show({"hit": hit, "models": data}, output, "\n".join([table, *([""] if details else []), *details]))
    raise typer.Exit(0 if hit else FAILED)


@cache.command("warm")
def warm(spec: SpecArgument, model: ModelOption = None, output: FormatOption = Format.TABLE) -> None:
    """Fetch models and their compiled graphs to this host, from sources and NEFF caches. Compiles nothing."""
    from workers.compiling.warming import warm as fetch
    from workers.messages.status import Failure

    home = _home()
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
        bool, typer.Option("--models", help="Remove fetched models that no replica uses too, whatever their age.")
    ] = False,
    place: CacheOption = None,
    dry_run: DryRunOption = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Remove unfinished, damaged and old artifacts from this host. Never removes anything from S3."""
    from workers.neff_cache.pruning import prune_cache, prune_compiled

    home, old_s = _home(), older_than * 86400.0
    removed: list[Removed] = []
    arguments = {"older_than": older_than, "models": models, "cache": place}
    with _audited(home, "cache prune", arguments, dry_run):
        for location in [_checked(place)] if place else _places(home, None):
            if location.startswith(S3):
                hint = "use a lifecycle rule of the bucket"
                raise Failed("cache-elsewhere", f"{location} is in S3, which `prune` does not change", hint)
            removed += prune_cache(Path(location), old_s, dry_run)
        if not place:
            removed += prune_compiled(home.compiled, old_s, dry_run)
        artifacts = _store(home).prune(dry_run=dry_run) if models else []
    data = [{"path": item.path, "why": item.why, "bytes": item.bytes} for item in removed]
    data += [{"path": model.folder, "why": "no replica uses it", "bytes": model.bytes} for model in artifacts]
    _show_removed(data, dry_run, output)


@cache.command("retry")
def retry(
    graphs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODULE]...", help="Graphs, as shown by `cache ls`.", show_default="all failed graphs"),
    ] = None,
    place: CacheOption = None,
    dry_run: DryRunOption = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Remove failed compilations from the cache, so that the next start retries them."""
    from workers.neff_cache import pruning

    home = _home()
    removed: list[Removed] = []
    with _audited(home, "cache retry", {"graphs": graphs or [], "cache": place}, dry_run):
        for location in [_checked(place)] if place else _places(home, None):
            if location.startswith(S3):
                removed += pruning.retry_in_bucket(location, graphs or (), dry_run)
            else:
                removed += pruning.retry(Path(location), graphs or (), dry_run)
    data = [{"path": item.path, "why": item.why, "bytes": item.bytes} for item in removed]
    _show_removed(data, dry_run, output)


@contextlib.contextmanager
def _fetch_reports(label: str) -> Iterator[Callable[[str], Progress]]:
    """Report the progress of the newest fetch every ``PROGRESS_S``. Yields the factory of progress objects."""
    from workers.artifacts.fetch.progress import Progress

    fetches, ended = list[Progress](), threading.Event()

    def new_progress(source: str) -> Progress:
        fetches.append(Progress(source))
        return fetches[-1]

    def report() -> None:
        while not ended.wait(PROGRESS_S):
            if fetches and (status := fetches[-1].status()).phase not in ("done", "failed"):
                progress: dict[str, Any] = {"phase": status.phase, "source": status.source, "trouble": status.trouble}
                progress |= {"bytes": status.done, "total": status.total}
                say(f"{label}: {fetch_text({**progress, 'bytes_per_s': status.rate, 'left_s': status.left_s})}")

    reporter = threading.Thread(target=report, name="warm", daemon=True)
    reporter.start()
    try:
        yield new_progress
    finally:
        ended.set()
        reporter.join()


# Reading


def _home() -> Home:
    from orchestrator.process.home import Home

    return Home.from_environment()


def _store(home: Home) -> Store:
    from orchestrator.daemon.settings import store_here

    return store_here(home.store).open()


def _places(home: Home, spec: str | None) -> list[str]:
    """Returns the existing NEFF caches of this host, and those that the spec names."""
    from workers.neff_cache import compiler_cache as neuron_cache

    folders = [neuron_cache.location(os.environ), *sorted((home.path / "neff").glob("*"))]
    places = [str(path) for path in folders if path is not None and path.is_dir()]
    if spec is not None:
        file = _loaded(spec)
        assert file.spec is not None
        places += [location for model in file.spec.models if (location := model.neff_cache_location)]
    return list(dict.fromkeys(places))


def _checked(place: str) -> str:
    """Returns the value of ``--cache``. Raises Failed if that folder does not exist."""
    if not place.startswith(S3) and not Path(place).is_dir():
        hint = "--cache takes a folder, or s3://BUCKET/PREFIX"
        raise Failed("neff-cache-unreadable", f"{place} is not a folder", hint)
    return place


@dataclass(frozen=True)
class CacheContents:
    """The contents of a NEFF cache."""

    entries: Sequence[CacheEntry]  # graphs
    pushed: Sequence[dict[str, Any]]  # sets of `compile --push`


def _read(place: str) -> CacheContents:
    """Returns the contents of the NEFF cache at ``place``. Raises Failed if it cannot be read."""
    from workers.artifacts.sources.listing import SourceError
    from workers.neff_cache.entries import listed_entries, read_entries
    from workers.neff_cache.shared_artifacts import FOLDER
    from workers.neff_cache.sync import place_at

    try:
        if place.startswith(S3):
            remote = place_at(place)
            files = remote.files()
            sets = [_below(file, FOLDER) for file in files if file.name.startswith(f"{FOLDER}/")]
            return CacheContents(
                listed_entries(files), _pushed_sets(sets, lambda name: remote.read(f"{FOLDER}/{name}"))
            )
        folder = Path(place) / FOLDER
        below = place_at(str(folder))
        pushed = _pushed_sets(below.files(), below.read) if folder.is_dir() else ()
        return CacheContents(read_entries(Path(place)), pushed)
    except SourceError as error:
        raise Failed(error.id, error.what, error.hint) from error


def _pushed_sets(files: Sequence[RemoteFile], read: Callable[[str], bytes]) -> list[dict[str, Any]]:
    """Groups ``files`` into sets by the first part of their names. Raises SourceError."""
    from workers.neff_cache.compiled_artifacts import MANIFEST
    from workers.neff_cache.record import LOCK_FILE, decoded
    from workers.neff_cache.shared_artifacts import missing

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
                "made_at": None if record is None else record.made_at,
                "source": None if record is None else record.source,
                "engine": None if record is None else record.engine,
                "compiler": None if record is None else record.compiler,
            }
        )
    return rows


def _below(file: RemoteFile, folder: str) -> RemoteFile:
    import msgspec.structs

    return msgspec.structs.replace(file, name=file.name[len(folder) + 1 :])


def _loaded(spec: str) -> SpecFile:
    """Loads a spec and prints its problems. Exits if one is an error."""
    from orchestrator.revisions.spec_file import load
    from placements.spec.problems import has_errors

    file = load(spec, folders="plan")
    complain(file.problems)
    if file.spec is None or has_errors(file.problems):
        raise typer.Exit(FAILED)
    return file


def _configs(spec: str, models: Sequence[str] | None, *, heads: bool) -> Iterator[OfflineConfig]:
    from orchestrator.starts.offline_configs import configs

    yield from configs(_loaded(spec), _home(), models or (), heads=heads)


def _verdicts(config: ReplicaConfig | Failure, read: bool) -> list[Verdict] | Failure:
    from workers.compiling.start_forecast import verify
    from workers.messages.status import Failure

    return config if isinstance(config, Failure) else verify(config, read=read)


def _audited(
    home: Home, action: str, arguments: dict[str, Any], dry_run: bool
) -> contextlib.AbstractContextManager[object]:
    """Records an action in the audit log, as `keys` does; nothing if the home does not exist."""
    from orchestrator.access.audit_log import Audit, caller, recorded

    if dry_run or not home.path.is_dir():
        return contextlib.nullcontext()
    return recorded(Audit(home.audit), "command", action, arguments, by=caller())


# Output


def _verdict_dict(offline: OfflineConfig, verdict: Verdict) -> dict[str, Any]:
    prediction = verdict.prediction
    return {
        "model": offline.model,
        "target": offline.target,
        "engine": getattr(offline.config, "engine", None),
        "role": verdict.role,
        "source": offline.draft_source if verdict.role == "draft" else offline.source,
        "outcome": prediction.outcome,
        "hit": prediction.hit,
        "where": prediction.where if prediction.where != "nothing" else "",
        "place": prediction.place,
        "reason": _reason(offline, prediction),
        "why": [{"field": why.field, "wanted": why.wanted, "found": why.found} for why in prediction.why],
        "missing": list(prediction.missing),
        "failed": list(prediction.failed),
    }


def _reason(offline: OfflineConfig, prediction: Prediction) -> str:
    """Returns the reason. Its `cache retry` gets `--cache` for a cache that `retry` does not search by default."""
    from workers.messages.status import Failure
    from workers.neff_cache import compiler_cache as neuron_cache
    from workers.neff_cache.candidates import keep_of
    from workers.neff_cache.sync import localized

    config = offline.config
    if not prediction.failed or isinstance(config, Failure) or not Path(prediction.place).is_dir():
        return prediction.reason
    is_local = localized({**os.environ, **config.env}, keep_of(Path(config.compiled or ""))) is not None
    if is_local or Path(prediction.place) == neuron_cache.location(os.environ):
        return prediction.reason
    return prediction.reason.replace(RETRY, f"{RETRY} --cache {shlex.quote(prediction.place)}")


def _failure_dict(offline: OfflineConfig, failure: Failure) -> dict[str, Any]:
    """The entry of a start that would fail before anything is compiled."""
    empty = {"engine": None, "role": "model", "source": offline.source, "where": "", "place": ""}
    common = {"model": offline.model, "target": offline.target, "outcome": "fail", "hit": False, "reason": str(failure)}
    return {**common, **empty, "why": [], "missing": [], "failed": []}


def _details(label: str, verdict: dict[str, Any]) -> list[str]:
    from workers.neff_cache.predict import Difference

    lines = [str(Difference(**why)) for why in verdict["why"]]
    lines += [f"missing or damaged: {name}" for name in verdict["missing"]]
    lines += [f"failed: {name}" for name in verdict["failed"]]
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return [f"{label}: {line}" for line in (*lines[:SHOWN], *more)]


def _entry_dict(entry: CacheEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "compiler": entry.compiler,
        "key": entry.key,
        "flags_key": entry.flags_key,
        "state": entry.state.value,
        "bytes": entry.bytes,
        "changed_at": entry.changed_at or None,
        "flags": None if entry.flags is None else list(entry.flags),
        "words": entry.words,
    }


def _source(artifact: Kept, sources: Mapping[str, str]) -> str | None:
    """Returns the model's source as the spec names it, not the folder that it was fetched to."""
    return None if artifact.record is None else sources.get(artifact.record.source, artifact.record.source)


def _compiled_dict(artifact: Kept, sources: Mapping[str, str]) -> dict[str, Any]:
    record = artifact.record
    return {
        "name": artifact.name,
        "state": artifact.state,
        "bytes": artifact.bytes,
        "used_at": artifact.used_at,
        "source": _source(artifact, sources),
        "engine": None if record is None else record.engine,
        "compiler": None if record is None else record.compiler,
        "flags": None if record is None else record.flags,
        "tp_degree": None if record is None else record.tp_degree,
        "dtype": None if record is None else record.dtype,
        "shapes": None if record is None else record.shapes,
        "layout": None if record is None else record.layout,
        "damaged": list(artifact.damaged),
    }


def _cache_table(place: str, contents: CacheContents) -> str:
    header = ("COMPILER", "MODULE", "STATE", "SIZE", "AGE", "FLAGS", "LAST WORDS")
    rows = [
        (
            entry.compiler,
            entry.module,
            entry.state.value,
            size_text(entry.bytes),
            _age(entry.changed_at),
            " ".join(entry.flags or ()) or None,
            entry.words or None,
        )
        for entry in contents.entries
    ]
    sets = [
        (
            pushed["name"],
            pushed["engine"],
            pushed["source"] or None,
            pushed["state"],
            size_text(pushed["bytes"]),
            _age(pushed["made_at"] or 0),
        )
        for pushed in contents.pushed
    ]
    tables = [columns(header, rows)] if rows else []
    tables += [columns(("SET", "ENGINE", "SOURCE", "STATE", "SIZE", "AGE"), sets)] if sets else []
    return f"NEFF cache {place}\n" + ("\n".join(tables) or "empty")


def _compiled_table(home: Home, artifacts: Sequence[Kept], sources: Mapping[str, str]) -> str:
    header = ("NAME", "ENGINE", "SOURCE", "COMPILER", "TP", "DTYPE", "STATE", "SIZE", "USED")
    rows = [
        (
            artifact.name,
            artifact.record and artifact.record.engine,
            _source(artifact, sources) or None,
            (artifact.record and artifact.record.compiler) or None,
            artifact.record and artifact.record.tp_degree,
            artifact.record and artifact.record.dtype,
            artifact.state,
            size_text(artifact.bytes),
            _age(artifact.used_at),
        )
        for artifact in artifacts
    ]
    return f"Compiled artifacts in {home.compiled}\n" + (columns(header, rows) if rows else "none")


def _show_removed(data: list[dict[str, Any]], dry_run: bool, output: Format) -> None:
    rows = [(item["path"], size_text(item["bytes"]), item["why"]) for item in data]
    done = "would be removed" if dry_run else "removed"
    size = sum(item["bytes"] for item in data)
    table = (
        columns(("PATH", "SIZE", "WHY"), rows) + f"\n{len(data)} {done}, {size_text(size)}" if rows else "nothing to do"
    )
    show({"dry_run": dry_run, "bytes": size, "removed": data}, output, table)


def _age(at: float) -> str | None:
    if not at:
        return None
    age = max(0.0, time.time() - at)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if age >= size:
            return f"{age / size:.0f} {unit}"
    return f"{age:.0f} s"
