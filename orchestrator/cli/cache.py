"""Commands about what was compiled and fetched: cache ls, verify, warm, prune, retry. They need no fleet."""

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

cache = group("cache", "What was compiled and fetched: on this host, and in the models' NEFF caches.")

OLD_DAYS = 30.0
AT_ONCE = 4  # interpreters that are asked together
S3 = "s3://"
RETRY = "`corewright cache retry"
TELL_S = 5.0  # between two lines about a fetch
SHOWN = 6  # differences of a model in the table; -o json has all

ModelOption = Annotated[
    list[str] | None, typer.Option("--model", metavar="M", help="Only this model. Repeatable.", show_default="all")
]
CacheOption = Annotated[
    str | None,
    typer.Option("--cache", metavar="PLACE", help="This NEFF cache: a folder or s3://.", show_default="this host's"),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")]


@cache.command("ls")
def list_all(
    spec: Annotated[
        str | None, typer.Argument(metavar="SPEC", help="The NEFF caches of its models too.", show_default=False)
    ] = None,
    place: CacheOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """List NEFF caches, compiled artifacts and fetched models, and the state of each."""
    from workers.neff_cache.pruning import kept_in

    home = _home()
    caches = {one: _look(one) for one in ([_checked(place)] if place else _places(home, spec))}
    kept = [] if place else kept_in(home.compiled)
    models = [] if place else _store(home).artifacts()
    sources = {one.folder: one.source for one in models}
    data = {
        "caches": [
            {"place": one, "entries": [_entry_dict(entry) for entry in seen.entries], "pushed": list(seen.pushed)}
            for one, seen in caches.items()
        ],
        "compiled": [_kept_dict(one, sources) for one in kept],
        "models": [
            {
                "key": one.key,
                "source": one.source,
                "revision": one.revision,
                "folder": one.folder,
                "bytes": one.bytes,
                "fetched_at": one.fetched_at,
                "used_at": one.used_at,
            }
            for one in models
        ],
    }
    tables = [_cache_table(one, seen) for one, seen in caches.items()]
    tables.append(_kept_table(home, kept, sources) if not place else "")
    rows = [
        (one.key[:12], one.source, one.revision[:12] or None, size_text(one.bytes), _age(one.used_at)) for one in models
    ]
    if rows:
        tables.append("Fetched models\n" + columns(("KEY", "SOURCE", "REVISION", "SIZE", "USED"), rows))
    show(data, output, "\n\n".join(table for table in tables if table))


@cache.command("verify")
def verify_spec(
    spec: SpecArgument,
    model: ModelOption = None,
    read: Annotated[
        bool, typer.Option("--read", help="Read the weights where artifacts depend on them and nobody has yet.")
    ] = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Say which models would start without a compilation. Claims no core; exits with 1 if one would not."""
    asked = list(_configs(spec, model, heads=True))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda one: _verdicts(one.config, read), asked))
    data: list[dict[str, Any]] = []
    rows: list[tuple[object, ...]] = []
    details: list[str] = []
    for of, answer in zip(asked, answers, strict=True):
        told = [_verdict_dict(of, one) for one in answer] if isinstance(answer, list) else [_no(of, answer)]
        data += told
        for one in told:
            label = of.label if one["role"] == "model" else f"{of.label} ({one['role']})"
            rows.append((label, one["outcome"], one["where"] or None, one["reason"]))
            details += _details(label, one)
    hit = all(one["hit"] for one in data)
    table = columns(("MODEL", "START", "WHERE", "WHY"), rows)
    show({"hit": hit, "models": data}, output, "\n".join([table, *([""] if details else []), *details]))
    raise typer.Exit(0 if hit else FAILED)


@cache.command("warm")
def warm(spec: SpecArgument, model: ModelOption = None, output: FormatOption = Format.TABLE) -> None:
    """Bring here what starts need: models from where they are, graphs from their NEFF caches. Compiles nothing."""
    from workers.compiling.warming import warm as bring
    from workers.messages.status import Failure

    home = _home()
    home.prepare()
    store, data, failed = _store(home), list[dict[str, Any]](), False
    labels = []
    for one in _configs(spec, model, heads=False):
        labels.append(one.label)
        about = {"model": one.model, "target": one.target}
        if isinstance(one.config, Failure):
            data.append({**about, "bytes": 0, "brought": [], "problem": str(one.config)})
            failed = True
            continue
        with _told_now_and_then(one.label) as began:
            told = bring(one.config, store, threading.Event(), began)
        came = size_text(told.bytes) if told.bytes or told.problem else "all was here"
        say(f"{one.label}: {came}" + (f"; {told.problem}" if told.problem else ""))
        data.append({**about, "bytes": told.bytes, "brought": list(told.brought), "problem": told.problem})
        failed = failed or bool(told.problem)
    rows = []
    for label, row in zip(labels, data, strict=True):
        size = size_text(row["bytes"]) if row["bytes"] else None
        rows.append((label, size, ", ".join(row["brought"]) or None, row["problem"] or None))
    show({"models": data}, output, columns(("MODEL", "SIZE", "BROUGHT", "PROBLEM"), rows))
    raise typer.Exit(FAILED if failed else 0)


@cache.command("prune")
def prune(
    older_than: Annotated[
        float, typer.Option(min=0, metavar="DAYS", help="What was not used for so many days goes as well.")
    ] = OLD_DAYS,
    models: Annotated[
        bool, typer.Option("--models", help="Fetched models that no replica uses go too, whatever their age.")
    ] = False,
    place: CacheOption = None,
    dry_run: DryRunOption = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Remove from this host what is unfinished, damaged or old. Nothing in s3:// is touched."""
    from workers.neff_cache.pruning import prune_cache, prune_compiled

    home, old_s = _home(), older_than * 86400.0
    gone: list[Removed] = []
    told = {"older_than": older_than, "models": models, "cache": place}
    with _written_down(home, "cache prune", told, dry_run):
        for one in [_checked(place)] if place else _places(home, None):
            if one.startswith(S3):
                raise Failed("cache-elsewhere", f"{one} is not pruned from here", "a lifecycle rule of the bucket does")
            gone += prune_cache(Path(one), old_s, dry_run)
        if not place:
            gone += prune_compiled(home.compiled, old_s, dry_run)
        artifacts = _store(home).prune(dry_run=dry_run) if models else []
    data = [{"path": one.path, "why": one.why, "bytes": one.bytes} for one in gone]
    data += [{"path": one.folder, "why": "no replica uses it", "bytes": one.bytes} for one in artifacts]
    _show_removed(data, dry_run, output)


@cache.command("retry")
def retry(
    graphs: Annotated[
        list[str] | None, typer.Argument(metavar="[MODULE]...", help="As `cache ls` shows them.", show_default="all")
    ] = None,
    place: CacheOption = None,
    dry_run: DryRunOption = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Have failed compilations tried again by the next start: they are removed from the cache."""
    from workers.neff_cache import pruning

    home = _home()
    gone: list[Removed] = []
    with _written_down(home, "cache retry", {"graphs": graphs or [], "cache": place}, dry_run):
        for one in [_checked(place)] if place else _places(home, None):
            if one.startswith(S3):
                gone += pruning.retry_in_bucket(one, graphs or (), dry_run)
            else:
                gone += pruning.retry(Path(one), graphs or (), dry_run)
    _show_removed([{"path": one.path, "why": one.why, "bytes": one.bytes} for one in gone], dry_run, output)


@contextlib.contextmanager
def _told_now_and_then(label: str) -> Iterator[Callable[[str], Progress]]:
    """How far a fetch is, while it goes on. What it gives makes the progress of one."""
    from workers.artifacts.fetch.progress import Progress

    going, ended = list[Progress](), threading.Event()

    def began(source: str) -> Progress:
        going.append(Progress(source))
        return going[-1]

    def tell() -> None:
        while not ended.wait(TELL_S):
            if going and (status := going[-1].status()).phase not in ("done", "failed"):
                told: dict[str, Any] = {"phase": status.phase, "source": status.source, "trouble": status.trouble}
                told |= {"bytes": status.done, "total": status.total}
                say(f"{label}: {fetch_text({**told, 'bytes_per_s': status.rate, 'left_s': status.left_s})}")

    teller = threading.Thread(target=tell, name="warm", daemon=True)
    teller.start()
    try:
        yield began
    finally:
        ended.set()
        teller.join()


# What is looked at


def _home() -> Home:
    from orchestrator.process.home import Home

    return Home.from_environment()


def _store(home: Home) -> Store:
    from orchestrator.daemon.settings import store_here

    return store_here(home.store).open()


def _places(home: Home, spec: str | None) -> list[str]:
    """The NEFF caches of this host that are there, and those that the spec names."""
    from workers.neff_cache import compiler_cache as neuron_cache

    found = [neuron_cache.location(os.environ), *sorted((home.path / "neff").glob("*"))]
    places = [str(path) for path in found if path is not None and path.is_dir()]
    if spec is not None:
        file = _loaded(spec)
        assert file.spec is not None
        places += [one for model in file.spec.models if (one := model.neff_cache_location)]
    return list(dict.fromkeys(places))


def _checked(place: str) -> str:
    """What ``--cache`` names. Raises Failed where nothing is there."""
    if not place.startswith(S3) and not Path(place).is_dir():
        raise Failed("neff-cache-unreadable", f"{place} is no folder", "--cache takes a folder, or s3://BUCKET/PREFIX")
    return place


@dataclass(frozen=True)
class Seen:
    """What a NEFF cache holds."""

    entries: Sequence[CacheEntry]  # graphs
    pushed: Sequence[dict[str, Any]]  # sets of `compile --push`


def _look(place: str) -> Seen:
    """Raises Failed."""
    from workers.artifacts.sources.listing import SourceError
    from workers.neff_cache.compiled_cache import FOLDER
    from workers.neff_cache.entries import listed_entries, read_entries
    from workers.neff_cache.sync import place_at

    try:
        if place.startswith(S3):
            there = place_at(place)
            files = there.files()
            sets = [_below(one, FOLDER) for one in files if one.name.startswith(f"{FOLDER}/")]
            return Seen(listed_entries(files), _pushed(sets, lambda name: there.read(f"{FOLDER}/{name}")))
        folder = Path(place) / FOLDER
        below = place_at(str(folder))
        return Seen(read_entries(Path(place)), _pushed(below.files(), below.read) if folder.is_dir() else ())
    except SourceError as error:
        raise Failed(error.id, error.what, error.hint) from error


def _pushed(files: Sequence[RemoteFile], read: Callable[[str], bytes]) -> list[dict[str, Any]]:
    """The sets that are of ``files``, whose names begin with that of the set. Raises SourceError."""
    from workers.neff_cache.compiled_artifacts import MANIFEST
    from workers.neff_cache.compiled_cache import missing
    from workers.neff_cache.record import LOCK_FILE, decoded

    sets: dict[str, list[RemoteFile]] = {}
    for one in files:
        name, slash, _ = one.name.partition("/")
        if slash:
            sets.setdefault(name, []).append(_below(one, name))
    found = []
    for name, parts in sorted(sets.items()):
        names = {one.name for one in parts}
        told = decoded(read(f"{name}/{LOCK_FILE}")) if {MANIFEST, LOCK_FILE} <= names else None
        found.append(
            {
                "name": name,
                "state": "unfinished" if told is None else "damaged" if missing(parts, told) else "whole",
                "bytes": sum(one.size for one in parts),
                "made_at": None if told is None else told.made_at,
                "source": None if told is None else told.source,
                "engine": None if told is None else told.engine,
                "compiler": None if told is None else told.compiler,
            }
        )
    return found


def _below(file: RemoteFile, folder: str) -> RemoteFile:
    import msgspec.structs

    return msgspec.structs.replace(file, name=file.name[len(folder) + 1 :])


def _loaded(spec: str) -> SpecFile:
    """Without errors; its warnings are told. Exits otherwise."""
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


def _written_down(
    home: Home, action: str, told: dict[str, Any], dry_run: bool
) -> contextlib.AbstractContextManager[object]:
    """In the audit log, as `keys` does; where there is no home there is nothing to write into."""
    from orchestrator.access.audit_log import Audit, caller, recorded

    if dry_run or not home.path.is_dir():
        return contextlib.nullcontext()
    return recorded(Audit(home.audit), "command", action, told, by=caller())


# How it is shown


def _verdict_dict(of: OfflineConfig, one: Verdict) -> dict[str, Any]:
    told = one.prediction
    return {
        "model": of.model,
        "target": of.target,
        "engine": getattr(of.config, "engine", None),
        "role": one.role,
        "source": of.draft_source if one.role == "draft" else of.source,
        "outcome": told.outcome,
        "hit": told.hit,
        "where": told.where if told.where != "nothing" else "",
        "place": told.place,
        "reason": _reason(of, told),
        "why": [{"field": why.field, "wanted": why.wanted, "found": why.found} for why in told.why],
        "missing": list(told.missing),
        "failed": list(told.failed),
    }


def _reason(of: OfflineConfig, told: Prediction) -> str:
    """With the place that `retry` is to be told, where it would not look by itself."""
    from workers.messages.status import Failure
    from workers.neff_cache import compiler_cache as neuron_cache
    from workers.neff_cache.candidates import keep_of
    from workers.neff_cache.sync import localized

    config = of.config
    if not told.failed or isinstance(config, Failure) or not Path(told.place).is_dir():
        return told.reason
    is_local = localized({**os.environ, **config.env}, keep_of(Path(config.compiled or ""))) is not None
    if is_local or Path(told.place) == neuron_cache.location(os.environ):
        return told.reason
    return told.reason.replace(RETRY, f"{RETRY} --cache {shlex.quote(told.place)}")


def _no(of: OfflineConfig, failure: Failure) -> dict[str, Any]:
    """A start that would fail before anything is compiled."""
    empty = {"engine": None, "role": "model", "source": of.source, "where": "", "place": ""}
    told = {"model": of.model, "target": of.target, "outcome": "fail", "hit": False, "reason": str(failure)}
    return {**told, **empty, "why": [], "missing": [], "failed": []}


def _details(label: str, one: dict[str, Any]) -> list[str]:
    from workers.neff_cache.predict import Difference

    lines = [str(Difference(**why)) for why in one["why"]]
    lines += [f"missing or damaged: {name}" for name in one["missing"]]
    lines += [f"failed: {name}" for name in one["failed"]]
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


def _source(one: Kept, sources: Mapping[str, str]) -> str | None:
    """As the spec names it, where the record has the folder that it was fetched to."""
    return None if one.record is None else sources.get(one.record.source, one.record.source)


def _kept_dict(one: Kept, sources: Mapping[str, str]) -> dict[str, Any]:
    told = one.record
    return {
        "name": one.name,
        "state": one.state,
        "bytes": one.bytes,
        "used_at": one.used_at,
        "source": _source(one, sources),
        "engine": None if told is None else told.engine,
        "compiler": None if told is None else told.compiler,
        "flags": None if told is None else told.flags,
        "tp_degree": None if told is None else told.tp_degree,
        "dtype": None if told is None else told.dtype,
        "shapes": None if told is None else told.shapes,
        "layout": None if told is None else told.layout,
        "damaged": list(one.damaged),
    }


def _cache_table(place: str, seen: Seen) -> str:
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
        for entry in seen.entries
    ]
    sets = [
        (
            one["name"],
            one["engine"],
            one["source"] or None,
            one["state"],
            size_text(one["bytes"]),
            _age(one["made_at"] or 0),
        )
        for one in seen.pushed
    ]
    tables = [columns(header, rows)] if rows else []
    tables += [columns(("SET", "ENGINE", "SOURCE", "STATE", "SIZE", "AGE"), sets)] if sets else []
    return f"NEFF cache {place}\n" + ("\n".join(tables) or "empty")


def _kept_table(home: Home, kept: Sequence[Kept], sources: Mapping[str, str]) -> str:
    header = ("NAME", "ENGINE", "SOURCE", "COMPILER", "TP", "DTYPE", "STATE", "SIZE", "USED")
    rows = [
        (
            one.name,
            one.record and one.record.engine,
            _source(one, sources) or None,
            (one.record and one.record.compiler) or None,
            one.record and one.record.tp_degree,
            one.record and one.record.dtype,
            one.state,
            size_text(one.bytes),
            _age(one.used_at),
        )
        for one in kept
    ]
    return f"Compiled artifacts in {home.compiled}\n" + (columns(header, rows) if rows else "none")


def _show_removed(data: list[dict[str, Any]], dry_run: bool, output: Format) -> None:
    rows = [(one["path"], size_text(one["bytes"]), one["why"]) for one in data]
    done = "would be removed" if dry_run else "removed"
    size = sum(one["bytes"] for one in data)
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
