"""What a replica of Optimum Neuron costs."""

from __future__ import annotations

from placements.engines.memory import EngineCosts

COSTS = EngineCosts(on_nxd=True, rank0_embeds=True)
"""Its prefill and decode graphs are compiled one after the other. The surplus of rank 0 was measured and is not
explained: the code divides embedding and head among the cores. NxD Inference is not assumed to have it: with it
Llama-3.1-405B would not fit the 64 cores on which AWS's tutorials run it."""
