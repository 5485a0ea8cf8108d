"""Names of keys and values: in messages, misspelt, and in other tools (vLLM, LMI, NxD Inference, Kubernetes)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from placements.facts.tables import by_name, read_table
from placements.spec.problems import Path

_TABLES = read_table("spec/other_names.json")

OTHER_FIELDS: Mapping[str, list[str]] = _TABLES["fields"]
"""Field -> its names in other tools."""

OTHER_PLACES: Mapping[str, str] = by_name(_TABLES["places"])
"""Name in other tools, of what no field of that name replaces -> where it is set, or why it is not."""

OTHER_VALUES: Mapping[str, str] = by_name(_TABLES["values"])
"""Value in other tools -> the value of a spec."""

_SWITCHES: Mapping[str, tuple[object, object]] = {
    **dict.fromkeys(("load_in_8bit", "quantized", "neuron_quant", "int8"), ("int8", None)),
    **dict.fromkeys(("kv_cache_quant", "kv_quant"), ("fp8", None)),
    **dict.fromkeys(("on_device_sampling", "on_device_generation", "sample_on_device"), ("device", "host")),
    **dict.fromkeys(("anti_affinity", "antiaffinity"), ("host", None)),
}
"""Key of another tool -> the values of the field that replaces it, for true and for false."""


def label_of(path: Path) -> str:
    """Returns the path as text, without the model's name: "tp_degree", "cores[1]", "replicas.max"."""
    inner = len(path) > 1 and not isinstance(path[1], int)  # the items of a list keep the list's name
    parts = path[2:] if path[:1] == ("models",) and len(path) > 2 else path[1:] if inner else path
    label = ""
    for part in parts:
        label += f"[{part}]" if isinstance(part, int) else f".{part}" if label else part
    return label or "the spec"


def shown_as(text: str, kind: str, plain: bool) -> str:
    """Returns a value as it is written in the spec; a text in quotes."""
    return f'"{text}"' if kind == "text" and plain else text


def shortened(text: str) -> str:
    """Returns at most 60 characters."""
    return text if len(text) <= 60 else text[:57] + "..."


def normalized(key: str) -> str:
    """Returns a key in the notation of the spec's keys: "Max-Len" is max_len."""
    return key.lower().replace("-", "_").replace(" ", "_")


def meant_key(key: str, allowed: tuple[str, ...]) -> str | None:
    """Returns the allowed key that a key is another name or a misspelling of; None if there is none."""
    exact = next((known for known in allowed if is_named(key, known)), None)
    return exact or next(iter(difflib.get_close_matches(normalized(key), allowed, 1, 0.7)), None)


def is_named(key: str, known: str) -> bool:
    """Returns whether a key is a known one in another notation, or its name in another tool."""
    plain = normalized(key)
    return plain == known or plain in OTHER_FIELDS.get(known, ())


def nearest_keys(key: str, allowed: tuple[str, ...]) -> str:
    """Returns a hint with the three known keys that share most pairs of letters; difflib is too slow for many keys."""
    if len(allowed) <= 3:
        return f"known keys are {', '.join(allowed)}"
    pairs = _pairs(normalized(key)[:60])
    nearest = sorted(allowed, key=lambda known: -len(pairs & _pairs(known)) / (len(pairs) + len(known)))
    return f"the nearest known keys are {', '.join(nearest[:3])}"


def _pairs(word: str) -> set[str]:
    return {word[i : i + 2] for i in range(len(word) - 1)}


def did_you_mean(names: list[str]) -> str:
    """Returns a hint with the first name; "" without one."""
    return f'did you mean "{names[0]}"?' if names else ""


def converted(key: str, field: str, value: Any) -> Any:
    """Converts the value of a key of another tool to the value of the field that replaces it."""
    if isinstance(value, bool):
        when_true, when_false = _SWITCHES.get(key, (True, False))
        return when_true if value else when_false
    if field == "spread" and isinstance(value, int):
        return {"host": value}
    return value
