"""Writes the generated blocks of docs/cli.md: the routes of the admin API, and the JSON Schema of the status."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from orchestrator.api.routes import ROUTES
from orchestrator.messages.controller_settings import ADMIN_PATH
from orchestrator.messages.fleet_status import FleetStatus

_BLOCK = re.compile(
    r"(?P<begin><!-- generated from the (?:routes|types): (?P<name>[a-z]+) -->\n).*?(?P<end><!-- end of generated -->)",
    re.DOTALL,
)


def renewed(page: str) -> str:
    """The page with each generated block made anew. KeyError for a block of a name that is no table's."""
    return _BLOCK.sub(lambda match: f"{match['begin']}\n{TABLES[match['name']]()}\n{match['end']}", page)


def _routes() -> str:
    lines = ["| route | purpose | fields | response |", "|---|---|---|---|"]
    shown: set[type] = set()  # their keys stand in an earlier row
    for route in ROUTES:
        asked = [field for field in msgspec.structs.fields(route.request) if f"{{{field.name}}}" not in route.path]
        answers = " or ".join(
            f"`{kind.__name__}`" + ("" if kind in shown else f": {_keys(msgspec.structs.fields(kind))}")
            for kind in route.answers
        )
        shown |= set(route.answers)
        lines.append(f"| `{route.method} {ADMIN_PATH}{route.path}` | {route.summary} | {_keys(asked)} | {answers} |")
    return "\n".join(lines) + "\n"


def _keys(fields: Iterable[msgspec.structs.FieldInfo]) -> str:
    return ", ".join(f"`{field.encode_name}`" + ("" if field.required else "?") for field in fields)


def _status() -> str:
    (reference,), types = msgspec.json.schema_components([FleetStatus], ref_template="{name}")
    names = [str(reference["$ref"]), *sorted(types.keys() - {reference["$ref"]})]
    lines = ["| object | key | type |", "|---|---|---|"]
    for name in names:
        for key, schema in types[name].get("properties", {}).items():
            optional = "" if key in types[name]["required"] else "?"
            lines.append(f"| `{name}` | `{key}`{optional} | {_type(schema, types)} |")
    return "\n".join(lines) + "\n"


def _type(schema: Mapping[str, Any], types: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        values = types[schema["$ref"]].get("enum")
        return f"`{schema['$ref']}`" if values is None else ", ".join(f"`{value}`" for value in sorted(values))
    if "anyOf" in schema:
        return " or ".join(_type(each, types) for each in schema["anyOf"])
    if schema["type"] == "array":
        return f"list of {_type(schema['items'], types)}"
    if "additionalProperties" in schema:
        return f"{_type(schema['additionalProperties'], types)} by name"
    return str(schema["type"])


TABLES = {"routes": _routes, "status": _status}
