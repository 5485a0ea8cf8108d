"""Goodput: the requests that meet a service-level objective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.bench.measurement import Measured

NAMES = ("ttft", "itl", "e2e")


@dataclass(frozen=True)
class Slo:
    """The service-level objective of each request, in milliseconds; None: no bound."""

    ttft: float | None = None
    itl: float | None = None  # the mean of the request, which vLLM calls TPOT
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Parses ``ttft=500,itl=50,e2e=10000``; ``tpot`` is an alias of ``itl``. Raises ValueError."""
        bounds: dict[str, float] = {}
        for part in text.split(","):
            name, equals, number = (word.strip() for word in part.partition("="))
            name = "itl" if name == "tpot" else name
            try:
                value = float(number.removesuffix("ms"))
            except ValueError:
                value = math.nan
            if not equals or name not in NAMES or name in bounds or not (0 < value < math.inf):
                raise ValueError(f"{part!r} is not an objective; use ttft=500,itl=50,e2e=10000, in milliseconds")
            bounds[name] = value
        return cls(**bounds)

    def met(self, request: Measured) -> bool:
        """Returns whether a request was answered completely within all bounds. An answer of one token meets any ITL."""
        if not request.ok or request.ttft_s is None or request.e2e_s is None:
            return False
        values = ((self.ttft, request.ttft_s), (self.itl, request.tpot_s), (self.e2e, request.e2e_s))
        return all(bound is None or value is None or value * 1000 <= bound for bound, value in values)

    def share(self, measured: Sequence[Measured]) -> float:
        """Returns the fraction of all sent requests that meet it; failed ones do not."""
        return sum(1 for request in measured if self.met(request)) / len(measured) if measured else 0.0

    def __str__(self) -> str:
        bounds = ((name, getattr(self, name)) for name in NAMES)
        return ", ".join(f"{name} <= {value:g} ms" for name, value in bounds if value is not None)
