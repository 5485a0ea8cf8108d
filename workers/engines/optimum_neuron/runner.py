"""How a worker runs the engine ``optimum-neuron``."""

from __future__ import annotations

from workers.engines.optimum_neuron.engine import buildables, open_optimum
from workers.engines.runner import Runner

RUNNER = Runner(generate=open_optimum, buildables=buildables)
