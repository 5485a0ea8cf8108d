"""Faults that a test has planned in $NEURON_DOUBLE_STATE/faults.json: one object, or a list of them.

at       claim | load_collectives | allocate | load_neff | execute | compile
status   the runtime's status code; or
exit     the exit code of the compiler; or
text     the whole message; or
says     what the compiler prints before it fails without an exit code; or
hangs    the compiler starts processes and never ends; or
die      the whole process is killed, in the midst of a compile
count    it comes with the n-th such operation of a process since the file was written; 1 when left out
core     only in a process that holds that core (its number on the host)
tag      only in a process whose NEURON_PROCESS_TAG begins with that
times    in how many processes at most; without it, in every one
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from neuron_double.machine import state

_seen: Counter[tuple[int, int]] = Counter()  # (when the file was written, which fault): operations since


def due(at: str, cores: Sequence[int] = ()) -> dict[str, Any] | None:
    """The fault that this operation meets now, if any. Counts the operation."""
    path = state() / "faults.json"
    try:
        written = path.stat().st_mtime_ns
        planned = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    for index, fault in enumerate(planned if isinstance(planned, list) else [planned]):
        if fault["at"] != at or ("core" in fault and fault["core"] not in cores):
            continue
        if not os.environ.get("NEURON_PROCESS_TAG", "").startswith(fault.get("tag", "")):
            continue
        _seen[written, index] += 1
        if _seen[written, index] == fault.get("count", 1) and _one_more(written, index, fault.get("times")):
            return dict(fault)
    return None


def forget() -> None:
    """Count from the beginning."""
    _seen.clear()


def _one_more(written: int, index: int, times: int | None) -> bool:
    """Returns whether it has struck less than ``times`` times; then it counts one more, for all processes."""
    if times is None:
        return True
    with (state() / f"faults.{written}.{index}").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        struck = len(file.read())
        if struck < times:
            file.write("x")
        return struck < times
