"""The JSON Schema of a spec file, for editors."""

from __future__ import annotations

from typing import Any

from placements.engines.registry import NAMES
from placements.spec.notation import DURATION, NAME, in_words
from placements.spec.schema import OWN_FIELDS, HostsSpec, ModelSpec, Spec
from placements.spec.sections import EngineSettings

_DEFAULTS_MEANING = (
    f"Default values of the models' fields, except {', '.join(f'`{name}`' for name in OWN_FIELDS[:-1])} "
    f"and `{OWN_FIELDS[-1]}`. A field counts "
    "as a whole: a model's `replicas` replaces the default's completely."
)
_INTERNAL = frozenset({"base_dir", "broken", "places"})


def _with_units(field: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a number of seconds that may also be a duration."""
    number = {key: field[key] for key in ("type", "minimum", "exclusiveMinimum", "maximum") if key in field}
    rest = {key: value for key, value in field.items() if key not in number}
    duration = {"type": "string", "pattern": f"^{DURATION}$", **in_words("a duration")}
    return {**rest, "anyOf": [*(field.get("anyOf") or [number]), duration]}


def json_schema() -> dict[str, Any]:
    """Returns the JSON Schema of a spec file, for editors. Looser than `parse` and `checks`, never stricter."""
    model, hosts = ModelSpec.model_json_schema(), HostsSpec.model_json_schema()
    definitions = {**model.pop("$defs"), **hosts.pop("$defs"), "Hosts": hosts}
    definitions["EngineSettings"] = EngineSettings.model_json_schema()
    definitions["Replicas"] = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 1000}, definitions["Replicas"]]}
    definitions["Spread"] = {"anyOf": [{"const": "host"}, definitions["Spread"]]}
    fields = {key: value for key, value in model["properties"].items() if key not in {*_INTERNAL, "name"}}
    fields["replicas"]["default"] = 1
    for held in (fields, *(definition.get("properties", {}) for definition in definitions.values())):
        for key in held:
            if key.endswith("_s"):
                held[key] = _with_units(held[key])
    defaults = {key: value for key, value in fields.items() if key not in OWN_FIELDS}
    single_type = {"$ref": "#/$defs/Hosts"}
    name = {"type": "string", "pattern": f"^{NAME.pattern}$"}
    described = {key: {"description": field.description} for key, field in Spec.model_fields.items()}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "corewright spec",
        "type": "object",
        "additionalProperties": False,
        "required": ["models"],
        "properties": {
            "version": {**described["version"], "const": 1, "default": 1},
            "name": {**described["name"], **name, **in_words("a name"), "default": "fleet"},
            "hosts": {
                **described["hosts"],
                **in_words("a mapping, or a list of mappings"),
                "anyOf": [single_type, {"type": "array", "minItems": 1, "items": single_type}],
            },
            "engines": {
                **described["engines"],
                **in_words("a mapping from engines to settings"),
                "type": ["object", "null"],
                "additionalProperties": False,
                "properties": {engine: {"$ref": "#/$defs/EngineSettings"} for engine in NAMES},
                "default": {},
            },
            "defaults": {
                "description": _DEFAULTS_MEANING,
                **in_words("a mapping"),
                "type": ["object", "null"],
                "additionalProperties": False,
                "properties": defaults,
            },
            "models": {
                **described["models"],
                "type": "object",
                "propertyNames": name,
                "additionalProperties": {"$ref": "#/$defs/Model"},
            },
        },
        "$defs": {
            **definitions,
            "Model": {"type": "object", "additionalProperties": False, "properties": fields},
        },
    }
    return {key: _on_one_line(value) for key, value in schema.items()}


def _on_one_line(schema: Any, key: str = "") -> Any:
    """Returns the schema with each description on one line."""
    if isinstance(schema, dict):
        return {name: _on_one_line(value, name) for name, value in schema.items()}
    if isinstance(schema, list):
        return [_on_one_line(item) for item in schema]
    return " ".join(schema.split()) if key == "description" else schema
