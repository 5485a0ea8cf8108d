"""Recognizes files of other tools that were given in place of a spec."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from placements.spec.yaml_tree import MAX_CHARACTERS, SHOWN


def other_format(value: Any, text: str | bytes) -> tuple[str, str] | None:
    """Returns the problem and the hint for a file of another format; None if it may be a spec."""
    if isinstance(value, dict):
        if "apiVersion" in value and "kind" in value:
            kind = f" of kind {value['kind'][:SHOWN]}" if isinstance(value["kind"], str) else ""
            return f"the file is a Kubernetes manifest{kind}, not a spec", f"corewright reads no manifests; {_BEGIN}"
        return next((said for keys, said in _BY_KEYS.items() if keys <= value.keys()), None)
    start = text[:MAX_CHARACTERS]
    lines = (start.decode(errors="replace") if isinstance(start, bytes) else start).splitlines()
    first = next((line for line in lines if line.strip() and not line.lstrip().startswith(("#", "!"))), "")
    if not _PROPERTY.match(first):
        return None
    return "the file has properties, like serving.properties of LMI; it is not a spec", (
        "corewright import lmi FILE writes its spec; docs/from-vllm-and-lmi.md lists the field for each property"
    )


_BEGIN = "write a spec that begins with models: {NAME: {source: ...}}"
_BY_KEYS: Mapping[frozenset[str], tuple[str, str]] = {
    frozenset({"cluster_name", "provider"}): (
        "the file is for Ray's cluster launcher (ray up), not a spec",
        f"docs/deploy-ec2.md leads from such a cluster to a spec; {_BEGIN}",
    ),
    frozenset({"applications"}): (
        "the file is a config of Ray Serve (serve deploy), not a spec",
        f"corewright starts its own applications; {_BEGIN}",
    ),
    frozenset({"services"}): (
        "the file is for docker compose, not a spec",
        f"docs/from-vllm-and-lmi.md lists the fields for a server's options; {_BEGIN}",
    ),
}
_PROPERTY = re.compile(r"\s*[A-Za-z][\w.-]*\s*=")
