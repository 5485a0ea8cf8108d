"""Which requests were good enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.bench.measurement import Measured

NAMES = ("ttft", "itl", "e2e")


@dataclass(frozen=True)
class Slo:
    """A service-level objective for each request, in milliseconds; None: not asked for."""

    ttft: float | None = None
    itl: float | None = None  # of the request's mean, which vLLM calls TPOT
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """``ttft=500,itl=50,e2e=10000``; ``tpot`` is another name of ``itl``. Raises ValueError."""
        found: dict[str, float] = {}
        for part in text.split(","):
            name, equals, number = (word.strip() for word in part.partition("="))
            name = "itl" if name == "tpot" else name
            try:
                value = float(number.removesuffix("ms"))
            except ValueError:
                value = math.nan
            if not equals or name not in NAMES or name in found or not (0 < value < math.inf):
                raise ValueError(f"{part!r} is no objective; such as ttft=500,itl=50,e2e=10000, in milliseconds")
            found[name] = value
        return cls(**found)

    def met(self, one: Measured) -> bool:
        """Whether a request was answered whole and keeps every bound. An answer of one token has no ITL to exceed."""
        if not one.ok or one.ttft_s is None or one.e2e_s is None:
            return False
        values = ((self.ttft, one.ttft_s), (self.itl, one.tpot_s), (self.e2e, one.e2e_s))
        return all(bound is None or value is None or value * 1000 <= bound for bound, value in values)

    def share(self, measured: Sequence[Measured]) -> float:
        """Of all requests that were sent, those that meet it; the failed ones count as not met."""
        return sum(1 for one in measured if self.met(one)) / len(measured) if measured else 0.0

    def __str__(self) -> str:
        given = ((name, getattr(self, name)) for name in NAMES)
        return ", ".join(f"{name} <= {value:g} ms" for name, value in given if value is not None)
