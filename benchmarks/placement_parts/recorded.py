"""Results of solver runs that take too long for every measurement, with the digest of what they were run on."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.placement_parts.exact import Loads
from benchmarks.placement_parts.fleet import Fleet

PATH = Path(__file__).with_name("recorded.json")


def recall(fleet: Fleet) -> Loads | None:
    """What CP-SAT found for exactly this fleet; None when that was not measured."""
    entry = _entries().get(fleet.digest)
    return None if entry is None else Loads(entry["loads"], entry["bound"], entry["seconds"])


def record(name: str, fleet: Fleet, loads: Loads) -> None:
    """Keep it under the fleet's digest; an older result of the same name goes."""
    entries = {digest: entry for digest, entry in _entries().items() if entry["name"] != name}
    entries[fleet.digest] = {
        "name": name,
        "loads": loads.loads,
        "bound": loads.bound,
        "seconds": round(loads.seconds, 1),
        "ortools": version("ortools"),
    }
    ordered = dict(sorted(entries.items(), key=lambda item: str(item[1]["name"])))
    PATH.write_text(json.dumps(ordered, indent=1) + "\n")


def _entries() -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = json.loads(PATH.read_text()) if PATH.exists() else {}
    return entries
