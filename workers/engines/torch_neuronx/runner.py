"""How a worker runs the engine ``torch-neuronx``."""

from __future__ import annotations

from workers.engines.runner import Runner
from workers.engines.torch_neuronx.engine import buildables, open_torch_neuronx

RUNNER = Runner(encode=open_torch_neuronx, buildables=buildables)
