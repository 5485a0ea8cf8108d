"""The parts that the OpenAPI documents of the gateway and of the admin API share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

Schema = dict[str, Any]


def components(kinds: Sequence[Any]) -> tuple[dict[type, Schema], dict[str, Schema]]:
    """Returns a reference to each type, and the schemas of these types and all nested ones, by name."""
    references, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    return dict(zip(kinds, references, strict=True)), schemas


def operation_id(method: str, path: str) -> str:
    """Returns an operation id such as `postRolloutUndo`."""
    words = re.findall(r"[a-z]+[0-9]*", path)
    return "".join([method.lower(), *(word.capitalize() for word in words)])


def json_content(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def json_response(description: str, schema: Schema) -> dict[str, Any]:
    return {"description": description, "content": json_content(schema)}
