"""Names of keys in messages: labels of paths, and the keys that a misspelt one may mean."""

from __future__ import annotations

import difflib

from placements.spec.key_names import OTHER_FIELDS
from placements.spec.problems import Path


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
