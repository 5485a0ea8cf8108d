"""What the OpenAPI documents of the gateway and of the admin API have in common."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

Schema = dict[str, Any]


def components(kinds: Sequence[Any]) -> tuple[dict[type, Schema], dict[str, Schema]]:
    """A reference to each of these types, and the schemas of all that they hold, by name."""
    references, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    return dict(zip(kinds, references, strict=True)), schemas


def operation_id(method: str, path: str) -> str:
    """Such as postRolloutUndo."""
    words = re.findall(r"[a-z]+", path)
    return "".join([method.lower(), *(word.capitalize() for word in words)])


def json_content(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def json_response(description: str, schema: Schema) -> dict[str, Any]:
    return {"description": description, "content": json_content(schema)}
