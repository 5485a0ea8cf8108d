"""The phases of a replica's start, in its process: how long each took."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

PHASES = ("actor", "process", "imports", "weights", "engine", "warm_up", "tokenizer", "first_token")
"""In the order of a start.

actor        from the decision until Ray has started a process
process      the interpreter, Ray's worker and the replica's own code
imports      the engine's packages
weights      reading the model into memory; the CPU engine maps it, and the first request reads it
engine       the rest of the engine's load: on Neuron also weights, compiled graphs and their start
warm_up      one run of each bucket
tokenizer    its files
first_token  one real request, unless the model returns to where it has served, and the data plane
"""


class StartPhases:
    """Measures the phases of one start, each from the end of the one before. Used by the thread that loads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Starts over: the first phase begins now."""
        self._since = self._clock()
        self.seconds: dict[str, float] = {}

    def end(self, phase: str) -> None:
        """Adds the time since the last end to ``phase``."""
        now = self._clock()
        self.seconds = {**self.seconds, phase: self.seconds.get(phase, 0.0) + now - self._since}
        self._since = now


def phases_of(load_s: float, reported: Mapping[str, float]) -> dict[str, float]:
    """Returns the phases of a start of ``load_s`` seconds, as the controller measured it: the reported ones, and
    before them the time until there was a process.

    A process that Ray had started earlier counts from the decision, as far as the other phases leave time.
    """
    if not reported:
        return {}
    rest_s = load_s - sum(seconds for phase, seconds in reported.items() if phase != "process")
    process_s = max(0.0, min(reported.get("process", 0.0), rest_s))
    return {"actor": max(0.0, rest_s - process_s), **reported, "process": process_s}


def next_phase(ended: Collection[str], usual: Collection[str]) -> str | None:
    """Returns the phase that runs after the ``ended`` ones, or None if it is unknown. Engines have different phases:
    the ``usual`` ones are those of the model's last start."""
    later = PHASES[max((PHASES.index(phase) for phase in ended if phase in PHASES), default=-1) + 1 :]
    return next((phase for phase in later if phase in usual), None) if ended else None


START = StartPhases()
"""Those of this process, which starts one replica."""
