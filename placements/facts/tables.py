"""Reads the tables that are kept as data files beside the modules which hold them."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent.parent


def has_table(path: str) -> bool:
    """Returns whether there is a table of that path."""
    return (_FOLDER / path).is_file()


def read_table(path: str) -> Any:
    """Returns a table by its path in placements: the rows of a .csv as mappings, or the value of a .json."""
    text = (_FOLDER / path).read_text()
    return list(csv.DictReader(text.splitlines())) if path.endswith(".csv") else json.loads(text)


def by_name(rows: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Returns a table of names by what they share, {text: names}, as {name: text}."""
    return {name: text for text, names in rows.items() for name in names}
