"""What the engine ``echo`` can do."""

from __future__ import annotations

from types import MappingProxyType

from placements.engines.capabilities import ON_CPUS, Capabilities, OptionRange
from placements.facts.encoders import KINDS

CAPABILITIES = Capabilities(
    engine="echo",
    runs_on="cpus",
    kinds=KINDS,
    dtype="fp32",
    loads=(),
    tokenizer="bytes",
    options=MappingProxyType({"step_ms": OptionRange(0, 3_600_000, whole=False)}),
    imports_long=False,
    penalizes=False,
    unused=ON_CPUS,
)
"""``step_ms``: the duration of a step, to simulate a slow engine."""
