"""What the engine ``transformers-neuronx`` can do."""

from __future__ import annotations

from placements.engines.capabilities import NEURON_INDEX, Capabilities

CAPABILITIES = Capabilities(
    engine="transformers-neuronx",
    runs_on="neuron",
    package="transformers_neuronx",
    requires=("transformers-neuronx",),
    loads=("hf", "split", "optimum-first"),
    uses_neuron_cache=True,
    install=(
        f"AWS's images of Neuron SDK 2.25 and before have it; else pip install transformers-neuronx {NEURON_INDEX}"
    ),
)
