"""Options of the Neuron packages that ``engine_options`` cannot set: the field that replaces them, or the reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TABLES: Mapping[str, Mapping[str, Mapping[str, list[str]]]] = json.loads(
    Path(__file__).with_name("owned.json").read_bytes()
)


def _by_option(tables: Mapping[str, Mapping[str, list[str]]]) -> Mapping[str, Mapping[str, str]]:
    """{table: {text: options}} -> {table: {option: text}}."""
    return {
        table: {option: text for text, options in rows.items() for option in options} for table, rows in tables.items()
    }


FIELDS = _by_option(_TABLES["fields"])
"""Class, or package (the keywords of every constructor) -> option -> the field of the spec that replaces it."""

UNSERVED = _by_option(_TABLES["unserved"])
"""Class, or package -> option -> why it cannot be set. ``is_default`` values are accepted."""

_ON_BY_DEFAULT = frozenset({"has_pre_attention_norm", "save_sharded_checkpoint"})


def is_default(name: str, value: Any) -> bool:
    """Returns whether an option of ``UNSERVED`` has no effect: null, or a Boolean option as the engine has it."""
    return value is None or value is (name in _ON_BY_DEFAULT)
