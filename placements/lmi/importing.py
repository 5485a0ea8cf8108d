"""Writes the spec of the models of an LMI container."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from placements.engines.registry import Engine
from placements.facts.topology import TOPOLOGIES, Host
from placements.lmi.conversion import Conversion, SettingOutcome, line_of
from placements.lmi.rows import ENGINES, HANDLERS, ROWS, reason_for
from placements.lmi.settings import IMAGE, LmiSetting, merged
from placements.lmi.vllm_rows import vllm_row
from placements.rules.checks import check
from placements.spec.notation import name_from
from placements.spec.parse import parse

VERSION = (0, 28)
"""The version of DJL Serving whose defaults are written, if none is known."""

_IMAGE = re.compile(r"djl-inference:v?(\d+)\.(\d+)")
SMART = (0, 30)
"""The first version of DJL Serving that chooses some defaults by the model's size."""

LOADED = "SERVING_LOAD_MODELS"
"""The variable that lists the models to load."""

COMMENTS = 48
"""The column of comments, at most."""

USUAL_DEGREES = frozenset({1, 2, 4, 8})
"""Degrees that divide the heads of most models. With others, transformers-neuronx pads them, without a setting."""

UNNAMED = "it is missing: no model is named; of a SageMaker model it is the S3Uri of the ModelDataSource"

_SETTINGS: Mapping[str, frozenset[str]] = {
    "tp_degree": frozenset({"tensor_parallel_degree", "tensor_parallel_size"}),
    "max_batch": frozenset({"max_rolling_batch_size", "batch_size", "max_dynamic_batch_size", "max_num_seqs"}),
    "max_len": frozenset({"n_positions", "max_model_len"}),
    "max_queue": frozenset({"job_queue_size"}),
    "dtype": frozenset({"dtype"}),
    "threads": frozenset({"OMP_NUM_THREADS"}),
    "allow_head_padding": frozenset(),
}
"""Field with a default of LMI -> the settings that it is from."""

_ORDER = ("source", "revision", "engine", "tp_degree", "replicas", "cores", "max_batch", "max_len", "dtype")


@dataclass(frozen=True)
class LmiModel:
    """The settings of one model: those of its `serving.properties` and of the container's environment."""

    name: str  # of its folder; "" if it has none
    files: Sequence[LmiSetting]
    environment: Sequence[LmiSetting]
    folder: str = ""  # with the checkpoint, if no setting names another source
    listed: bool = False  # by LOADED in the environment


@dataclass(frozen=True)
class Imported:
    """The spec's text, and what became of each setting."""

    spec: str
    outcomes: tuple[SettingOutcome, ...]

    @property
    def refused(self) -> bool:
        """True if a setting has no replacement that behaves the same."""
        return any(outcome.fate == "refused" for outcome in self.outcomes)


def import_lmi(
    models: Sequence[LmiModel],
    *,
    instance: str = "inf2.48xlarge",
    version: tuple[int, int] | None = None,
    engine: Engine | None = None,
    trust_remote_code: bool = False,
) -> Imported:
    """Returns the spec that behaves like these models in one LMI container.

    ``version`` is that of DJL Serving, whose defaults are written out where ours differ; None: that of the image, or
    else `VERSION`. ``engine`` replaces the one that LMI would use.
    """
    cores = TOPOLOGIES[instance].cores
    conversions: dict[str, Conversion] = {}
    for model in models:
        counted = version or _version(model.environment)
        conversion = Conversion(cores, counted >= SMART, len(models) == 1, trust_remote_code)
        _convert(conversion, model, engine)
        name = name_from(model.name or str(conversion.fields.get("source", "")))
        conversions[_free(name, conversions)] = conversion
    spec, owners = _written(instance, conversions)
    while bad := {owners[line]: fact for line, fact in _errors(spec, instance) if line in owners}:
        mapped = [(name, line, fact) for (name, line), fact in bad.items() if line in conversions[name].origins]
        if not mapped:
            break
        for name, line, fact in mapped:
            conversions[name].refuse(line, fact)
            _defaults(conversions[name])
        spec, owners = _written(instance, conversions)
    return Imported(spec, tuple(outcome for each in conversions.values() for outcome in each.sorted_outcomes()))


def _version(environment: Sequence[LmiSetting]) -> tuple[int, int]:
    """Returns the version of DJL Serving of a container's image."""
    match = next((match for each in environment if each.name == IMAGE if (match := _IMAGE.search(each.value))), None)
    return VERSION if match is None else (int(match[1]), int(match[2]))


def _errors(spec: str, instance: str) -> list[tuple[int, str]]:
    """Returns the line of each error of a spec, and what is wrong, as far as it does not depend on the checkpoint."""
    parsed = parse(spec, "spec")
    problems = parsed.problems
    if parsed.spec is not None and parsed.ok:
        topology = TOPOLOGIES[instance]
        problems = check(parsed.spec, [Host(instance, topology, tuple(range(topology.vcpus)))], room=False)
    return [(int(problem.where.split(":")[1]), problem.what) for problem in problems if problem.severity == "error"]


