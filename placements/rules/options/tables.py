"""Loads the options of the Neuron engines, recorded from their sources, from tables.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from placements.rules.options.option import Option

TABLES: Mapping[str, Mapping[str, Option]] = {
    table: {name: Option(**row) for name, row in rows.items()}
    for table, rows in json.loads(Path(__file__).with_name("tables.json").read_bytes()).items()
}
"""Table -> name -> option. A table is ``package.Class``, or ``package:model_type`` for the constructor of a family."""
