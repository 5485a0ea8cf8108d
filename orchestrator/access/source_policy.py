"""The source policy: the places that a spec's models may read, and the interpreters and remote code it may run."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.messages.controller_settings import ControllerSettings
from placements.spec.notation import unusable_path
from placements.spec.parse import parse
from placements.spec.problems import Problem
from placements.spec.schema import ModelSpec, Spec

S3, HUB = "s3://", "hub:"
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
BARRED = ("source-not-allowed", "interpreter-not-allowed", "command-not-allowed", "remote-code-not-allowed")
_PATH_STARTS = ("~", "..")
Place = tuple[tuple[str, ...], str, str]  # keys in the spec, absolute place, the spec's text


@dataclass(frozen=True)
class SourcePolicy:
    """The places and programs that a spec may name; None allows everything."""

    prefixes: tuple[str, ...] | None = None  # absolute folders, s3:// prefixes, and hub: with an organisation or an id
    interpreters: frozenset[str] | None = None  # exact paths
    remote_code: frozenset[str] | None = None  # sources whose code may run
    commands: frozenset[str] | None = None  # of servers, with their environments

    def problems(self, spec: Spec) -> tuple[Problem, ...]:
        """Returns the violations of a spec; first those of the system's limits of paths. Resolves links, so that none
        leads out of an allowed folder. Blocks.

        An allowed folder includes everything in it. Anybody who can write there, or replace a link after this check,
        decides what is loaded.
        """
        models = spec.models
        if unusable := [problem for model in models for problem in _unusable(spec, model)]:
            return tuple(unusable)
        sources = [problem for model in models for problem in (*self._sources(spec, model), *self._code(spec, model))]
        commands = [problem for model in models for problem in self._commands(spec, model)]
        return (*self._interpreter_problems(spec), *self._launch_problems(spec), *commands, *sources)

    def allows(self, location: str) -> bool:
        """Returns whether an absolute path, an s3:// address or a hub id is at or below one of the prefixes."""
        if self.prefixes is None:
            return True
        if location.startswith(S3):
            segments = location[len(S3) :].split("/")
            if any(segment in (".", "..") for segment in segments):
                return False
            prefixes = [prefix[len(S3) :].rstrip("/").split("/") for prefix in self.prefixes if prefix.startswith(S3)]
            return any(segments[: len(prefix)] == prefix for prefix in prefixes)
        if not location.startswith("/"):
            prefixes = [prefix[len(HUB) :].strip("/").split("/") for prefix in self.prefixes if prefix.startswith(HUB)]
            return _HUB_ID.fullmatch(location) is not None and any(
                prefix == [""] or location.split("/")[: len(prefix)] == prefix for prefix in prefixes
            )
        real = _real(location)
        folders = [_real(prefix) for prefix in self.prefixes if not prefix.startswith((S3, HUB))]
        if real is None:
            return False
        return any(folder is not None and (real == folder or folder in real.parents) for folder in folders)

    def _interpreter_problems(self, spec: Spec) -> Iterator[Problem]:
        for engine in spec.engines:
            python = spec.python_for(engine)
            if self.interpreters is None or python is None or os.path.normpath(python) in self.interpreters:
                continue
            message = f"engines.{engine}.python: {python} is not an interpreter of the spec that `up` started with"
            hint = "an interpreter runs code: name it in the spec of `corewright up`"
            yield Problem("interpreter-not-allowed", "error", spec.where("engines", engine, "python"), message, hint)

    def _launch_problems(self, spec: Spec) -> Iterator[Problem]:
        for engine in spec.engines:
            launch = spec.launch_of(engine)
            if self.commands is None or not launch or repr(launch) in self.commands:
                continue
            message = f"engines.{engine}.command is not the command of the spec that `up` started with"
            hint = "a command runs code: name it in the spec of `corewright up`"
            yield Problem("command-not-allowed", "error", spec.where("engines", engine, "command"), message, hint)

    def _commands(self, spec: Spec, model: ModelSpec) -> Iterator[Problem]:
        if self.commands is None or commands_of([model]) <= self.commands:
            return
        message = (
            f"{model.name}: server is not the command and environment of a model of the spec that `up` started with"
        )
        hint = "a command runs code: name it in the spec of `corewright up`"
        yield Problem("command-not-allowed", "error", spec.where("models", model.name, "server"), message, hint)

    def _code(self, spec: Spec, model: ModelSpec) -> Iterator[Problem]:
        if self.remote_code is None or not _trusted(model) - self.remote_code:
            return
        message = f"{model.name}: trust_remote_code would run code of {min(_trusted(model) - self.remote_code)}"
        hint = "set trust_remote_code for this source in the spec of `corewright up`"
        where = spec.where("models", model.name, "trust_remote_code")
        yield Problem("remote-code-not-allowed", "error", where, message, hint)

    def _sources(self, spec: Spec, model: ModelSpec) -> Iterator[Problem]:
        if self.prefixes is None:
            return
        for keys, location, given in _places(model):
            if not self.allows(location):
                where = spec.where("models", model.name, *keys)
                allowed = ", ".join(self.prefixes) or "nothing"
                message = f"{model.name}: {'.'.join(keys)} {given!r} is not in the allowed sources: {allowed}"
                hint = "move it to an allowed source, or extend the setting allowed_sources and restart `up`"
                if not location:
                    hint = "write an absolute path in an allowed source"
                yield Problem("source-not-allowed", "error", where, message, hint)


