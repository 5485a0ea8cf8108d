"""What the engine ``optimum-neuron`` can do."""

from __future__ import annotations

from types import MappingProxyType

from placements.engines.capabilities import NEURON_INDEX, Capabilities, OptionRange

CAPABILITIES = Capabilities(
    engine="optimum-neuron",
    runs_on="neuron",
    package="optimum.neuron",
    requires=("optimum-neuron",),
    loads=("hf", "optimum-first", "optimum", "precompiled"),
    compiles_weights=True,
    install=f"pip install 'optimum-neuron[neuronx]==0.4.5' {NEURON_INDEX}",
    options=MappingProxyType({"prefill_chunk_size": OptionRange(0, 1 << 24, whole=True)}),
)
"""``prefill_chunk_size``: tokens of a prompt in one run, from Optimum Neuron 0.4.6 on; 0: all."""
