"""Reads a folder of SageMaker as a spec: its `corewright.yaml`, its settings of LMI containers, or its checkpoints."""

from __future__ import annotations

import codecs
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from orchestrator.control.resolve.spec_file import SpecFile, examine
from orchestrator.process.failure import Failed
from placements.facts.topology import DEGREES, TOPOLOGIES, Machine
from placements.lmi.importing import LOADED, LmiModel, import_lmi
from placements.lmi.settings import LmiSetting, UnreadableSettings, read_environment, read_properties
from placements.planner.plan import plan
from placements.planner.spec_hosts import DEFAULT_EMULATION
from placements.spec.notation import is_path, resolved, unusable_path
from placements.spec.parse import parse
from placements.spec.problems import Problem, has_errors

SPEC = "corewright.yaml"
PROPERTIES = "serving.properties"
CONFIG = "config.json"
VALIDATE = "corewright validate shows the problems"
LMI_VARIABLES = ("OPTION_", "SERVING_", "HF_MODEL_ID", "HF_REVISION", "HF_TASK", "TENSOR_PARALLEL_DEGREE")
HOLDS = f"put a {SPEC}, a {PROPERTIES} or a checkpoint with its {CONFIG} there"

_LOADED = re.compile(r"\[?([^:=\[\]]+)(?::[^=\[\]]*)?\]?=(.+)")  # NAME:VERSION:ENGINE:DEVICES=URL, as LMI reads it

Fields = dict[str, Any]
Choice = Callable[[Fields, Machine], "Fields | None"]
"""Returns the fields of a model with all that it needs, or None."""


@dataclass(frozen=True)
class FolderSpec:
    """The spec that a folder asks for, as decoded YAML with absolute paths, and what could not be kept of it."""

    spec: Fields
    notes: tuple[str, ...] = ()

    @property
    def models(self) -> dict[str, Fields]:
        """The models by name, with the defaults filled in."""
        defaults = self.spec.get("defaults") or {}
        return {name: {**defaults, **fields} for name, fields in self.spec["models"].items()}


def read_folder(
    folder: Path,
    environment: Mapping[str, str],
    machine: Machine,
    name: str = "model",
    *,
    alone: Choice | None = None,
    empty_hint: str = HOLDS,
) -> FolderSpec:
    """Returns what is in a folder: its `corewright.yaml`; else a model for each `serving.properties`, or for LMI's
    variables in the environment; else one for each checkpoint. ``name`` is that of a model in the folder itself.
    ``alone`` chooses the fields of a checkpoint that has the machine for itself; otherwise, and if it returns None,
    each checkpoint gets the smallest degree, so that others fit beside it. ``empty_hint`` is the hint for a folder
    without a model. Blocks. Raises Failed."""
    if (folder / SPEC).is_file():
        return _own_spec(folder)
    settings = _lmi_settings(environment)
    has_config = (folder / CONFIG).is_file()
    try:
        if (folder / PROPERTIES).is_file() or any(folder.glob(f"*/{PROPERTIES}")):
            return _imported(lmi_models(str(folder), settings), machine, name)
        if settings:
            models = lmi_models(None, settings)
            if has_config:
                models = [replace(each, folder=each.folder or str(folder), listed=False) for each in models]
            return _imported(models, machine, name)
    except UnreadableSettings as error:
        raise Failed("model-folder-unreadable", str(error), HOLDS) from None
    checkpoints = (
        {name: folder} if has_config else {each.parent.name: each.parent for each in folder.glob(f"*/{CONFIG}")}
    )
    if not checkpoints:
        fact = f"{folder} has no model" if folder.is_dir() else f"the folder {folder} does not exist"
        raise Failed("model-folder-empty", fact, empty_hint)
    chosen = (
        alone({"source": str(next(iter(checkpoints.values())))}, machine) if alone and len(checkpoints) == 1 else None
    )
    spec: Fields = {"version": 1, "models": {}}
    for each, place in sorted(checkpoints.items()):
        spec["models"][each] = chosen or with_degree({"source": str(place)}, machine)
    return FolderSpec(spec)


def with_degree(fields: Fields, machine: Machine) -> Fields:
    """Returns the fields with the smallest ``tp_degree`` with which the model fits on the machine, a documented one if
    possible; 1 if none does, so that the problems are those of the model itself. Blocks."""
    for degree in (1,) if machine.instance is None else _degrees(machine):
        candidate = {**fields, "tp_degree": degree}
        if not problems_of(examined({"models": {"model": candidate}}, machine)):
            return candidate
    return {**fields, "tp_degree": 1}


def examined(spec: Fields, machine: Machine) -> SpecFile:
    """Returns a spec with its problems. Blocks."""
    return examine(text_of(spec), SPEC, "/", machine)


def problems_of(file: SpecFile) -> list[Problem]:
    """Returns why the spec cannot be served, also for lack of room."""
    if file.spec is None or has_errors(file.problems):
        return [problem for problem in file.problems if problem.severity == "error"]
    return [
        problem for missing in plan(file.spec, file.hosts, file.checkpoints).unplaced for problem in missing.problems
    ]


def text_of(spec: Fields) -> str:
    """Returns a spec as YAML, with its keys in order."""
    return yaml.safe_dump(spec, sort_keys=False, allow_unicode=True, width=120)