def _convert(conversion: Conversion, model: LmiModel, engine: Engine | None) -> None:
    settings, hidden = merged(model.files, model.environment)
    conversion.settings = {setting.name: setting for setting in settings}
    loader = _loader(conversion)
    chosen = engine or ENGINES.get(loader, "transformers-neuronx")
    conversion.put("engine", chosen, "chosen by --engine" if engine else "that of LMI's model loader")
    for setting in sorted(settings, key=lambda setting: setting.name not in ("tensor_parallel_degree", "minWorkers")):
        if model.listed and setting.written == LOADED:
            conversion.note(setting, "mapped", "models")
            continue
        row = vllm_row(setting.name) if ENGINES.get(loader) == "vllm" else ROWS.get(setting.name)
        if row is None:
            conversion.note(setting, "dropped", reason_for(setting, loader))
            continue
        try:
            row(conversion, setting)
        except ValueError as error:
            hint = "; # begins a comment only at the beginning of a line" if " #" in setting.value else ""
            conversion.note(setting, "refused", f"{error}{hint}")
    for setting in hidden:
        winner = conversion.settings[setting.name]
        conversion.note(setting, "dropped", f"{winner.written} of {winner.where} counts")
    if "source" not in conversion.fields:
        if model.folder:
            conversion.put("source", model.folder, "the folder of serving.properties")
        elif "model_id" not in conversion.settings:
            where = settings[0].where if settings else "-:1"
            conversion.outcomes.append(SettingOutcome(where, "option.model_id", "refused", UNNAMED))
    _defaults(conversion)


def _loader(model: Conversion) -> str:
    """Returns LMI's model loader: a setting, or else what the batches, the handler or the layout of files require."""
    handler = model.text("entryPoint").removeprefix("djl_python.").removesuffix(".py")
    implied = HANDLERS.get(handler) or ("vllm" if model.text("rolling_batch") == "vllm" else "")
    layout = "optimum" if model.text("partition_schema") == "optimum" else "tnx"
    return model.text("model_loader") or implied or layout


def _defaults(model: Conversion) -> None:
    """Write LMI's defaults where ours differ, except for fields whose settings were refused."""
    fields, refused = model.fields, model.refused
    for name in model.defaults:
        del fields[name], model.comments[name]
    before = set(fields)
    default_batch = "disable" if not model.smart else "auto"
    static = int(fields.get("max_batch", 1)) > 1 and "max_rolling_batch_size" not in model.settings
    rolls = (model.text("rolling_batch") or default_batch) != "disable" and not static
    defaults: dict[str, tuple[Any, str]] = {
        "tp_degree": (1, "LMI's default, if it has not chosen one by memory" if model.smart else "LMI's default"),
        "max_batch": (32, "LMI's default") if rolls else (1, "LMI's default without rolling batches"),
        "max_len": (4096, "LMI's default, or all positions if fewer") if model.smart else (128, "LMI's default"),
        "max_queue": (1000, "LMI's default"),
    }
    if fields["engine"] != "vllm":
        defaults["dtype"] = "fp16", "LMI's default"
        defaults["threads"] = "lmi", "LMI's default, twice the degree"
    if fields["engine"] == "transformers-neuronx" and fields.get("tp_degree", 1) not in USUAL_DEGREES:
        defaults["allow_head_padding"] = True, "transformers-neuronx pads heads with zeros"
    for path, (value, comment) in defaults.items():
        if path not in fields and refused.isdisjoint(_SETTINGS[path]):
            model.put(path, value, comment)
    copies = model.cores // int(fields["tp_degree"]) if "tp_degree" in fields else 1
    if "replicas" not in fields and model.alone and copies > 1:
        model.put("replicas", copies, f"LMI loads a copy on each {fields['tp_degree']} of {model.cores} cores")
    model.defaults = [name for name in fields if name not in before]


def _free(name: str, used: Collection[str]) -> str:
    if name not in used:
        return name
    return next(free for number in itertools.count(2) if (free := f"{name}-{number}") not in used)


def _written(instance: str, models: Mapping[str, Conversion]) -> tuple[str, dict[int, tuple[str, str]]]:
    """Returns the spec, and which model's field or engine option each line has."""
    lines = ["version: 1", f"hosts: {{instance: {instance}}}", "models:"]
    owners = {}
    for name, model in models.items():
        lines.append(f"  {_yaml(name)}:")
        if "source" not in model.fields:
            lines.append("    # source: s3://...  # fill in: no setting names the model")
        texts = dict(_texts(model.fields))
        width = max((len(text) for text in texts.values() if len(text) <= COMMENTS), default=COMMENTS)
        for path, text in texts.items():
            comments = model.comments.get(line_of(path))
            lines.append(f"    {text:{width}}  # {'; '.join(dict.fromkeys(comments))}" if comments else f"    {text}")
            owners[len(lines)] = name, line_of(path)
        lines += [f"    # refused: {_comment(each)}" for each in model.outcomes if each.fate == "refused"]
    return "\n".join(lines) + "\n", owners


def _texts(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields path and text of each line of a model: of each field, and of each engine option."""
    for field in sorted(fields, key=lambda field: (_ORDER.index(field) if field in _ORDER else len(_ORDER), field)):
        if field != "engine_options":
            yield field, f"{field}: {_yaml(fields[field])}"
            continue
        yield field, f"{field}:"
        for name, value in sorted(fields[field].items()):
            yield f"{field}.{name}", f"  {name}: {_yaml(value)}"


def _comment(outcome: SettingOutcome) -> str:
    """Returns what was refused on one line that YAML accepts."""
    return "".join(letter if letter.isprintable() else " " for letter in f"{outcome.written}: {outcome.what}")


def _yaml(value: Any) -> str:
    written = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), sort_keys=False)
    return written.removesuffix("\n").removesuffix("\n...")


def as_dict(imported: Imported) -> Mapping[str, Any]:
    """Returns the result as JSON."""
    report = [
        {"where": line.where, "name": line.written, "fate": line.fate, "what": line.what} for line in imported.outcomes
    ]
    return {"spec": imported.spec, "report": report}
