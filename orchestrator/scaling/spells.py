"""The spells of a model: times with requests, between silences. Pure: the time is an argument."""

from __future__ import annotations

import math
from dataclasses import dataclass

SILENCE_S = 60.0  # a spell ends after so long without an arrival
BEGINNING_S = 15.0  # added to the length of a spell, so that its first arrivals make no forecast
MEMORY_S = 3600.0  # time constant of the ended spells


@dataclass(frozen=True)
class Spells:
    """The present spell, if there is one, and the sums of the ended ones."""

    began: float | None = None
    last: float = 0.0  # when a request arrived last
    arrived: int = 0  # in the present spell
    past: float = 0.0  # arrivals in ended spells, decaying
    past_s: float = 0.0  # the seconds of these, decaying

    def after(self, now: float, seconds: float, arrived: int) -> Spells:
        """Returns the spells with so many arrivals in the seconds before ``now``."""
        keep = math.exp(-seconds / MEMORY_S)
        past, past_s = self.past * keep, self.past_s * keep
        if arrived:
            began = now - seconds if self.began is None else self.began
            return Spells(began, now, self.arrived + arrived, past, past_s)
        if self.began is not None and now - self.last > SILENCE_S:
            return Spells(past=past + self.arrived, past_s=past_s + self.last - self.began)
        return Spells(self.began, self.last, self.arrived, past, past_s)

    def rate(self, now: float) -> float:
        """Returns the arrivals per second within spells; 0.0 between two of them."""
        if self.began is None:
            return 0.0
        return (self.past + self.arrived) / (self.past_s + now - self.began + BEGINNING_S)
