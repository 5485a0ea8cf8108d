"""How a worker runs the engine ``transformers-neuronx``."""

from __future__ import annotations

from workers.engines.runner import Runner
from workers.engines.transformers_neuronx.engine import buildables, open_transformers_neuronx

RUNNER = Runner(generate=open_transformers_neuronx, buildables=buildables)
