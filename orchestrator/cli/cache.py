"""Commands about what was compiled and fetched: cache ls, verify, warm, prune, retry. They need no fleet."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.app import FAILED, FormatOption, SpecArgument, group
from orchestrator.cli.output import Format, complain, say, show
from orchestrator.columns import columns
from orchestrator.failure import Failed

if TYPE_CHECKING:
    from orchestrator.home import Home
    from workers.config import ReplicaConfig
    from workers.neff_cache.entries import CacheEntry
    from workers.neff_cache.upkeep import Kept, Removed
    from workers.neff_cache.verify import Verdict
    from workers.status import Failure

cache = group("cache", "What was compiled and fetched: on this host, and in the models' NEFF caches.")

OLD_DAYS = 30.0
AT_ONCE = 4  # interpreters that are asked together
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
    from workers.neff_cache.upkeep import kept_in

    home = _home()
    caches = {one: _entries(one) for one in ([place] if place else _places(home, spec))}
    kept = [] if place else kept_in(home.compiled)
    models = [] if place else _store(home).artifacts()
    data = {
        "caches": [
            {"place": one, "entries": [_entry_dict(entry) for entry in entries]} for one, entries in caches.items()
        ],
        "compiled": [_kept_dict(one) for one in kept],
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
    tables = [_cache_table(one, entries) for one, entries in caches.items()]
    tables.append(_kept_table(home, kept) if not place else "")
    rows = [
        (one.key[:12], one.source, one.revision[:12] or None, _size(one.bytes), _age(one.used_at)) for one in models
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
        answers = list(pool.map(lambda pair: _verdicts(pair[1], read), asked))
    data: list[dict[str, Any]] = []
    rows: list[tuple[object, ...]] = []
    details: list[str] = []
    for (name, config), answer in zip(asked, answers, strict=True):
        told = [_verdict_dict(name, config, one) for one in answer] if isinstance(answer, list) else [_no(name, answer)]
        data += told
        for one in told:
            label = name if one["role"] == "model" else f"{name} ({one['role']})"
            rows.append((label, one["outcome"], one["where"] or None, one["reason"]))
            details += _details(label, one)
    hit = all(one["hit"] for one in data)
    table = columns(("MODEL", "START", "WHERE", "WHY"), rows)
    show({"hit": hit, "models": data}, output, "\n".join([table, *([""] if details else []), *details]))
    raise typer.Exit(0 if hit else FAILED)


@cache.command("warm")
def warm(spec: SpecArgument, model: ModelOption = None, output: FormatOption = Format.TABLE) -> None:
    """Bring here what starts need: models from where they are, graphs from their NEFF caches. Compiles nothing."""
    from workers.neff_cache.warming import warm as bring
    from workers.status import Failure

    home = _home()
    home.prepare()
    store, data, failed = _store(home), list[dict[str, Any]](), False
    for name, config in _configs(spec, model, heads=False):
        if isinstance(config, Failure):
            data.append({"model": name, "bytes": 0, "brought": [], "problem": str(config)})
            failed = True
            continue
        told = bring(config, store, threading.Event())
        say(f"{name}: {_size(told.bytes)}" + (f"; {told.problem}" if told.problem else ""))
        data.append({"model": name, "bytes": told.bytes, "brought": list(told.brought), "problem": told.problem})
        failed = failed or bool(told.problem)
    rows = [(one["model"], _size(one["bytes"]), ", ".join(one["brought"]) or None, one["problem"]) for one in data]
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
    from workers.neff_cache.upkeep import prune_cache, prune_compiled

    home, old_s = _home(), older_than * 86400.0
    gone: list[Removed] = []
    told = {"older_than": older_than, "models": models, "cache": place}
    with _written_down(home, "cache prune", told, dry_run):
        for one in [place] if place else _places(home, None):
            if one.startswith("s3://"):
                raise Failed("cache-elsewhere", f"{one} is not pruned from here", "a lifecycle rule of the bucket does")
            gone += prune_cache(Path(one), old_s, dry_run)
        if not place:
            gone += prune_compiled(home.compiled, old_s, dry_run)
        artifacts = [] if dry_run or not models else _store(home).prune()
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
    from workers.neff_cache import upkeep

    home = _home()
    gone: list[Removed] = []
    with _written_down(home, "cache retry", {"graphs": graphs or [], "cache": place}, dry_run):
        for one in [place] if place else _places(home, None):
            if one.startswith("s3://"):
                gone += upkeep.retry_in_bucket(one, graphs or (), dry_run)
            else:
                gone += upkeep.retry(Path(one), graphs or (), dry_run)
    _show_removed([{"path": one.path, "why": one.why, "bytes": one.bytes} for one in gone], dry_run, output)


# What is looked at


def _home() -> Home:
    from orchestrator.home import Home

    return Home.from_environment()


def _store(home: Home) -> Any:
    from orchestrator.settings import store_here

    return store_here(home.store).open()


def _places(home: Home, spec: str | None) -> list[str]:
    """The NEFF caches of this host that are there, and those that the spec names."""
    from orchestrator.specfile import load
    from workers import neuron_cache

    found = [neuron_cache.location(os.environ), *sorted((home.path / "neff").glob("*"))]
    places = [str(path) for path in found if path is not None and path.is_dir()]
    if spec is not None:
        file = load(spec)
        named = [model.neff_cache_location for model in (file.spec.models if file.spec is not None else ())]
        places += [one for one in named if one]
    return list(dict.fromkeys(places))


def _entries(place: str) -> Sequence[CacheEntry]:
    """Raises Failed."""
    from workers.artifacts.listing import SourceError
    from workers.neff_cache.entries import listed_entries, read_entries
    from workers.neff_cache.sync import place_at

    if not place.startswith("s3://"):
        return read_entries(Path(place))
    try:
        return listed_entries(place_at(place).files())
    except SourceError as error:
        raise Failed(error.id, error.what, error.hint) from error


def _configs(spec: str, models: Sequence[str] | None, *, heads: bool) -> Iterator[tuple[str, ReplicaConfig | Failure]]:
    from orchestrator.offline import configs
    from orchestrator.specfile import load
    from placements.problems import has_errors

    file = load(spec)
    if file.spec is None or has_errors(file.problems):
        complain(file.problems)
        raise typer.Exit(FAILED)
    yield from configs(file, _home(), models or (), heads=heads)


def _verdicts(config: ReplicaConfig | Failure, read: bool) -> list[Verdict] | Failure:
    from workers.artifacts.listing import SourceError
    from workers.neff_cache.verify import verify
    from workers.status import Failure

    if isinstance(config, Failure):
        return config
    try:
        return verify(config, read=read)
    except SourceError as error:
        return Failure(error.id, error.what, error.hint)


def _written_down(home: Home, action: str, told: dict[str, Any], dry_run: bool) -> Any:
    """In the audit log, as `keys` does; where there is no home there is nothing to write into."""
    import contextlib

    from orchestrator.audit import Audit, caller, recorded

    if dry_run or not home.path.is_dir():
        return contextlib.nullcontext()
    return recorded(Audit(home.audit), "command", action, told, by=caller())


# How it is shown


def _verdict_dict(name: str, config: ReplicaConfig | Failure, one: Verdict) -> dict[str, Any]:
    told = one.prediction
    return {
        "model": name,
        "engine": getattr(config, "engine", None),
        "role": one.role,
        "source": one.source,
        "outcome": told.outcome,
        "hit": told.hit,
        "where": told.where if told.where != "nothing" else "",
        "place": told.place,
        "reason": told.reason,
        "why": [{"field": why.field, "wanted": why.wanted, "found": why.found} for why in told.why],
        "missing": list(told.missing),
        "failed": list(told.failed),
    }


def _no(name: str, failure: Failure) -> dict[str, Any]:
    """A start that would fail before anything is compiled."""
    empty = {"engine": None, "role": "model", "source": "", "where": "", "place": ""}
    told = {"model": name, "outcome": "fail", "hit": False, "reason": str(failure)}
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


def _kept_dict(one: Kept) -> dict[str, Any]:
    told = one.record
    return {
        "name": one.name,
        "state": one.state,
        "bytes": one.bytes,
        "used_at": one.used_at,
        "source": None if told is None else told.source,
        "engine": None if told is None else told.engine,
        "compiler": None if told is None else told.compiler,
        "flags": None if told is None else told.flags,
        "tp_degree": None if told is None else told.tp_degree,
        "dtype": None if told is None else told.dtype,
        "shapes": None if told is None else told.shapes,
        "layout": None if told is None else told.layout,
        "damaged": list(one.damaged),
    }


def _cache_table(place: str, entries: Sequence[CacheEntry]) -> str:
    header = ("COMPILER", "MODULE", "STATE", "SIZE", "AGE", "FLAGS", "LAST WORDS")
    rows = [
        (
            entry.compiler,
            entry.module,
            entry.state.value,
            _size(entry.bytes),
            _age(entry.changed_at),
            " ".join(entry.flags or ()) or None,
            entry.words or None,
        )
        for entry in entries
    ]
    return f"NEFF cache {place}\n" + (columns(header, rows) if rows else "empty")


def _kept_table(home: Home, kept: Sequence[Kept]) -> str:
    header = ("NAME", "ENGINE", "SOURCE", "COMPILER", "TP", "DTYPE", "STATE", "SIZE", "USED")
    rows = [
        (
            one.name,
            one.record and one.record.engine,
            (one.record and one.record.source) or None,
            (one.record and one.record.compiler) or None,
            one.record and one.record.tp_degree,
            one.record and one.record.dtype,
            one.state,
            _size(one.bytes),
            _age(one.used_at),
        )
        for one in kept
    ]
    return f"Compiled artifacts in {home.compiled}\n" + (columns(header, rows) if rows else "none")


def _show_removed(data: list[dict[str, Any]], dry_run: bool, output: Format) -> None:
    rows = [(one["path"], _size(one["bytes"]), one["why"]) for one in data]
    done = "would be removed" if dry_run else "removed"
    size = sum(one["bytes"] for one in data)
    table = columns(("PATH", "SIZE", "WHY"), rows) + f"\n{len(data)} {done}, {_size(size)}" if rows else "nothing to do"
    show({"dry_run": dry_run, "bytes": size, "removed": data}, output, table)


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _age(at: float) -> str | None:
    if not at:
        return None
    age = max(0.0, time.time() - at)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if age >= size:
            return f"{age / size:.0f} {unit}"
    return f"{age:.0f} s"
