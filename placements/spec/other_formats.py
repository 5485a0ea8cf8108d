"""Recognizes files of other tools that were given in place of a spec."""

from __future__ import annotations

import re
from typing import Any

from placements.spec.yaml_tree import MAX_CHARACTERS, SHOWN


def other_format(value: Any, text: str | bytes) -> tuple[str, str] | None:
    """Returns the problem and the hint for a file of another format; None if it may be a spec."""
    if isinstance(value, dict):
        if not ("apiVersion" in value and "kind" in value):
            return None
        kind = f" of kind {value['kind'][:SHOWN]}" if isinstance(value["kind"], str) else ""
        return f"the file is a Kubernetes manifest{kind}, not a spec", f"corewright does not read manifests; {_BEGIN}"
    start = text[:MAX_CHARACTERS]
    lines = (start.decode(errors="replace") if isinstance(start, bytes) else start).splitlines()
    first = next((line for line in lines if line.strip() and not line.lstrip().startswith(("#", "!"))), "")
    if not _PROPERTY.match(first):
        return None
    return "the file has properties, like serving.properties of LMI; it is not a spec", (
        f"docs/from-vllm-and-lmi.md lists the field for each property; {_BEGIN}"
    )


_BEGIN = "write a spec that begins with models: {NAME: {source: ...}}"
_PROPERTY = re.compile(r"\s*[A-Za-z][\w.-]*\s*=")
