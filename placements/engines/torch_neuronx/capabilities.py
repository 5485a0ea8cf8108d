"""What the engine ``torch-neuronx`` can do."""

from __future__ import annotations

from types import MappingProxyType

from placements.engines.capabilities import NEURON_INDEX, Capabilities, OptionRange
from placements.engines.cpu.capabilities import FIRST_TRANSFORMERS
from placements.facts.encoders import KINDS

CAPABILITIES = Capabilities(
    engine="torch-neuronx",
    runs_on="neuron",
    kinds=tuple(kind for kind in KINDS if kind != "generate"),
    requires=("torch-neuronx", "neuronx-cc", "torch", "safetensors", "numpy", "transformers"),
    transformers=FIRST_TRANSFORMERS,
    install=f"AWS's Neuron images have it; else pip install torch-neuronx neuronx-cc {NEURON_INDEX}",
    options=MappingProxyType({"compiled_batch": OptionRange(1, 1024, whole=True)}),
)
"""``compiled_batch``: inputs of a compiled batch."""