def interpreters_of(spec: Spec) -> frozenset[str]:
    """Returns the interpreters that a spec names, as normalized paths."""
    interpreters = [spec.python_for(engine) for engine in spec.engines]
    return frozenset(os.path.normpath(python) for python in interpreters if python is not None)


def commands_of(models: Iterable[ModelSpec]) -> frozenset[str]:
    """Returns the commands of servers with their environments, as texts that are equal for equal ones."""
    servers = [(model.server_command, model.server) for model in models if model.server is not None]
    return frozenset(repr((command, sorted(server.env.items()), server.cores_env)) for command, server in servers)


def launches_of(spec: Spec) -> frozenset[str]:
    """Returns the commands of engines, as texts that are equal for equal ones."""
    return frozenset(repr(launch) for engine in spec.engines if (launch := spec.launch_of(engine)))


def allowed_by_setting(fleet: ControllerSettings) -> SourcePolicy:
    """Returns the policy of the setting `allowed_sources`; unset allows everything."""
    if fleet.allowed_sources is None:
        return SourcePolicy()
    return SourcePolicy(fleet.allowed_sources, *_own_programs(fleet))


def allowed_to_keys(fleet: ControllerSettings) -> SourcePolicy:
    """Returns the policy for callers with an API key, who may have no shell on this host.

    Without `allowed_sources` they may read the folder of the spec that `up` started with.
    """
    prefixes = (fleet.base_dir,) if fleet.allowed_sources is None else fleet.allowed_sources
    return SourcePolicy(prefixes, *_own_programs(fleet))


def _own_programs(fleet: ControllerSettings) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Returns what the spec of `up` runs: its interpreters, the sources whose code it trusts, and commands."""
    own = parse(fleet.spec_text, fleet.spec_file, fleet.base_dir).spec
    if own is None:
        return frozenset(), frozenset(), frozenset()
    return (
        interpreters_of(own),
        frozenset().union(*map(_trusted, own.models)),
        commands_of(own.models) | launches_of(own),
    )


def _trusted(model: ModelSpec) -> frozenset[str]:
    """Returns the sources whose code the model would run, with their revisions."""
    if not model.trust_remote_code or not model.has_source or "source" in model.broken:
        return frozenset()
    sources = {_with_revision(model.source_path or model.source, model.revision)}
    if model.draft is not None:
        sources.add(_with_revision(model.draft_path or model.draft.source, model.draft.revision))
    return frozenset(sources)


def _with_revision(location: str, revision: str | None) -> str:
    return location if revision is None else f"{location}@{revision}"


def _real(path: str) -> Path | None:
    try:
        return Path(path).resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links, or not a path
        return None


def _folders(model: ModelSpec) -> Iterator[Place]:
    """Yields each folder that a model names."""
    if model.has_source and "source" not in model.broken:
        yield ("source",), model.source_path or model.source, model.source
    if model.draft is not None:
        yield ("draft", "source"), model.draft_path or model.draft.source, model.draft.source
    for name, location in model.adapter_places.items():
        yield ("adapters", name), location, model.adapters[name]
    if model.neff_cache is not None:
        yield ("neff_cache",), model.neff_cache_location or model.neff_cache, model.neff_cache


def _places(model: ModelSpec) -> Iterator[Place]:
    """Yields each place that a model reads or writes: its folders, and what may be a path in its options."""
    yield from _folders(model)
    for text in _texts(model.given_options):
        if "/" in text or text.startswith(_PATH_STARTS):
            yield ("engine_options",), _absolute(text), text
    for text in _words(model.compiler.flags):
        value = text.partition("=")[2] or text
        if "/" in value or value.startswith(_PATH_STARTS):
            yield ("compiler", "flags"), _absolute(re.sub("^-[A-Za-z]/", "/", value)), text  # as in -I/folder


def _unusable(spec: Spec, model: ModelSpec) -> Iterator[Problem]:
    """Yields an error for each path that no file can have: to look for it would raise."""
    for keys, location, given in _folders(model):
        reason = None if location.startswith(S3) else unusable_path(location)
        if reason is not None:
            message = f"{model.name}: {'.'.join(keys)} {given!r} {reason}"
            yield Problem("bad-source", "error", spec.where("models", model.name, *keys), message, "correct the path")


def _absolute(text: str) -> str:
    """Returns "", which no policy allows, for a URL or a relative path: the engine resolves it from its own folder."""
    return text if text.startswith(("/", S3)) else ""


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _words(flags: str) -> Iterable[str]:
    try:
        return shlex.split(flags)
    except ValueError:  # an unterminated quote
        return flags.split()
