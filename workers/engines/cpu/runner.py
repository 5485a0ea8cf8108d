"""How a worker runs the engine ``cpu``."""

from __future__ import annotations

from workers.engines.cpu.encoder import open_cpu_encoder
from workers.engines.cpu.engine import buildables, check, open_cpu
from workers.engines.runner import Runner

RUNNER = Runner(
    generate=open_cpu,
    encode=open_cpu_encoder,
    buildables=buildables,
    check=check,
    warm_imports=("workers.engines.cpu.checkpoint",),
)
