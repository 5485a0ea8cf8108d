"""Recognizes files of other tools that were given in place of a spec."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from placements.spec.field_type import keys_at
from placements.spec.key_names import is_named, normalized, shortened
from placements.spec.yaml_tree import MAX_CHARACTERS, SHOWN


def other_format(value: Any, text: str | bytes) -> tuple[str, str] | None:
    """Returns the problem and the hint for a file of another format; None if it may be a spec."""
    if isinstance(value, dict):
        if "apiVersion" in value and "kind" in value:
            kind = f" of kind {value['kind'][:SHOWN]}" if isinstance(value["kind"], str) else ""
            return f"the file is a Kubernetes manifest{kind}, not a spec", f"corewright reads no manifests; {_BEGIN}"
        if servers := _of_llama_swap(value):
            used = dict.fromkeys(key for fields in (value, *servers) for key in fields)
            fields = _listed({key: _LLAMA_SWAP[key] for key in used if key in _LLAMA_SWAP})
            hint = f"{fields}; with engine: server and server.slots; a name with : or / becomes an alias; {_BEGIN}"
            return "the file is a config of llama-swap, not a spec", hint
        if flags := _of_vllm(value):
            fields = _listed({key: field for key, field in flags.items() if field})
            hint = f"{fields}; docs/from-vllm-and-lmi.md lists all flags; {_BEGIN}"
            return "the file is a config of vLLM (vllm serve --config), not a spec", hint
        return next((said for keys, said in _BY_KEYS.items() if keys <= value.keys()), None)
    start = text[:MAX_CHARACTERS]
    lines = (start.decode(errors="replace") if isinstance(start, bytes) else start).splitlines()
    first = next((line for line in lines if line.strip() and not line.lstrip().startswith(("#", "!"))), "")
    if not _PROPERTY.match(first):
        return None
    return "the file has properties, like serving.properties of LMI; it is not a spec", (
        "corewright import lmi FILE writes its spec; docs/from-vllm-and-lmi.md lists the field for each property"
    )


def _of_llama_swap(value: Mapping[Any, Any]) -> list[Mapping[Any, Any]]:
    """Returns the models of a config of llama-swap, each with its command; [] for another file."""
    models = None if _OWN & value.keys() else value.get("models")
    entries = models.values() if isinstance(models, dict) else ()
    return [fields for fields in entries if isinstance(fields, dict) and "cmd" in fields]


def _of_vllm(value: Mapping[Any, Any]) -> dict[str, str]:
    """Returns the flags in a config of vLLM, each with the field of a model that it becomes or ""; {} for another
    file."""
    if not all(isinstance(key, str) for key in value) or value.keys() & {"models", *_OWN}:
        return {}
    fields = keys_at(("models", "")) or ()
    flags = {key: next((each for each in fields if is_named(key, each)), "") for key in value}
    known = [key for key, field in flags.items() if field and normalized(key) != field]
    return flags if isinstance(value.get("model"), str) or len(known) > 1 else {}


def _listed(fields: Mapping[str, str]) -> str:
    """Returns which field each key becomes: "cmd is server.command, ttl is scaling.idle_s"."""
    return ", ".join(f"{shortened(key)} is {field}" for key, field in list(fields.items())[:MOST_LISTED])


_OWN = frozenset({"version", "hosts", "engines", "defaults"})  # keys of a spec, which neither of these has
MOST_LISTED = 20
"""The most keys of another tool in one hint."""

_LLAMA_SWAP: Mapping[str, str] = {
    "cmd": "server.command",
    "env": "server.env",
    "checkEndpoint": "server.ready",
    "concurrencyLimit": "server.slots",
    "ttl": "scaling.idle_s",
    "aliases": "aliases",
    "healthCheckTimeout": "deadlines.start_s",
}
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