def _degrees(machine: Machine) -> tuple[int, ...]:
    topology = TOPOLOGIES.get(machine.instance or "")
    if topology is None:
        return ()
    rows = sorted(DEGREES[topology.family].values(), key=lambda row: not row.documented)
    return tuple(row.tp for row in rows if row.tp <= topology.cores)


def _own_spec(folder: Path) -> FolderSpec:
    path = folder / SPEC
    try:
        text = path.read_text()
        errors = [problem for problem in parse(text, str(path), str(folder)).problems if problem.severity == "error"]
        spec = None if errors else yaml.safe_load(text)
        for fields in () if spec is None else (spec.get("defaults") or {}, *spec["models"].values()):
            _make_absolute(fields, folder)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise Failed("model-folder-unreadable", f"{path}: {error}", VALIDATE) from None
    if spec is None:
        fact = "; ".join(f"{problem.where}: {problem.what}" for problem in errors)
        raise Failed("model-folder-unreadable", fact, VALIDATE)
    return FolderSpec(spec)


def _make_absolute(fields: Fields, folder: Path) -> None:
    """Replaces relative paths by those in the folder, wherever `ModelSpec` resolves them."""

    def resolve(place: Any, keys: Iterable[Any]) -> None:
        for key in keys:
            if isinstance(value := place[key], str) and is_path(value):
                place[key] = resolved(value, folder)

    resolve(fields, fields.keys() & {"source", "neff_cache"})
    for mapping, keys in (("draft", {"source"}), ("engine_options", {"quantized_checkpoints_path"})):
        if isinstance(inner := fields.get(mapping), dict):
            resolve(inner, inner.keys() & keys)
    if isinstance(adapters := fields.get("adapters"), dict):
        resolve(adapters, adapters)
    server = fields.get("server")
    if isinstance(server, dict) and isinstance(command := server.get("command"), list):
        resolve(command, range(len(command))[:1])


def _lmi_settings(environment: Mapping[str, str]) -> list[LmiSetting]:
    """Returns LMI's settings in a container's environment."""
    chosen = {key: value for key, value in environment.items() if key.startswith(LMI_VARIABLES)}
    return read_environment(json.dumps(chosen), "environment") if chosen else []


def _imported(models: list[LmiModel], machine: Machine, name: str) -> FolderSpec:
    """Returns the spec of LMI's models. Without devices the engine is `cpu`, and settings for Neuron are dropped."""
    emulated = machine.instance is None
    if len(models) == 1:
        models = [replace(models[0], name=name)]
    imported = import_lmi(models, instance=machine.instance or DEFAULT_EMULATION, engine="cpu" if emulated else None)
    refused = [str(outcome) for outcome in imported.outcomes if outcome.fate == "refused"]
    if refused and not emulated:
        hint = f"change these settings, or write a {SPEC}: corewright import lmi shows what becomes of each"
        raise Failed("lmi-refused", "; ".join(refused), hint)
    spec = yaml.safe_load(imported.spec)
    if emulated:
        spec["hosts"] = {"emulate": DEFAULT_EMULATION}
    return FolderSpec(spec, tuple(str(outcome) for outcome in imported.outcomes if outcome.fate != "mapped"))


# LMI


def lmi_models(file: str | None, environment: list[LmiSetting]) -> list[LmiModel]:
    """Returns the models of a `serving.properties`, of a folder with one or with such folders, or else of the
    environment. Raises UnreadableSettings."""
    if file is None:
        listed = next((setting for setting in environment if setting.written == LOADED), None)
        urls = [] if listed is None else re.split(r"[, ]+", listed.value.strip(", "))
        return [_listed_model(url, environment) for url in urls] or [LmiModel("", [], environment)]
    path = Path(file)
    if file == "-" or unusable_path(file) or not path.is_dir():
        folder = Path.cwd() if file == "-" else path.absolute().parent
        return [LmiModel("", _properties(file), environment, str(folder))]
    folders = [path] if (path / PROPERTIES).is_file() else sorted(path.iterdir())
    models = [
        LmiModel(each.absolute().name, _properties(str(each / PROPERTIES)), environment, str(each.absolute()))
        for each in folders
        if (each / PROPERTIES).is_file()
    ]
    if not models:
        raise UnreadableSettings(f"{file}: no {PROPERTIES} in the folder, nor in the folders below")
    return models


def _listed_model(url: str, environment: list[LmiSetting]) -> LmiModel:
    """Returns a model that the environment lists."""
    match = _LOADED.fullmatch(url)
    name, source = (match[1], match[2]) if match else ("", url)
    source = source.removeprefix("file://")
    own = Path(source) / PROPERTIES
    present = not unusable_path(source) and own.is_file()
    return LmiModel(name, _properties(str(own)) if present else [], environment, source, listed=True)


def _properties(name: str) -> list[LmiSetting]:
    return read_properties(content(name), label(name))


def content(name: str) -> str:
    """Returns the text of a file, or of standard input (`-`), without its byte order mark. Windows PowerShell redirects
    to UTF-16. Raises UnreadableSettings."""
    if name == "-":
        return sys.stdin.read().removeprefix("\ufeff")
    try:
        data = Path(name).read_bytes()
    except OSError as error:
        raise UnreadableSettings(f"{name}: {error.strerror}") from None
    is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return data.decode("utf-16" if is_wide else "utf-8-sig", errors="replace")


def label(name: str) -> str:
    """Returns the name of a file in messages."""
    return "stdin" if name == "-" else name
