"""How a worker runs the engine ``nxd-inference``."""

from __future__ import annotations

from workers.engines.nxd_inference.block_engine import open_neuronx_distributed
from workers.engines.nxd_inference.engine import buildables
from workers.engines.runner import Runner

RUNNER = Runner(generate=open_neuronx_distributed, buildables=buildables)
