"""What the engine ``cpu`` can do."""

from __future__ import annotations

from types import MappingProxyType

from placements.engines.capabilities import Capabilities, OptionRange
from placements.facts.encoders import KINDS

FIRST_TRANSFORMERS = "4.57"
"""The first release of transformers that the cpu engine runs with. Other parts of corewright accept earlier ones, which
images of the Neuron SDK have."""

CAPABILITIES = Capabilities(
    engine="cpu",
    runs_on="cpus",
    kinds=KINDS,
    dtype="fp32",
    requires=("torch", "safetensors", "numpy"),
    options=MappingProxyType(
        {"prefill_chunk": OptionRange(1, 1 << 24, whole=True), "prefix_cache": None, "compile": None}
    ),
    runs_code=True,
)
"""``prefill_chunk``: tokens of a prompt in one forward pass; ``prefix_cache``: reuse the longest prefix that a slot
still holds; ``compile``: compile each bucket with torch.compile."""
